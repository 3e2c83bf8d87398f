//! One object in the cache: its data, and what is known of each chunk.
//!
//! Processes meet in the words of `state`, which all of them have in memory. A chunk is there when the lowest bit of its
//! first word is set, which happens after its bytes were written. Who removes it clears the word, then
//! counts the epoch up, then makes the hole: so a reader that finds the epoch as it was before it looked at the word
//! has read what was there.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use gaur_reactor::SharedWords;

use super::evict;
use crate::CHUNK_BYTES;

/// `gaur\0` and the number of the layout, in the first word.
const MAGIC: u64 = 0x6761_7572_0000_0001;
const LEN_AT: usize = 1;
const EPOCH_AT: usize = 2;
/// Words before those of the first chunk, and of each chunk: state, and half of a BLAKE3 hash.
const HEADER_WORDS: usize = 8;
const CHUNK_WORDS: usize = 3;

/// In the first word of a chunk: it is there; the seconds when it was used last lie above.
const HERE: u64 = 1;
const TIME_SHIFT: u32 = 32;

/// Longest object that is kept, 16 TiB: its words take 1.5 GiB of the disk.
const LEN_MAX: u64 = 1 << 44;
/// Chunks that are removed at once, so that nobody waits long for one of them.
const BATCH: usize = 64;

/// How long another process may take to make or remove an entry.
const ATTEMPTS: u32 = 200;
const PAUSE: Duration = Duration::from_millis(10);

/// What is here of an object. While it is open no process removes it as a whole.
#[derive(Debug)]
pub(crate) struct Entry {
    words: SharedWords,
    data: File,
    folder: PathBuf,
    len_bytes: u64,
    /// The chunks whose hash this process has found right.
    verified: Box<[AtomicU64]>,
}

impl Entry {
    /// Opens the entry in a folder, or makes one.
    pub(super) fn open(folder: &Path, len_bytes: u64, about: &str) -> io::Result<Entry> {
        if len_bytes > LEN_MAX {
            let what = format!("objects of more than {LEN_MAX} bytes are not kept");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
        }
        let mut damaged = false;
        for _ in 0..ATTEMPTS {
            match Entry::try_open(folder, len_bytes, about) {
                Ok(Some(entry)) => return Ok(entry),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // It was removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    // Half of an entry serves nobody: what a full disk left, or something else, is begun anew, once.
                    let removed = evict::remove_unused(folder).unwrap_or(false);
                    if !removed && !folder.join("state").exists() {
                        let _ = fs::remove_file(folder.join("data"));
                        let _ = fs::remove_dir(folder);
                    }
                    let again = removed && error.kind() == io::ErrorKind::InvalidData;
                    if damaged || !again {
                        return Err(error);
                    }
                    damaged = true;
                }
            }
            std::thread::sleep(PAUSE);
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn try_open(folder: &Path, len_bytes: u64, about: &str) -> io::Result<Option<Entry>> {
        super::make_private(folder)?;
        let chunks = chunks_of(len_bytes);
        let count = usize::try_from(chunks).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (path, data_path) = (folder.join("state"), folder.join("data"));
        let data = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&data_path)?;
        // Where no file can be this long, nothing else is made.
        if data.metadata()?.len() == 0 {
            data.set_len(len_bytes)?;
        }
        let words = SharedWords::open_shared(&path, HEADER_WORDS + CHUNK_WORDS * count)?;
        if !is_at(words.file(), &path)? || !is_at(&data, &data_path)? {
            return Ok(None);
        }
        if words[0].load(Ordering::SeqCst) == 0 {
            fs::write(folder.join("about"), about)?;
            words[LEN_AT].store(len_bytes, Ordering::SeqCst);
            words[0].store(MAGIC, Ordering::SeqCst);
        }
        let fits = words[0].load(Ordering::SeqCst) == MAGIC
            && words[LEN_AT].load(Ordering::SeqCst) == len_bytes;
        if !fits {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if data.metadata()?.len() != len_bytes {
            data.set_len(len_bytes)?;
        }
        let verified = (0..chunks.div_ceil(64)).map(|_| AtomicU64::new(0));
        Ok(Some(Entry {
            words,
            data,
            folder: folder.to_owned(),
            len_bytes,
            verified: verified.collect(),
        }))
    }

    /// Opens the entry in a folder as it is, for who makes room.
    pub(super) fn existing(folder: &Path) -> io::Result<Entry> {
        let path = folder.join("state");
        let size = fs::metadata(&path)?.len();
        let file_len = fs::metadata(folder.join("data"))?.len();
        let expected = HEADER_WORDS as u64 + CHUNK_WORDS as u64 * chunks_of(file_len);
        if size != expected * 8 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let entry = Entry::try_open(folder, file_len, "")?;
        entry.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The bytes that are here, to be read by a host.
    pub(crate) fn open_data(&self) -> io::Result<File> {
        File::open(self.folder.join("data"))
    }

    pub(crate) fn chunks(&self) -> u64 {
        chunks_of(self.len_bytes)
    }

    /// The bytes of the object that make up chunks.
    pub(crate) fn bytes_of(&self, chunks: Range<u64>) -> Range<u64> {
        chunks.start * CHUNK_BYTES..(chunks.end * CHUNK_BYTES).min(self.len_bytes)
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.words[EPOCH_AT].load(Ordering::SeqCst)
    }

    /// The first word of a chunk.
    fn state(&self, chunk: u64) -> &AtomicU64 {
        &self.words[HEADER_WORDS + CHUNK_WORDS * chunk as usize]
    }

    fn hash_words(&self, chunk: u64) -> [&AtomicU64; 2] {
        let at = HEADER_WORDS + CHUNK_WORDS * chunk as usize;
        [&self.words[at + 1], &self.words[at + 2]]
    }

    /// Whether a chunk can be read as it is: it is here, and was verified by this process.
    pub(crate) fn is_ready(&self, chunk: u64) -> bool {
        let state = self.state(chunk);
        let seen = state.load(Ordering::SeqCst);
        let verified = self.verified[chunk as usize / 64].load(Ordering::Relaxed);
        if seen & HERE == 0 || verified >> (chunk % 64) & 1 == 0 {
            return false;
        }
        let used = HERE | now() << TIME_SHIFT;
        if seen != used {
            // Who removes it meanwhile is not overwritten.
            let _ = state.compare_exchange(seen, used, Ordering::SeqCst, Ordering::Relaxed);
        }
        true
    }

    /// The bytes of a chunk that is here and right; one that is wrong is forgotten.
    pub(crate) fn verify(&self, chunk: u64) -> Option<Bytes> {
        let seen = self.state(chunk).load(Ordering::SeqCst);
        if seen & HERE == 0 {
            return None;
        }
        let range = self.bytes_of(chunk..chunk + 1);
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let read = self.data.read_exact_at(&mut bytes, range.start);
        let told = self
            .hash_words(chunk)
            .map(|word| word.load(Ordering::SeqCst));
        if read.is_ok() && hash(&bytes) == told {
            self.set_verified(chunk);
            return Some(bytes.into());
        }
        let state = self.state(chunk);
        let _ = state.compare_exchange(seen, 0, Ordering::SeqCst, Ordering::Relaxed);
        None
    }

    /// Keeps a chunk, which this process has claimed.
    pub(crate) fn keep(&self, chunk: u64, bytes: &[u8]) -> io::Result<()> {
        let range = self.bytes_of(chunk..chunk + 1);
        self.data.write_all_at(bytes, range.start)?;
        for (word, half) in self.hash_words(chunk).into_iter().zip(hash(bytes)) {
            word.store(half, Ordering::SeqCst);
        }
        self.state(chunk)
            .store(HERE | now() << TIME_SHIFT, Ordering::SeqCst);
        self.set_verified(chunk);
        Ok(())
    }

    fn set_verified(&self, chunk: u64) {
        self.verified[chunk as usize / 64].fetch_or(1 << (chunk % 64), Ordering::Relaxed);
    }

    /// Claims chunks, so that no other process fetches or removes them.
    pub(crate) fn try_claim(&self, chunks: Range<u64>) -> io::Result<bool> {
        self.words.try_claim(chunks)
    }

    pub(crate) fn give_back(&self, chunks: Range<u64>) {
        self.words.give_back(chunks);
    }

    /// The chunks that are here, with the seconds when each was used last.
    pub(super) fn here(&self) -> impl Iterator<Item = (u64, u32)> {
        let found = move |chunk| {
            let state = self.state(chunk).load(Ordering::Relaxed);
            (state & HERE != 0).then_some((chunk, (state >> TIME_SHIFT) as u32))
        };
        (0..self.chunks()).filter_map(found)
    }

    /// Removes chunks, those that nobody fetches just now; returns how many. An error ends nothing but its own batch.
    pub(super) fn remove(&self, chunks: &[u64]) -> io::Result<u64> {
        let mut removed = Ok(0);
        for batch in chunks.chunks(BATCH) {
            removed = match (removed, self.remove_batch(batch)) {
                (Ok(before), Ok(more)) => Ok(before + more),
                (Err(error), _) | (_, Err(error)) => Err(error),
            };
        }
        removed
    }

    fn remove_batch(&self, chunks: &[u64]) -> io::Result<u64> {
        let mut claimed = Vec::new();
        for chunk in chunks {
            // What cannot be claimed stays.
            if self.try_claim(*chunk..chunk + 1).unwrap_or(false) {
                self.state(*chunk).store(0, Ordering::SeqCst);
                claimed.push(*chunk);
            }
        }
        self.words[EPOCH_AT].fetch_add(1, Ordering::SeqCst);
        let mut outcome = Ok(());
        for chunk in &claimed {
            let range = self.bytes_of(*chunk..chunk + 1);
            let flags =
                rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            let len = range.end - range.start;
            let punched = rustix::fs::fallocate(&self.data, flags, range.start, len);
            outcome = outcome.and(punched);
            self.give_back(*chunk..chunk + 1);
        }
        outcome?;
        Ok(claimed.len() as u64)
    }
}

fn chunks_of(len_bytes: u64) -> u64 {
    len_bytes.div_ceil(CHUNK_BYTES)
}

/// Whether an open file is still what a path leads to.
pub(super) fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (own, there) = (file.metadata()?, fs::metadata(path)?);
    Ok((own.dev(), own.ino()) == (there.dev(), there.ino()))
}

/// Half of the hash, which is enough to tell what a power cut left from what was written.
fn hash(bytes: &[u8]) -> [u64; 2] {
    let hash = blake3::hash(bytes);
    let half = |from: usize| {
        let mut half = [0; 8];
        half.copy_from_slice(&hash.as_bytes()[from..from + 8]);
        u64::from_le_bytes(half)
    };
    [half(0), half(8)]
}

/// Seconds, as much of them as it takes to tell which chunk was used last.
fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    now.tv_sec as u64 & u64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 3 * CHUNK_BYTES + 100;

    fn open(folder: &Path) -> Entry {
        Entry::open(folder, LEN, "a test\n").unwrap()
    }

    fn bytes(chunk: u64, len: u64) -> Vec<u8> {
        vec![chunk as u8 + 1; len as usize]
    }

    #[test]
    fn what_is_kept_is_there_for_other_processes_and_after_them() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (open(folder.path()), open(folder.path()));
        one.keep(1, &bytes(1, CHUNK_BYTES)).unwrap();
        one.keep(3, &bytes(3, 100)).unwrap();
        assert!(one.is_ready(1) && one.is_ready(3) && !one.is_ready(0));
        // Another process verifies for itself.
        assert!(!other.is_ready(3));
        assert_eq!(other.verify(3).unwrap(), bytes(3, 100));
        assert!(other.is_ready(3));
        drop((one, other));
        let later = open(folder.path());
        assert_eq!(later.verify(1).unwrap(), bytes(1, CHUNK_BYTES));
        assert_eq!(later.verify(0), None);
        assert!(Entry::open(folder.path(), LEN + CHUNK_BYTES, "").is_err());
    }

    /// A full disk once left a part of `state`, and the object could not be opened any more.
    #[test]
    fn half_an_entry_is_begun_anew_and_impossible_lengths_leave_nothing() {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("key");
        drop(open(&folder));
        let state = File::options().write(true).open(folder.join("state"));
        state.unwrap().set_len(50).unwrap();
        open(&folder).keep(0, &bytes(0, CHUNK_BYTES)).unwrap();
        assert!(open(&folder).verify(0).is_some());
        let other = cache.path().join("other");
        assert!(Entry::open(&other, LEN_MAX + 1, "").is_err());
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_chunk_that_lost_its_bytes_is_not_served_and_fetched_again() {
        let folder = tempfile::tempdir().unwrap();
        open(folder.path()).keep(2, &bytes(2, CHUNK_BYTES)).unwrap();
        let data = File::options().write(true).open(folder.path().join("data"));
        data.unwrap()
            .write_all_at(&[0; 4096], 2 * CHUNK_BYTES + 4096)
            .unwrap();
        let entry = open(folder.path());
        assert_eq!(entry.verify(2), None);
        assert_eq!(entry.here().count(), 0);
        entry.keep(2, &bytes(2, CHUNK_BYTES)).unwrap();
        assert_eq!(
            open(folder.path()).verify(2).unwrap(),
            bytes(2, CHUNK_BYTES)
        );
    }

    #[test]
    fn a_removed_chunk_is_noticed_by_who_has_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let (reader, remover) = (open(folder.path()), open(folder.path()));
        reader.keep(0, &bytes(0, CHUNK_BYTES)).unwrap();
        reader.keep(1, &bytes(1, CHUNK_BYTES)).unwrap();
        let mark = reader.epoch();
        assert!(reader.try_claim(1..2).unwrap());
        assert_eq!(remover.remove(&[0, 1]).unwrap(), 1);
        assert!(reader.epoch() != mark && !reader.is_ready(0) && reader.is_ready(1));
        reader.give_back(1..2);
        assert_eq!(remover.remove(&[1]).unwrap(), 1);
        let mut data = [1; 16];
        reader
            .open_data()
            .unwrap()
            .read_exact_at(&mut data, 0)
            .unwrap();
        assert_eq!(data, [0; 16]);
    }
}
