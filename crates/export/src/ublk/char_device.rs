//! The character device of a ublk device: through it requests come, and answers go.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::thread;
use std::time::{Duration, Instant};

use gaur_block::Errno;

use super::info::char_path;
use super::uapi;
use crate::error::ServeError;

/// How long its node may take to appear, and to become this user's (udev does both).
const PATIENCE: Duration = Duration::from_secs(5);

/// `/dev/ublkcN`. The driver lets go of a server when this and every [`Descriptors`] are gone.
pub(super) struct CharDevice {
    file: File,
}

impl CharDevice {
    /// Opens it. One process has it at a time; it is waited for a little while another one that is
    /// ending still does.
    pub(super) fn open(id: u32) -> Result<CharDevice, ServeError> {
        let path = char_path(id);
        let end = Instant::now() + PATIENCE;
        loop {
            let error = match File::options().read(true).write(true).open(&path) {
                Ok(file) => return Ok(CharDevice { file }),
                Err(error) => error,
            };
            let may_change = matches!(
                error.raw_os_error(),
                Some(libc::ENOENT | libc::ENXIO | libc::EACCES | libc::EPERM | libc::EBUSY)
            );
            if !may_change || Instant::now() > end {
                let hint = match error.raw_os_error() {
                    Some(libc::EACCES | libc::EPERM) => {
                        " (for an unprivileged device a udev rule gives it to its owner)"
                    }
                    Some(libc::EBUSY) => " (another server has it)",
                    _ => "",
                };
                return Err(ServeError::new(format!("{path}: {error}{hint}")));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Copies the bytes of a write request, from `offset_bytes` of it on.
    pub(super) fn fetch(&self, offset: u64, memory: &mut [u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < memory.len() {
            let rest = &mut memory[done..];
            // SAFETY: the pointer and the length are those of a slice.
            let count = unsafe {
                libc::pread(
                    self.file.as_raw_fd(),
                    rest.as_mut_ptr().cast(),
                    rest.len(),
                    (offset + done as u64) as libc::off_t,
                )
            };
            done += moved(count)?;
        }
        Ok(())
    }

    /// Copies the bytes of a read request into it, from `offset_bytes` of it on.
    pub(super) fn deliver(&self, offset: u64, memory: &[u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < memory.len() {
            let rest = &memory[done..];
            // SAFETY: the pointer and the length are those of a slice.
            let count = unsafe {
                libc::pwrite(
                    self.file.as_raw_fd(),
                    rest.as_ptr().cast(),
                    rest.len(),
                    (offset + done as u64) as libc::off_t,
                )
            };
            done += moved(count)?;
        }
        Ok(())
    }
}

/// What a copy brought; to bring nothing, or more than can be, is no way on.
fn moved(count: isize) -> Result<usize, Errno> {
    match usize::try_from(count) {
        Ok(0) => Err(Errno::EIO),
        Ok(count) => Ok(count),
        Err(_) => match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR) => Ok(0),
            errno => Err(Errno::from_raw(errno.unwrap_or(libc::EIO))),
        },
    }
}

impl AsFd for CharDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A request as the driver describes it (`struct ublksrv_io_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    flags: u32,
    /// In sectors.
    pub(super) len_sectors: u32,
    /// The first sector.
    pub(super) start_sector: u64,
}

impl Descriptor {
    fn decode(bytes: &[u8; uapi::DESCRIPTOR_BYTES]) -> Descriptor {
        Descriptor {
            flags: u32::from_ne_bytes(uapi::take(bytes, 0)),
            len_sectors: u32::from_ne_bytes(uapi::take(bytes, 4)),
            start_sector: u64::from_ne_bytes(uapi::take(bytes, 8)),
        }
    }

    /// What is to be done, one of the `OP_` numbers if this program knows it.
    pub(super) fn operation(&self) -> u8 {
        self.flags as u8
    }

    /// Whether one of the `FLAG_` bits is set.
    pub(super) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// The descriptors of a queue's requests, by tag: memory that the driver writes.
pub(super) struct Descriptors {
    start: NonNull<u8>,
    len_bytes: usize,
    depth: u16,
}

impl Descriptors {
    /// Maps those of a queue.
    pub(super) fn map(device: &CharDevice, queue: u16, depth: u16) -> Result<Descriptors, Errno> {
        // SAFETY: asks for a number.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page_bytes = usize::try_from(page_bytes).map_err(|_| Errno::EINVAL)?;
        let len_bytes = uapi::descriptors_len(depth, page_bytes);
        // SAFETY: a new mapping of a file, wherever the kernel likes.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len_bytes,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                device.file.as_raw_fd(),
                uapi::descriptors_offset(queue, page_bytes) as libc::off_t,
            )
        };
        if start == libc::MAP_FAILED {
            let errno = std::io::Error::last_os_error().raw_os_error();
            return Err(Errno::from_raw(errno.unwrap_or(libc::EIO)));
        }
        Ok(Descriptors {
            start: NonNull::new(start.cast()).ok_or(Errno::EIO)?,
            len_bytes,
            depth,
        })
    }

    /// The request that has come with a tag. The driver writes it before it hands the tag over, and
    /// not again before the tag is handed back.
    pub(super) fn get(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "tags are those that were fetched");
        let at = usize::from(tag) * uapi::DESCRIPTOR_BYTES;
        // SAFETY: a tag's descriptor lies inside the mapping, which has whole pages for `depth` of
        // them; bytes have no alignment. Volatile, for the driver writes here.
        let bytes = unsafe {
            ptr::read_volatile(
                self.start
                    .add(at)
                    .cast::<[u8; uapi::DESCRIPTOR_BYTES]>()
                    .as_ptr(),
            )
        };
        Descriptor::decode(&bytes)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no other value has its address.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_read() {
        let mut bytes = [0; uapi::DESCRIPTOR_BYTES];
        bytes[0..4].copy_from_slice(&(1_u32 | uapi::FLAG_FUA).to_ne_bytes());
        bytes[4..8].copy_from_slice(&8_u32.to_ne_bytes());
        bytes[8..16].copy_from_slice(&99_u64.to_ne_bytes());
        let descriptor = Descriptor::decode(&bytes);
        assert_eq!(descriptor.operation(), uapi::OP_WRITE);
        assert!(descriptor.has(uapi::FLAG_FUA));
        assert!(!descriptor.has(uapi::FLAG_NOUNMAP));
        assert_eq!((descriptor.len_sectors, descriptor.start_sector), (8, 99));
    }
}
