//! Poison: the first I/O error after which an image refuses writes.

use gaur_block::Errno;

use crate::sync::atomic::{AtomicI32, Ordering};

/// No error, or the first one; it stays until the image is opened again.
#[derive(Debug, Default)]
pub(crate) struct Poison {
    errno: AtomicI32,
    /// The image, for the event.
    image: String,
}

impl Poison {
    /// None yet, of the image with this name.
    pub(crate) fn new(image: String) -> Poison {
        Poison {
            errno: AtomicI32::new(0),
            image,
        }
    }

    /// The first error.
    pub(crate) fn get(&self) -> Option<Errno> {
        match self.errno.load(Ordering::Acquire) {
            0 => None,
            raw => Some(Errno::from_raw(raw)),
        }
    }

    /// Notes an error, unless there was one before.
    pub(crate) fn set(&self, errno: Errno) {
        let (set, order) = (errno.raw(), Ordering::Acquire);
        let first = self.errno.compare_exchange(0, set, Ordering::AcqRel, order);
        if first.is_ok() {
            let image = &self.image;
            tracing::error!(%image, %errno, "the image refuses writes until it is opened again");
        }
    }
}
