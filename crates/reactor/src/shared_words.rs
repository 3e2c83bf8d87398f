//! Memory in a file that outlives the process: numbers that the next process finds as they were, even
//! when this one is killed between two of them.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use memmap2::{MmapOptions, MmapRaw};

/// Numbers that live in a file. In use by one process at a time.
#[derive(Debug)]
pub struct SharedWords {
    memory: MmapRaw,
    /// Keeps the lock.
    _file: File,
}

impl SharedWords {
    /// Opens `path`, or makes it with zeros, readable by its owner alone, for `count` numbers (1 or
    /// more). Its space is taken at once, so that no store can fail for want of it.
    ///
    /// # Errors
    /// Those of the system; `WouldBlock` when another process has it, `InvalidData` when it is something else
    /// than a file of this length: then it stays as it is.
    pub fn open(path: &Path, count: usize) -> io::Result<SharedWords> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.mode(0o600).open(path)?;
        file.try_lock().map_err(io::Error::from)?;
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
        Ok(SharedWords {
            memory,
            _file: file,
        })
    }
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
