//! Makes room: what was used longest ago goes first, chunk by chunk, and entries that no process has open as a whole.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::entry::{self, Entry};
use super::{ONCE, make_private};
use crate::CHUNK_BYTES;

/// How full the cache is when room was made, in percent of what it may hold.
const FULL_PERCENT: u64 = 90;
/// What removed entries are called while they go.
const GONE: &str = "gone-";

/// Removes what is above `bytes_max`, unless another process does just now.
pub(super) fn make_room(folder: &Path, bytes_max: u64) -> io::Result<()> {
    let lock = folder.join("evicting");
    let lock = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(lock)?;
    if lock.try_lock().is_err() {
        return Ok(());
    }
    let objects = folder.join("objects");
    make_private(&objects)?;
    let mut entries = Vec::new();
    let mut chunks: Vec<(u32, usize, u64)> = Vec::new();
    // What is wrong with one entry keeps no room from being made in the others.
    let mut outcome = Ok(());
    for found in fs::read_dir(&objects)? {
        let path = found?.path();
        match list(&path) {
            Ok(here) if here.is_empty() => {}
            Ok(here) => {
                let index = entries.len();
                let here = here.into_iter();
                chunks.extend(here.map(|(chunk, used)| (used, index, chunk)));
                entries.push(path);
            }
            Err(error) => outcome = Err(error),
        }
    }
    let here = chunks.len() as u64;
    if here * CHUNK_BYTES <= bytes_max {
        return outcome;
    }
    let stay = bytes_max / CHUNK_BYTES * FULL_PERCENT / 100;
    chunks.sort_unstable();
    chunks.truncate((here - stay.min(here)) as usize);
    let mut by_entry: Vec<Vec<u64>> = vec![Vec::new(); entries.len()];
    for (_, index, chunk) in chunks {
        by_entry[index].push(chunk);
    }
    for (path, chunks) in entries.into_iter().zip(by_entry) {
        if !chunks.is_empty() {
            outcome = outcome.and(remove(&path, &chunks));
        }
    }
    outcome
}

/// The chunks of an entry, with the seconds when each was used last. One that has none goes, if no process has it open. It is
/// not kept open: there may be more entries than files that a process may have.
fn list(path: &Path) -> io::Result<Vec<(u64, u32)>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name.starts_with(GONE) {
        return fs::remove_dir_all(path).map(|()| Vec::new());
    }
    if name.starts_with(ONCE) && remove_unused(path)? {
        return Ok(Vec::new());
    }
    let here: Vec<(u64, u32)> = match Entry::existing(path) {
        Ok(entry) => entry.here().collect(),
        // It is no whole entry, or goes just now.
        Err(_) => Vec::new(),
    };
    if here.is_empty() {
        remove_unused(path)?;
    }
    Ok(here)
}

/// Removes chunks of an entry, and the entry when they were all.
fn remove(path: &Path, chunks: &[u64]) -> io::Result<()> {
    let entry = match Entry::existing(path) {
        Ok(entry) => entry,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let removed = entry.remove(chunks);
    let none = entry.here().next().is_none();
    drop(entry);
    if none {
        remove_unused(path)?;
    }
    removed.map(drop)
}

/// Removes an entry that no process has open; false when one has.
pub(super) fn remove_unused(path: &Path) -> io::Result<bool> {
    let state = path.join("state");
    let file = match File::options().read(true).write(true).open(&state) {
        Ok(file) => file,
        // It is just being made, or was left half made: then it is empty and costs nothing.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if file.try_lock().is_err() || !entry::is_at(&file, &state)? {
        return Ok(false);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let gone: PathBuf = path.with_file_name(format!("{GONE}{name}"));
    fs::rename(path, &gone)?;
    fs::remove_dir_all(&gone)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::super::Cache;
    use super::*;
    use crate::store::Facts;

    fn facts(tag: Option<&str>) -> Facts {
        Facts {
            len_bytes: 8 * CHUNK_BYTES,
            tag: tag.map(str::to_owned),
        }
    }

    fn fill(entry: &Entry) {
        for chunk in 0..8 {
            entry.keep(chunk, &vec![7; CHUNK_BYTES as usize]).unwrap();
        }
    }

    #[test]
    fn room_is_made_and_what_is_open_stays_open() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 10 * CHUNK_BYTES).unwrap();
        let old = cache.entry("old", "", &facts(Some("1"))).unwrap();
        fill(&old);
        drop(old);
        cache.make_room().unwrap();
        let objects = || fs::read_dir(folder.path().join("objects")).unwrap().count();
        assert_eq!(objects(), 1);
        // Sixteen chunks where nine may stay.
        let new = cache.entry("new", "", &facts(Some("1"))).unwrap();
        fill(&new);
        cache.make_room().unwrap();
        let old = cache.entry("old", "", &facts(Some("1"))).unwrap();
        assert_eq!(old.here().count() + new.here().count(), 9);
        assert!(new.verify(new.here().next().unwrap().0).is_some());
        assert_eq!(objects(), 2);
    }

    #[test]
    fn what_has_no_tag_goes_when_it_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 100 * CHUNK_BYTES).unwrap();
        let (one, other) = (
            cache.entry("x", "", &facts(None)),
            cache.entry("x", "", &facts(None)),
        );
        fill(&one.unwrap());
        let other = other.unwrap();
        assert_eq!(other.here().count(), 0);
        cache.make_room().unwrap();
        let left = fs::read_dir(folder.path().join("objects")).unwrap();
        assert_eq!(left.count(), 1);
        assert!(other.epoch() == 0);
    }

    #[test]
    fn entries_without_chunks_and_broken_ones_go_unless_they_are_open() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 100 * CHUNK_BYTES).unwrap();
        let open = cache.entry("open", "", &facts(Some("1"))).unwrap();
        drop(cache.entry("closed", "", &facts(Some("1"))).unwrap());
        let full = cache.entry("full", "", &facts(Some("1"))).unwrap();
        fill(&full);
        drop(full);
        let broken = folder.path().join("objects/broken");
        fs::create_dir(&broken).unwrap();
        fs::write(broken.join("state"), [0; 9]).unwrap();
        cache.make_room().unwrap();
        let left = fs::read_dir(folder.path().join("objects")).unwrap();
        assert_eq!(left.count(), 2);
        assert!(!broken.exists());
        fill(&open);
        let again = cache.entry("open", "", &facts(Some("1"))).unwrap();
        assert_eq!(again.here().count(), 8);
    }
}
