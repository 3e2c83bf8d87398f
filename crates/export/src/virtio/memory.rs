//! The memory of a guest in this process.
//!
//! The guest may write to it at any time, so nothing here is ever a Rust reference for longer than a
//! transfer of plain bytes: a guest that writes while the device does gets what it asked for, in its
//! own memory. Structures are read and written field by field with volatile or atomic accesses.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use gaur_block::Errno;
use memmap2::{MmapOptions, MmapRaw};

use super::sigbus::Watch;
use crate::error::errno_of;

/// What the device does with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Bytes of a guest that lie one after the other here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
}

impl Run {
    /// Copies the first bytes out.
    pub(crate) fn copy_to(self, into: &mut [u8]) {
        assert!(into.len() <= self.len, "a copy ends inside its run");
        // SAFETY: the run is mapped memory of at least that length, and `into` is ours alone, so
        // they do not overlap. What is read while the guest writes is bytes of either.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start.as_ptr(), into.as_mut_ptr(), into.len());
        }
    }

    /// Copies bytes in.
    #[cfg(test)]
    pub(crate) fn copy_from(self, from: &[u8]) {
        assert!(from.len() <= self.len, "a copy ends inside its run");
        // SAFETY: as above, the other way round.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), self.start.as_ptr(), from.len());
        }
    }
}

/// Where guest addresses lie.
pub(crate) trait GuestMemory: Send + Sync {
    /// The memory at `address`, at most `len` bytes and at least one; `None` when there is none, or
    /// it may not be used that way. It stays mapped for as long as this value lives, or as the
    /// transport keeps rings stopped before it takes memory away.
    fn run(&self, address: u64, len: usize, access: Access) -> Option<Run>;

    /// The device has written there (for the log of dirty pages).
    fn written(&self, _address: u64, _len: usize) {}

    /// Whether its owner has truncated a file of it.
    fn is_truncated(&self) -> bool {
        false
    }
}

/// Memory mapped from a descriptor, shared with other processes that have it.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// Declared first: it is dropped before the range may be mapped anew.
    watch: Watch,
    memory: MmapRaw,
}

impl Mapping {
    /// Maps `len` bytes from `offset` on, a multiple of the page; both are checked by the kernel.
    /// `writable` is false for memory that the other side lets us only read.
    pub(crate) fn new(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        writable: bool,
    ) -> Result<Mapping, Errno> {
        if len == 0 || !offset.is_multiple_of(rustix::param::page_size() as u64) {
            return Err(Errno::EINVAL);
        }
        let mut options = MmapOptions::new();
        options.offset(offset).len(len).no_reserve_swap();
        let memory = match writable {
            true => options.map_raw(&fd),
            false => options.map_raw_read_only(&fd),
        };
        let memory = memory.map_err(errno_of)?;
        let watch = Watch::new(memory.as_mut_ptr().expose_provenance(), len);
        Ok(Mapping { watch, memory })
    }

    /// Whether the other side has truncated the file, and a thread here has touched what is gone.
    pub(crate) fn is_truncated(&self) -> bool {
        self.watch.is_truncated()
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// The bytes from `offset` on, at most `len`; `None` when that is past the end.
    pub(crate) fn run(&self, offset: u64, len: usize) -> Option<Run> {
        let offset = usize::try_from(offset).ok()?;
        let left = self.len().checked_sub(offset).filter(|left| *left > 0)?;
        // SAFETY: the offset is inside the mapping.
        let start = unsafe { self.memory.as_mut_ptr().add(offset) };
        Some(Run {
            start: NonNull::new(start)?,
            len: left.min(len),
        })
    }
}
