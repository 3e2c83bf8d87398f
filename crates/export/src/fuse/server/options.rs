//! Options of an export as a file.

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::ServeError;
use crate::serve::Log;

/// Changes the size of the disk to so many bytes, or says why not. A disk may round the size up.
/// It is called on a thread of its own, one call at a time.
pub type Resize = Arc<dyn Fn(u64) -> Result<(), String> + Send + Sync>;

/// Whether other users than the one who runs the server can reach the file; its permissions hold in
/// any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllowOther {
    /// They cannot, not even root.
    Off,
    /// They can, or there is no export.
    On,
    /// They can where the system lets this user say so (`user_allow_other` in `/etc/fuse.conf`).
    #[default]
    Auto,
}

/// How an export as a file behaves.
#[derive(Clone)]
pub struct Options {
    /// The file that is covered; a regular file that exists.
    pub path: PathBuf,
    /// Writes are refused, whatever the device says.
    pub read_only: bool,
    /// Makes the file one that can be truncated, and that grows when it is written to beyond its
    /// end. Without it the size is fixed.
    pub resize: Option<Resize>,
    /// Who can reach the file.
    pub allow_other: AllowOther,
    /// Threads that serve it, at least 1.
    pub threads: usize,
    /// Requests that each of them serves at once, at least 1. Each has room for 1 MiB, of which only
    /// what was ever used takes memory.
    pub depth: u32,
    /// The reactor each of them runs.
    pub reactor: gaur_reactor::Config,
    /// Where lines about the export go.
    pub log: Option<Log>,
}

impl Options {
    /// A writable file of fixed size, one thread, 128 requests at once.
    pub fn new(path: impl Into<PathBuf>) -> Options {
        Options {
            path: path.into(),
            read_only: false,
            resize: None,
            allow_other: AllowOther::Auto,
            threads: 1,
            depth: 128,
            reactor: gaur_reactor::Config::default(),
            log: None,
        }
    }

    pub(super) fn check(&self) -> Result<(), ServeError> {
        if self.threads == 0 || self.threads > 1024 {
            return Err(ServeError::new("the number of threads must be 1 to 1024"));
        }
        if self.depth == 0 || self.depth > 4096 {
            return Err(ServeError::new("the queue depth must be 1 to 4096"));
        }
        Ok(())
    }
}
