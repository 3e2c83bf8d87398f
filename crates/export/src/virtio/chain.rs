//! The memory of one request: what the device reads, and what it writes.

use gaur_block::{Segment, Segments, SegmentsMut};

use super::memory::{Access, GuestMemory};
use super::ring::{Descriptor, Ring};
use super::violation::Violation;
use super::wire::{DESCRIPTORS_MAX, HEADER_BYTES, descriptor};

/// Room for the memory of an ordinary request, so that only unusual ones make it grow.
const SEGMENTS_AT_START: usize = 130;

/// A request's memory, a guest's that stays mapped until the request is done. Neighbours are joined.
pub(super) struct Chain {
    /// What the device reads: the header, and data behind it.
    readable: Vec<Segment<'static>>,
    /// What it writes: data, and the status behind it.
    writable: Vec<Segment<'static>>,
    /// Guest addresses of what it writes, for the log of dirty pages.
    pub(super) ranges: Vec<(u64, u32)>,
    descriptors: usize,
}

impl Chain {
    pub(super) fn new() -> Chain {
        Chain {
            readable: Vec::with_capacity(SEGMENTS_AT_START),
            writable: Vec::with_capacity(SEGMENTS_AT_START),
            ranges: Vec::with_capacity(SEGMENTS_AT_START),
            descriptors: 0,
        }
    }

    /// Reads the chain that starts at `head`.
    pub(super) fn read(
        &mut self,
        ring: &Ring,
        memory: &dyn GuestMemory,
        indirect: bool,
        head: u16,
    ) -> Result<(), Violation> {
        self.readable.clear();
        self.writable.clear();
        self.ranges.clear();
        self.descriptors = 0;
        let mut index = head;
        loop {
            let part = ring.descriptor(index)?;
            if part.flags & descriptor::INDIRECT != 0 {
                if !indirect || part.flags & descriptor::NEXT != 0 {
                    return Err(Violation::Indirect);
                }
                self.read_table(memory, part)?;
                break;
            }
            self.add(memory, part)?;
            if part.flags & descriptor::NEXT == 0 {
                break;
            }
            if self.descriptors >= usize::from(ring.size()) {
                return Err(Violation::ChainLength);
            }
            index = part.next;
        }
        self.check_ends()
    }

    /// Follows a table of descriptors elsewhere in memory.
    fn read_table(&mut self, memory: &dyn GuestMemory, table: Descriptor) -> Result<(), Violation> {
        let len = table.len;
        let count = len as usize / descriptor::BYTES;
        if count == 0
            || !(len as usize).is_multiple_of(descriptor::BYTES)
            || count > DESCRIPTORS_MAX
        {
            return Err(Violation::TableLength { len });
        }
        let mut index = 0_u16;
        for _ in 0..count {
            let mut bytes = [0; descriptor::BYTES];
            let offset = u64::from(index) * descriptor::BYTES as u64;
            let address = table.address.checked_add(offset);
            copy_out(memory, address.unwrap_or(u64::MAX), &mut bytes)?;
            let part = Descriptor::from_bytes(bytes);
            if part.flags & descriptor::INDIRECT != 0 {
                return Err(Violation::Indirect);
            }
            self.add(memory, part)?;
            if part.flags & descriptor::NEXT == 0 {
                return Ok(());
            }
            index = part.next;
            if usize::from(index) >= count {
                let count = count as u16;
                return Err(Violation::Descriptor { index, count });
            }
        }
        Err(Violation::ChainLength)
    }

    fn add(&mut self, memory: &dyn GuestMemory, part: Descriptor) -> Result<(), Violation> {
        self.descriptors += 1;
        if self.descriptors > DESCRIPTORS_MAX {
            return Err(Violation::ChainLength);
        }
        let writes = part.flags & descriptor::WRITE != 0;
        if !writes && !self.writable.is_empty() {
            return Err(Violation::Order);
        }
        let (access, segments) = if writes {
            self.ranges.push((part.address, part.len));
            (Access::Write, &mut self.writable)
        } else {
            (Access::Read, &mut self.readable)
        };
        let mut at = part.address;
        let mut left = part.len as usize;
        while left > 0 {
            let run = memory.run(at, left, access).ok_or(Violation::Address {
                address: part.address,
                len: part.len,
            })?;
            left -= run.len;
            // It cannot wrap: the run is there, and it ends where the next begins.
            at = at.wrapping_add(run.len as u64);
            let (mut start, mut len) = (run.start.as_ptr(), run.len);
            if let Some(last) =
                segments.pop_if(|last| last.start().wrapping_add(last.len()) == start)
            {
                (start, len) = (last.start(), last.len() + len);
            }
            // SAFETY: guest memory stays mapped until the ring has come to rest, and this
            // process has no reference to it.
            segments.push(unsafe { Segment::from_raw(start, len) });
        }
        Ok(())
    }

    /// Looks for the header at the front and the status at the end.
    fn check_ends(&self) -> Result<(), Violation> {
        let len = Segments::new(&self.readable).len();
        if len < HEADER_BYTES {
            return Err(Violation::Header { len: len as u64 });
        }
        match self.all_writable().is_empty() {
            true => Err(Violation::Status),
            false => Ok(()),
        }
    }

    fn all_writable(&self) -> SegmentsMut<'_> {
        // SAFETY: the guest has the device write there, and `GuestMemory` has mapped it for that.
        unsafe { SegmentsMut::new(Segments::new(&self.writable)) }
    }

    pub(super) fn header(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        let first = Segments::new(&self.readable).split_at(HEADER_BYTES).0;
        first.copy_to(&mut header);
        header
    }

    /// What to read behind the header.
    pub(super) fn source(&self) -> Segments<'_> {
        Segments::new(&self.readable).split_at(HEADER_BYTES).1
    }

    /// Where to write, without the status.
    pub(super) fn target(&self) -> SegmentsMut<'_> {
        let all = self.all_writable();
        all.split_at(all.len() - 1).0
    }

    pub(super) fn set_status(&self, code: u8) {
        let all = self.all_writable();
        all.split_at(all.len() - 1).1.copy_from(&[code]);
    }
}

fn copy_out(memory: &dyn GuestMemory, address: u64, into: &mut [u8]) -> Result<(), Violation> {
    let len = into.len() as u32;
    let mut at = 0;
    while at < into.len() {
        let left = into.len() - at;
        let place = address.checked_add(at as u64);
        let run = place.and_then(|place| memory.run(place, left, Access::Read));
        let run = run.ok_or(Violation::Address { address, len })?;
        run.copy_to(&mut into[at..at + run.len]);
        at += run.len;
    }
    Ok(())
}
