//! The file that holds the log of requests in flight.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::device::DEPTH;
use crate::virtio::inflight::{InflightLog, log_bytes};
use crate::virtio::memory::Mapping;

/// Where it lies: in memory, and there when the server is not.
const FOLDER: &str = "/dev/shm";

/// A log of all rings of a device, each with room for [`DEPTH`] entries.
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    mapping: Arc<Mapping>,
}

impl LogFile {
    /// Where the log of a device is.
    pub(super) fn path(name: &str) -> PathBuf {
        Path::new(FOLDER).join(format!("gaur-vduse-{name}"))
    }

    /// A blank log for `rings` rings.
    pub(super) fn create(path: PathBuf, rings: u16) -> Result<LogFile, String> {
        let _ = fs::remove_file(&path);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        let len = usize::from(rings) * log_bytes(DEPTH);
        file.set_len(len as u64)
            .map_err(|error| format!("cannot make {} longer: {error}", path.display()))?;
        LogFile::map(path, file, len)
    }

    /// The log that a server left behind.
    pub(super) fn open(path: PathBuf, rings: u16) -> Result<LogFile, String> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .map_err(|error| format!("cannot open {}: {error}", path.display()))?;
        let len = usize::from(rings) * log_bytes(DEPTH);
        let found = file.metadata().map_or(0, |facts| facts.len());
        if found != len as u64 {
            let path = path.display();
            return Err(format!(
                "{path} has {found} bytes, a log of this device {len}"
            ));
        }
        LogFile::map(path, file, len)
    }

    fn map(path: PathBuf, file: File, len: usize) -> Result<LogFile, String> {
        let mapping = Mapping::new(file.as_fd(), 0, len, true)
            .map_err(|errno| format!("cannot map {}: {errno}", path.display()))?;
        Ok(LogFile {
            path,
            file,
            mapping: Arc::new(mapping),
        })
    }

    /// Forgets everything: the driver starts anew.
    pub(super) fn clear(&self) -> Result<(), String> {
        let len = self.mapping.len() as u64;
        self.file
            .set_len(0)
            .and_then(|()| self.file.set_len(len))
            .map_err(|error| format!("cannot clear {}: {error}", self.path.display()))
    }

    /// The log of a ring.
    pub(super) fn ring(&self, ring: usize) -> Result<InflightLog, String> {
        let offset = (ring * log_bytes(DEPTH)) as u64;
        InflightLog::open(&self.mapping, offset, DEPTH)
    }

    /// Removes the file.
    pub(super) fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }
}
