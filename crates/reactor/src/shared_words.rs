//! Memory in a file that outlives the process: numbers that the next process finds as they were, even
//! when this one is killed between two of them.

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use gaur_block::Errno;
use memmap2::{MmapOptions, MmapRaw};

use crate::lock;

/// Numbers that live in a file. In use by one process at a time, or by many that share them.
#[derive(Debug)]
pub struct SharedWords {
    memory: MmapRaw,
    /// Keeps the lock.
    file: File,
}

impl SharedWords {
    /// Opens `path`, or makes it with zeros, readable by its owner alone, for `count` numbers (1 or
    /// more). Its space is taken at once, so that no store can fail for want of it.
    ///
    /// # Errors
    /// Those of the system; `WouldBlock` when another process has it, `InvalidData` when it is something else
    /// than a file of this length: then it stays as it is.
    pub fn open(path: &Path, count: usize) -> io::Result<SharedWords> {
        let file = open_or_make(path)?;
        file.try_lock().map_err(io::Error::from)?;
        SharedWords::map(file, count)
    }

    /// The same for all processes that open it so: `WouldBlock` while one has it for itself.
    ///
    /// # Errors
    /// As [`SharedWords::open`].
    pub fn open_shared(path: &Path, count: usize) -> io::Result<SharedWords> {
        let file = open_or_make(path)?;
        file.try_lock_shared().map_err(io::Error::from)?;
        SharedWords::map(file, count)
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Claims numbers of the file for this opening of it alone, if no other has claimed any of them.
    ///
    /// # Errors
    /// Those of the system.
    pub fn try_claim(&self, numbers: Range<u64>) -> io::Result<bool> {
        match lock::claim(self.file.as_fd(), libc::F_WRLCK, numbers) {
            Ok(()) => Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
            Err(errno) => Err(io::Error::from_raw_os_error(errno.raw())),
        }
    }

    /// Gives claimed numbers back.
    pub fn give_back(&self, numbers: Range<u64>) {
        // Giving back what is not claimed changes nothing.
        let _ = lock::claim(self.file.as_fd(), libc::F_UNLCK, numbers);
    }

    fn map(file: File, count: usize) -> io::Result<SharedWords> {
        let too_long = || io::Error::from(io::ErrorKind::InvalidInput);
        let len_bytes = count.checked_mul(size_of::<AtomicU64>());
        let len_bytes = len_bytes.filter(|len| *len > 0).ok_or_else(too_long)?;
        let len = libc::off_t::try_from(len_bytes).map_err(|_| too_long())?;
        let found = file.metadata()?;
        if !found.is_file() || (found.len() != 0 && found.len() != len_bytes as u64) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: the descriptor is open; no memory is involved.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
            0 => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
        let memory = MmapOptions::new().len(len_bytes).map_raw(&file)?;
        Ok(SharedWords { memory, file })
    }
}

fn open_or_make(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.mode(0o600).open(path)
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        let count = self.memory.len() / size_of::<AtomicU64>();
        // SAFETY: the mapping is `count` words long, aligned to a page, holds any bits, and lives as
        // long as `self`; another process that maps the file holds no lock on it and breaks only its own.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), count) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn those_who_share_numbers_claim_some_and_keep_others_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words");
        let one = SharedWords::open_shared(&path, 10).unwrap();
        let other = SharedWords::open_shared(&path, 10).unwrap();
        let alone = SharedWords::open(&path, 10).unwrap_err();
        assert_eq!(alone.kind(), io::ErrorKind::WouldBlock);
        one[3].store(7, Ordering::Relaxed);
        assert_eq!(other[3].load(Ordering::Relaxed), 7);
        assert!(one.try_claim(2..5).unwrap());
        assert!(!other.try_claim(4..6).unwrap());
        assert!(other.try_claim(5..6).unwrap());
        one.give_back(2..5);
        assert!(other.try_claim(4..5).unwrap());
        drop((one, other));
        assert!(SharedWords::open(&path, 10).is_ok());
    }

    #[test]
    fn numbers_are_there_for_the_next_and_for_one_at_a_time() {
        let path = std::env::temp_dir().join(format!("gaur-words-{}", std::process::id()));
        let words = SharedWords::open(&path, 1000).unwrap();
        assert_eq!(words.len(), 1000);
        words[999].store(7, Ordering::Relaxed);
        let second = SharedWords::open(&path, 1000);
        assert_eq!(second.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(words);
        let words = SharedWords::open(&path, 1000).unwrap();
        assert_eq!(words[999].load(Ordering::Relaxed), 7);
        assert_eq!(words[0].load(Ordering::Relaxed), 0);
        std::fs::remove_file(&path).unwrap();
        assert!(SharedWords::open(&path, 0).is_err());
        let _ = std::fs::remove_file(&path);
    }
}
