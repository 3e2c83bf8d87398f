//! The event that wakes a reactor which sleeps in the kernel: an eventfd.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use gaur_block::Errno;
use rustix::event::{EventfdFlags, eventfd};

use crate::syscall::again;

/// Readable from [`Event::raise`] to [`Event::clear`].
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> Result<Event, Errno> {
        again(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)).map(Event)
    }

    pub(crate) fn raise(&self) {
        // This fails only when the counter is full, and then the event is readable already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        // Failing means that the counter is empty.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
