//! The character device of a ublk device: through it requests come, and answers go.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use gaur_block::Errno;
use memmap2::{MmapOptions, MmapRaw};

use super::info::char_path;
use super::uapi;
use crate::error::{ServeError, errno_of};

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
        self.file.read_exact_at(memory, offset).map_err(errno_of)
    }

    /// Copies the bytes of a read request into it, from `offset_bytes` of it on.
    pub(super) fn deliver(&self, offset: u64, memory: &[u8]) -> Result<(), Errno> {
        self.file.write_all_at(memory, offset).map_err(errno_of)
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
    memory: MmapRaw,
    depth: u16,
}

impl Descriptors {
    /// Maps those of a queue.
    pub(super) fn map(device: &CharDevice, queue: u16, depth: u16) -> Result<Descriptors, Errno> {
        let page_bytes = rustix::param::page_size();
        let memory = MmapOptions::new()
            .offset(uapi::descriptors_offset(queue, page_bytes))
            .len(uapi::descriptors_len(depth, page_bytes))
            .populate()
            .map_raw_read_only(&device.file)
            .map_err(errno_of)?;
        Ok(Descriptors { memory, depth })
    }

    /// The request that has come with a tag. The driver writes it before it hands the tag over, and
    /// not again before the tag is handed back.
    pub(super) fn get(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "tags are those that were fetched");
        let all = self.memory.as_ptr().cast::<[u8; uapi::DESCRIPTOR_BYTES]>();
        // SAFETY: a tag's descriptor lies inside the mapping, which has whole pages for `depth` of
        // them; bytes have no alignment. Volatile, for the driver writes here.
        let bytes = unsafe { ptr::read_volatile(all.add(usize::from(tag))) };
        Descriptor::decode(&bytes)
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
