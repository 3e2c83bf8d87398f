//! The kernel's end of a mount, `/dev/fuse`: requests are read from it and answers written to it,
//! each in one call.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use gaur_block::Errno;

/// Where it is.
pub(super) const PATH: &str = "/dev/fuse";

/// `_IOR(229, 0, uint32_t)`: another descriptor of a mount, with requests of its own.
const CLONE: u32 = 0x8004_e500;

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

/// `ENODEV`: the mount is gone.
const ENODEV: Errno = Errno::from_raw(libc::ENODEV);
/// `ECONNABORTED`: it was aborted.
const ECONNABORTED: Errno = Errno::from_raw(libc::ECONNABORTED);

fn last_errno() -> Errno {
    let error = std::io::Error::last_os_error();
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Opens the device.
pub(super) fn open() -> Result<OwnedFd, Errno> {
    let flags = libc::O_RDWR | libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the path ends in NUL; a descriptor that open returns is new and ours alone.
    unsafe {
        match libc::open(c"/dev/fuse".as_ptr(), flags) {
            -1 => Err(last_errno()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Makes reading return at once when there is nothing; the helper that opened the device may not have set that.
pub(super) fn never_wait(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: no memory is passed.
    unsafe {
        let flags = libc::fcntl(fd.as_raw_fd(), libc::F_GETFL);
        if flags == -1 || libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) == -1
        {
            return Err(last_errno());
        }
    }
    Ok(())
}

/// Another descriptor of the mount behind `fd`.
pub(super) fn clone(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let another = open()?;
    let number = fd.as_raw_fd() as u32;
    // SAFETY: the kernel reads one `u32` through the pointer.
    let result = unsafe {
        libc::ioctl(
            another.as_raw_fd(),
            CLONE as libc::Ioctl,
            std::ptr::from_ref(&number),
        )
    };
    if result == -1 {
        return Err(last_errno());
    }
    Ok(another)
}

/// Takes a request, if there is one.
pub(super) fn receive(fd: BorrowedFd<'_>, memory: &mut [u8]) -> Result<Received, Errno> {
    loop {
        // SAFETY: the pointer and length are those of a slice that we may write to.
        let result =
            unsafe { libc::read(fd.as_raw_fd(), memory.as_mut_ptr().cast(), memory.len()) };
        if let Ok(len) = usize::try_from(result) {
            return Ok(Received::Request(len));
        }
        match last_errno() {
            Errno::EAGAIN => return Ok(Received::Nothing),
            // The request was given up while it was on its way.
            Errno::EINTR | Errno::ENOENT => {}
            ENODEV | ECONNABORTED => return Ok(Received::End),
            errno => return Err(errno),
        }
    }
}

/// Sends an answer, or a notification. That no program waits for it any more is no error.
pub(super) fn send(fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<(), Errno> {
    loop {
        // SAFETY: the pointer and length are those of a slice.
        let result = unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
        if result >= 0 {
            return Ok(());
        }
        match last_errno() {
            Errno::EINTR => {}
            Errno::ENOENT | ENODEV | ECONNABORTED => return Ok(()),
            errno => return Err(errno),
        }
    }
}

/// Waits until there is a request; `false` when the time is over.
pub(super) fn wait(fd: BorrowedFd<'_>, limit: Duration) -> Result<bool, Errno> {
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut wait = libc::pollfd {
            fd: fd.as_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let left_ms = left.as_millis().min(60_000) as libc::c_int;
        // SAFETY: the pointer is to one element.
        match unsafe { libc::poll(&raw mut wait, 1, left_ms) } {
            0 if left.is_zero() || left_ms == 0 => return Ok(false),
            0 => {}
            1.. => return Ok(true),
            _ => match last_errno() {
                Errno::EINTR => {}
                errno => return Err(errno),
            },
        }
    }
}
