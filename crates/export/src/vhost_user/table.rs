//! The memory of the guest as the client described it.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::message::Payload;
use crate::virtio::memory::{Access, GuestMemory, Mapping, Run};

/// Unit of the log of dirty pages in bytes.
const LOG_PAGE: u64 = 4096;

/// A region as the client describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    guest: u64,
    len: u64,
    user: u64,
    offset: u64,
}

impl Place {
    pub(super) fn parse(payload: &mut Payload<'_>) -> Result<Place, String> {
        Ok(Place {
            guest: payload.u64()?,
            len: payload.u64()?,
            user: payload.u64()?,
            offset: payload.u64()?,
        })
    }

    /// Whether it is the same memory of the guest.
    pub(super) fn is_at(&self, other: &Place) -> bool {
        (self.guest, self.len, self.user) == (other.guest, other.len, other.user)
    }
}

/// A region of guest memory.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) place: Place,
    mapping: Arc<Mapping>,
}

impl Region {
    /// Maps a region.
    pub(super) fn map(place: Place, fd: &OwnedFd) -> Result<Region, String> {
        let Place {
            guest, len, offset, ..
        } = place;
        let what = format!("a region of {len} bytes at guest address {guest:#x}");
        let ends = [guest, place.user, offset].map(|start| start.checked_add(len));
        let [Some(_), Some(_), Some(end)] = ends else {
            return Err(format!("{what} goes past the end of addresses"));
        };
        // There are no pages behind the end of a file.
        if len == 0 || end > file_len(fd)? {
            return Err(format!("{what} is not in its file"));
        }
        let bytes = usize::try_from(end).map_err(|_| format!("{what} is too long"))?;
        // From the beginning: an offset into huge pages might be none that can be mapped.
        let mapping = Mapping::new(fd.as_fd(), 0, bytes, true)
            .map_err(|errno| format!("cannot map {what}: {errno}"))?;
        Ok(Region {
            place,
            mapping: Arc::new(mapping),
        })
    }

    fn run(&self, at: u64, len: usize) -> Option<Run> {
        let left = usize::try_from(self.place.len.checked_sub(at)?).ok()?;
        self.mapping.run(self.place.offset + at, len.min(left))
    }
}

pub(super) fn file_len(fd: &OwnedFd) -> Result<u64, String> {
    let facts = rustix::fs::fstat(fd).map_err(|_| "the file of a region says no length")?;
    Ok(u64::try_from(facts.st_size).unwrap_or(0))
}

/// All regions, which do not overlap, by guest address.
#[derive(Debug, Default)]
pub(super) struct Table {
    regions: Vec<Region>,
    dirty: Option<Arc<DirtyLog>>,
}

impl Table {
    /// A table of these regions.
    pub(super) fn new(
        mut regions: Vec<Region>,
        dirty: Option<Arc<DirtyLog>>,
    ) -> Result<Table, String> {
        regions.sort_by_key(|region| region.place.guest);
        for pair in regions.windows(2) {
            let [first, second] = [&pair[0].place, &pair[1].place];
            if first.guest + first.len > second.guest {
                let at = second.guest;
                return Err(format!("two regions overlap at guest address {at:#x}"));
            }
        }
        Ok(Table { regions, dirty })
    }

    /// The memory at an address of the client's, when all of it is in one region.
    pub(super) fn by_user_address(&self, at: u64, len: usize) -> Option<NonNull<u8>> {
        self.regions.iter().find_map(|region| {
            let run = region.run(at.checked_sub(region.place.user)?, len)?;
            (run.len == len).then_some(run.start)
        })
    }
}

impl GuestMemory for Table {
    fn run(&self, address: u64, len: usize, _: Access) -> Option<Run> {
        let after = self
            .regions
            .partition_point(|region| region.place.guest <= address);
        let region = self.regions.get(after.checked_sub(1)?)?;
        region.run(address - region.place.guest, len)
    }

    fn written(&self, address: u64, len: usize) {
        if let Some(dirty) = &self.dirty {
            dirty.mark(address, len as u64);
        }
    }

    fn is_truncated(&self) -> bool {
        self.regions
            .iter()
            .any(|region| region.mapping.is_truncated())
    }
}

/// The client's map of pages that were written, a bit each.
#[derive(Debug)]
pub(super) struct DirtyLog {
    mapping: Mapping,
}

impl DirtyLog {
    /// Maps it.
    pub(super) fn map(fd: &OwnedFd, offset: u64, len: u64) -> Result<DirtyLog, String> {
        let end = offset.checked_add(len).filter(|_| len > 0);
        if end.is_none_or(|end| file_len(fd).is_ok_and(|len| end > len)) {
            return Err("the log of dirty pages is not in its file".to_owned());
        }
        let len = usize::try_from(len).map_err(|_| "the log of dirty pages is too long")?;
        let mapping = Mapping::new(fd.as_fd(), offset, len, true)
            .map_err(|errno| format!("cannot map the log of dirty pages: {errno}"))?;
        Ok(DirtyLog { mapping })
    }

    fn mark(&self, address: u64, len: u64) {
        let Some(last) = address.checked_add(len.max(1) - 1) else {
            return;
        };
        for page in address / LOG_PAGE..=last / LOG_PAGE {
            let Some(run) = self.mapping.run(page / 8, 1) else {
                return;
            };
            // SAFETY: a mapped byte; everybody sets bits in it atomically.
            let byte = unsafe { AtomicU8::from_ptr(run.start.as_ptr()) };
            byte.fetch_or(1 << (page % 8), Ordering::Relaxed);
        }
    }
}
