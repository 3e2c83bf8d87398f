//! What wakes a reactor that sleeps in the kernel: an eventfd.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use gaur_block::Errno;

use crate::syscall;

/// Readable from [`Event::raise`] to [`Event::clear`].
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> Result<Event, Errno> {
        // SAFETY: no memory is passed; a descriptor that comes back is new and ours alone.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            if fd < 0 {
                return Err(syscall::last_errno());
            }
            Ok(Event(OwnedFd::from_raw_fd(fd)))
        }
    }

    pub(crate) fn raise(&self) {
        let one = 1_u64;
        // SAFETY: the pointer is to 8 bytes. The write fails only when the counter is full,
        // and then the event is readable already.
        let _ = unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    pub(crate) fn clear(&self) {
        let mut counter = 0_u64;
        // SAFETY: the pointer is to 8 bytes. Failing means that the counter is empty.
        let _ = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut counter).cast(), 8) };
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
