//! What a server leaves to the next one when it is killed: the engine's log of commits, in memory that
//! outlives the process (a file in /run, which a reboot empties; see `gaur_engine::CommitLog`).
//!
//! Layout, in words of 64 bits: the header below, then two parts of [`CAPACITY`] records. Commits go to
//! the active part; a writeback pass makes the other one active and empties the first when it is done.
//! A record is guest cluster, entry, bitmap, and a mark over these and the part's generation, stored
//! last: what a kill cut short, or was left by an earlier use of the part, does not count.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gaur_engine::{Commit, CommitLog, ErrorKind};
use gaur_reactor::{BlockingFile, SharedWords, block_on};

use crate::failure::Failure;
use crate::notice::say;
use crate::shared_image::SharedImage;

const MAGIC: u64 = 0x6761_7572_6c6f_6701;
/// Records of a part.
const CAPACITY: usize = 1 << 17;
const RECORD_WORDS: usize = 4;
const PART_WORDS: usize = CAPACITY * RECORD_WORDS;
const HEADER_WORDS: usize = 64;

/// Words of the header.
mod word {
    pub const MAGIC: usize = 0;
    /// Four words: which start of the machine, and which file (device and number), it is about.
    pub const OWNER: usize = 1;
    /// The part that commits go to, 0 or 1.
    pub const ACTIVE: usize = 5;
    /// Of each part: how many records were begun, and its generation.
    pub const BEGUN: usize = 6;
    pub const GENERATION: usize = 8;
    /// Not 0 once a flush has failed.
    pub const FAILED: usize = 10;
}

/// The log of a server.
pub struct Handover {
    path: PathBuf,
    words: SharedWords,
    /// A server before had it and did not close the image.
    is_left: bool,
    /// Commits are noted from the moment on in which what was left has been taken over.
    is_live: AtomicBool,
}

/// What a server that was killed has left.
struct Left {
    commits: Vec<Commit>,
    /// There were more than fit.
    overflowed: bool,
    failed: bool,
}

impl Handover {
    /// Opens the log at `path` for the image in `image`. What belongs to another image, or to the time
    /// before this machine was started, is forgotten.
    pub fn open(path: &Path, image: impl AsRef<Path>) -> Result<Handover, Failure> {
        let image = image.as_ref();
        let shown = path.display().to_string();
        let count = HEADER_WORDS + 2 * PART_WORDS;
        let words = SharedWords::open(path, count).map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => {
                Failure::about(&shown, "another server uses it").kind(ErrorKind::Locked)
            }
            _ => Failure::io(&shown, &error),
        })?;
        let found = std::fs::metadata(image)
            .map_err(|error| Failure::io(&image.to_string_lossy(), &error))?;
        let identity = [boot()[0], boot()[1], found.dev(), found.ino()];
        let mut log = Handover {
            path: path.to_owned(),
            words,
            is_left: false,
            is_live: AtomicBool::new(false),
        };
        log.is_left = log.get(word::MAGIC) == MAGIC
            && identity
                .iter()
                .zip(word::OWNER..)
                .all(|(id, at)| log.get(at) == *id);
        if !log.is_left {
            log.set(word::MAGIC, 0);
            log.empty();
            for (id, at) in identity.iter().zip(word::OWNER..) {
                log.set(at, *id);
            }
            log.set(word::MAGIC, MAGIC);
        }
        Ok(log)
    }

    /// Whether a server was killed, and some of its requests may be under way yet.
    pub fn is_left(&self) -> bool {
        self.is_left
    }

    /// Takes over what a server that was killed has left, and notes commits from now on. Nothing else
    /// was done to the image since it was opened.
    pub fn take_over(&self, image: &SharedImage) -> Result<(), Failure> {
        let left = self.left();
        if left.failed {
            say("the last server could not flush: what it had not flushed is lost");
        } else {
            let queue = image.queue(BlockingFile::new);
            let adopted = block_on(queue.adopt(&left.commits));
            let changed = adopted.map_err(|errno| {
                Failure::system(image.name(), "cannot take over from the last server", errno)
            })?;
            if changed > 0 {
                say(format_args!(
                    "{changed} clusters taken over from a server that was killed"
                ));
            }
        }
        if left.overflowed {
            say("the last server had written more than its log holds: some of it is lost");
        }
        self.empty();
        self.is_live.store(true, Ordering::Release);
        Ok(())
    }

    /// Forgets what a server that was killed has left: who had been told of it is gone, too.
    pub fn forget(&self) {
        if !self.left().commits.is_empty() {
            say(
                "the last server was killed, and whoever used its disk is gone: what was not flushed is lost",
            );
        }
        self.empty();
    }

    /// The image was closed: there is nothing to hand over.
    pub fn remove(&self) {
        // Somebody may have removed it already.
        let _ = std::fs::remove_file(&self.path);
    }

    fn left(&self) -> Left {
        let active = self.active();
        let mut left = Left {
            commits: Vec::new(),
            overflowed: false,
            failed: self.get(word::FAILED) != 0,
        };
        for part in [1 - active, active] {
            let begun = self.get(word::BEGUN + part) as usize;
            left.overflowed |= begun > CAPACITY;
            let records = (0..begun.min(CAPACITY)).filter_map(|index| self.record(part, index));
            left.commits.extend(records);
        }
        left
    }

    /// A record, if it was finished.
    fn record(&self, part: usize, index: usize) -> Option<Commit> {
        let at = place(part, index);
        let commit = Commit {
            cluster: self.get(at),
            entry: self.get(at + 1),
            bitmap: self.get(at + 2),
        };
        let generation = self.get(word::GENERATION + part);
        (self.get(at + 3) == mark(commit, generation)).then_some(commit)
    }

    fn empty(&self) {
        for part in 0..2 {
            self.empty_part(part);
        }
        self.set(word::ACTIVE, 0);
        self.set(word::FAILED, 0);
    }

    fn empty_part(&self, part: usize) {
        self.words[word::GENERATION + part].fetch_add(1, Ordering::AcqRel);
        self.set(word::BEGUN + part, 0);
    }

    fn active(&self) -> usize {
        (self.get(word::ACTIVE) & 1) as usize
    }

    fn get(&self, at: usize) -> u64 {
        self.words[at].load(Ordering::Acquire)
    }

    fn set(&self, at: usize, value: u64) {
        self.words[at].store(value, Ordering::Release);
    }

    fn is_live(&self) -> bool {
        self.is_live.load(Ordering::Acquire)
    }
}

impl CommitLog for Handover {
    fn committed(&self, commit: Commit) {
        if !self.is_live() {
            return;
        }
        let part = self.active();
        let begun: &AtomicU64 = &self.words[word::BEGUN + part];
        let index = begun.fetch_add(1, Ordering::AcqRel) as usize;
        if index >= CAPACITY {
            return;
        }
        let at = place(part, index);
        self.set(at, commit.cluster);
        self.set(at + 1, commit.entry);
        self.set(at + 2, commit.bitmap);
        let generation = self.get(word::GENERATION + part);
        self.set(at + 3, mark(commit, generation));
    }

    fn pass_starts(&self) {
        if self.is_live() && self.get(word::FAILED) == 0 {
            self.set(word::ACTIVE, 1 - self.active() as u64);
        }
    }

    fn pass_ends(&self) {
        if self.is_live() {
            self.empty_part(1 - self.active());
        }
    }

    fn failed(&self) {
        if self.is_live() {
            self.set(word::FAILED, 1);
        }
    }

    fn is_filling(&self) -> bool {
        self.is_live() && self.get(word::BEGUN + self.active()) as usize > CAPACITY / 4
    }
}

impl fmt::Debug for Handover {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Handover")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// The first word of a record.
fn place(part: usize, index: usize) -> usize {
    HEADER_WORDS + part * PART_WORDS + index * RECORD_WORDS
}

/// What says that a record is whole and of this generation; never 0.
fn mark(commit: Commit, generation: u64) -> u64 {
    let mut mixed = generation;
    for word in [commit.cluster, commit.entry, commit.bitmap] {
        mixed = (mixed ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^= mixed >> 29;
    }
    mixed | 1
}

/// Which start of the machine this is; zeros where the kernel does not say.
fn boot() -> [u64; 2] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).unwrap_or(0);
    [(number >> 64) as u64, number as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(cluster: u64) -> Commit {
        Commit {
            cluster,
            entry: cluster << 16,
            bitmap: 0,
        }
    }

    fn clusters(log: &Handover) -> Vec<u64> {
        log.left()
            .commits
            .iter()
            .map(|commit| commit.cluster)
            .collect()
    }

    fn live(path: &Path, image: &str) -> Handover {
        let log = Handover::open(path, image).expect("it opens");
        log.is_live.store(true, Ordering::Release);
        log
    }

    #[test]
    fn a_pass_forgets_what_was_noted_before_it_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let image = folder.path().join("image").display().to_string();
        std::fs::write(&image, "").expect("a file");
        let log = live(&path, &image);
        log.committed(commit(1));
        log.pass_starts();
        log.committed(commit(2));
        drop(log);
        let log = live(&path, &image);
        assert_eq!(clusters(&log), [1, 2], "the pass has not ended");
        log.pass_ends();
        log.committed(commit(3));
        assert_eq!(clusters(&log), [2, 3]);
        log.pass_starts();
        log.pass_ends();
        assert!(clusters(&log).is_empty());
    }

    #[test]
    fn what_belongs_to_another_image_is_forgotten() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let images = ["one", "two"].map(|name| folder.path().join(name).display().to_string());
        for image in &images {
            std::fs::write(image, "").expect("a file");
        }
        let log = live(&path, &images[0]);
        log.committed(commit(1));
        assert!(Handover::open(&path, &images[0]).is_err(), "it is in use");
        drop(log);
        assert!(clusters(&live(&path, &images[1])).is_empty());
    }

    #[test]
    fn a_record_that_was_cut_short_does_not_count() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let image = folder.path().display().to_string();
        let log = live(&path, &image);
        log.committed(commit(1));
        log.committed(commit(2));
        log.set(place(0, 0) + 1, 99);
        assert_eq!(clusters(&log), [2]);
    }
}
