//! Progress and cancellation of a long operation.

use gaur_block::Errno;

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A long operation, seen from outside. Any thread may look at it, or cancel it; what is cancelled
/// leaves the image as it was.
#[derive(Debug, Default)]
pub struct Job {
    done: AtomicU64,
    total: AtomicU64,
    cancelled: AtomicBool,
}

impl Job {
    /// Bytes done (of metadata, or of the disk when it is resized), and how many there are to do as far as is known (0: not yet).
    pub fn progress_bytes(&self) -> (u64, u64) {
        let total = self.total.load(Ordering::Relaxed);
        (self.done.load(Ordering::Relaxed).min(total), total)
    }

    /// Asks for the end of the operation. It may be too late: then it succeeds.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether the end was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// There is so much more to do.
    pub(crate) fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So much more was done; `ECANCELED` if the rest is not wanted.
    pub(crate) fn step(&self, bytes: u64) -> Result<(), Errno> {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        match self.is_cancelled() {
            true => Err(Errno::ECANCELED),
            false => Ok(()),
        }
    }
}
