//! Poison: the first I/O error after which an image refuses writes.

use gaur_block::Errno;

use crate::sync::atomic::{AtomicI32, Ordering};

/// No error, or the first one; it stays until the image is opened again.
#[derive(Debug, Default)]
pub(crate) struct Poison(AtomicI32);

impl Poison {
    /// The first error.
    pub(crate) fn get(&self) -> Option<Errno> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            raw => Some(Errno::from_raw(raw)),
        }
    }

    /// Notes an error, unless there was one before.
    pub(crate) fn set(&self, errno: Errno) {
        let _ = self
            .0
            .compare_exchange(0, errno.raw(), Ordering::AcqRel, Ordering::Acquire);
    }
}
