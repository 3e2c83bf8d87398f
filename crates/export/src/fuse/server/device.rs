//! The kernel's end of a mount, `/dev/fuse`: requests are read from it and answers written to it,
//! each in one call.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use gaur_block::Errno;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno as Raw;
use rustix::ioctl::{Opcode, Setter, ioctl};

use crate::error::errno_of;

/// Where it is.
pub(super) const PATH: &str = "/dev/fuse";

/// `_IOR(229, 0, uint32_t)`: another descriptor of a mount, with requests of its own.
const CLONE: Opcode = 0x8004_e500;

/// What came of asking for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// One of so many bytes.
    Request(usize),
    /// There is none now.
    Nothing,
    /// There will be no more: it is unmounted.
    End,
}

/// Opens the device.
pub(super) fn open() -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(PATH, flags, Mode::empty()).map_err(errno_of)
}

/// Makes reading return at once when there is nothing; the helper that opened the device may not have set that.
pub(super) fn never_wait(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let flags = fcntl_getfl(fd).map_err(errno_of)?;
    fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(errno_of)
}

/// Another descriptor of the mount behind `fd`.
pub(super) fn clone(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let another = open()?;
    // SAFETY: the kernel reads one `u32`.
    unsafe { ioctl(&another, Setter::<CLONE, u32>::new(fd.as_raw_fd() as u32)) }
        .map_err(errno_of)?;
    Ok(another)
}

/// Takes a request, if there is one.
pub(super) fn receive(fd: BorrowedFd<'_>, memory: &mut [u8]) -> Result<Received, Errno> {
    loop {
        match rustix::io::read(fd, &mut *memory) {
            Ok(len) => return Ok(Received::Request(len)),
            Err(Raw::AGAIN) => return Ok(Received::Nothing),
            // The request was given up while it was on its way.
            Err(Raw::INTR | Raw::NOENT) => {}
            // The mount is gone, or was aborted.
            Err(Raw::NODEV | Raw::CONNABORTED) => return Ok(Received::End),
            Err(errno) => return Err(errno_of(errno)),
        }
    }
}

/// Sends an answer, or a notification. That no program waits for it any more is no error.
pub(super) fn send(fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<(), Errno> {
    match rustix::io::retry_on_intr(|| rustix::io::write(fd, bytes)) {
        Ok(_) | Err(Raw::NOENT | Raw::NODEV | Raw::CONNABORTED) => Ok(()),
        Err(errno) => Err(errno_of(errno)),
    }
}

/// Waits until there is a request; `false` when the time is over.
pub(super) fn wait(fd: BorrowedFd<'_>, limit: Duration) -> Result<bool, Errno> {
    let limit = Timespec::try_from(limit).map_err(|_| Errno::EINVAL)?;
    let mut wait = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| poll(&mut wait, Some(&limit)));
    ready.map(|count| count > 0).map_err(errno_of)
}
