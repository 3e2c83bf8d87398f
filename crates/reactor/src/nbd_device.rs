//! A block device of the kernel's NBD client (`/dev/nbdN`), by its ioctls (`include/uapi/linux/nbd.h`).
//!
//! The thread that sets a device up gives itself to the kernel in [`NbdDevice::run`], until the device is disconnected.
//! Another thread or process may do that by [`NbdDevice::disconnect`].

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use gaur_block::Errno;
use rustix::fs::{Mode, OFlags, open};

use crate::syscall;

/// `_IO(0xab, n)`
const SET_SOCK: u32 = 0xab00;
const SET_BLKSIZE: u32 = 0xab01;
const DO_IT: u32 = 0xab03;
const CLEAR_SOCK: u32 = 0xab04;
const CLEAR_QUE: u32 = 0xab05;
const SET_SIZE_BLOCKS: u32 = 0xab07;
const DISCONNECT: u32 = 0xab08;
const SET_FLAGS: u32 = 0xab0a;

/// What the kernel is told of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdGeometry {
    /// Smallest request, in bytes: a power of two from 512 to the size of a page.
    pub block_bytes: u32,
    /// Size of the device in such blocks.
    pub blocks: u64,
    /// Transmission flags, as the server has sent them.
    pub flags: u16,
}

/// An open device.
#[derive(Debug)]
pub struct NbdDevice {
    fd: OwnedFd,
}

impl NbdDevice {
    /// Opens a device, connected or not.
    ///
    /// # Errors
    /// `open`'s.
    pub fn open(path: &Path) -> Result<NbdDevice, Errno> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let fd = syscall::again(|| open(path, flags, Mode::empty()))?;
        Ok(NbdDevice { fd })
    }

    /// Gives the device a connection on which transmission has begun. The thread that calls it calls [`NbdDevice::run`].
    ///
    /// # Errors
    /// `EBUSY` for a device in use, `ENOTTY` for what is no such device.
    pub fn set_up(&self, socket: BorrowedFd<'_>, geometry: NbdGeometry) -> Result<(), Errno> {
        let socket = usize::try_from(socket.as_raw_fd()).map_err(|_| Errno::EBADF)?;
        let blocks = usize::try_from(geometry.blocks).map_err(|_| Errno::EFBIG)?;
        self.ioctl(SET_SOCK, socket)?;
        let rest = self
            .ioctl(SET_BLKSIZE, geometry.block_bytes as usize)
            .and_then(|()| self.ioctl(SET_SIZE_BLOCKS, blocks))
            .and_then(|()| self.ioctl(SET_FLAGS, usize::from(geometry.flags)));
        if rest.is_err() {
            self.clear();
        }
        rest
    }

    /// Gives this thread to the kernel until the device is disconnected, or its connection ends.
    ///
    /// # Errors
    /// The device could not be started.
    pub fn run(&self) -> Result<(), Errno> {
        let done = self.ioctl(DO_IT, 0);
        self.clear();
        match done {
            // The other side has ended the connection, as it does when it is told to.
            Err(Errno::EPIPE) => Ok(()),
            done => done,
        }
    }

    /// Disconnects the device, whoever runs it. One that is not connected stays so.
    ///
    /// # Errors
    /// `ENOTTY` for what is no such device.
    pub fn disconnect(&self) -> Result<(), Errno> {
        // Refused where the device was connected by netlink.
        let _ = self.ioctl(CLEAR_QUE, 0);
        match self.ioctl(DISCONNECT, 0) {
            Err(Errno::EINVAL) | Ok(()) => {}
            Err(errno) => return Err(errno),
        }
        let _ = self.ioctl(CLEAR_SOCK, 0);
        Ok(())
    }

    fn clear(&self) {
        let _ = self.ioctl(CLEAR_QUE, 0);
        let _ = self.ioctl(CLEAR_SOCK, 0);
    }

    fn ioctl(&self, call: u32, argument: usize) -> Result<(), Errno> {
        let fd = self.fd.as_fd().as_raw_fd();
        // SAFETY: the argument of these calls is a number, not memory. Other devices refuse them.
        let result = unsafe { libc::ioctl(fd, call as _, argument) };
        match result {
            -1 => Err(syscall::last_errno()),
            _ => Ok(()),
        }
    }
}
