//! The memory of one request: what the device reads, and what it writes.

use super::memory::{Access, GuestMemory, Run};
use super::ring::{Descriptor, Ring};
use super::violation::Violation;
use super::wire::{DESCRIPTORS_MAX, HEADER_BYTES, descriptor};

/// Room for the runs of an ordinary request, so that only unusual ones make it grow.
const RUNS_AT_START: usize = 130;

/// A request's memory as runs. Neighbours are joined.
pub(super) struct Chain {
    /// What the device reads, without the header.
    pub(super) readable: Vec<Run>,
    /// What it writes, without the status.
    pub(super) writable: Vec<Run>,
    /// Guest addresses of what it writes, for whoever keeps a log of that.
    pub(super) ranges: Vec<(u64, u32)>,
    pub(super) header: [u8; HEADER_BYTES],
    /// The status byte.
    pub(super) status: Option<Run>,
    descriptors: usize,
}

impl Chain {
    pub(super) fn new() -> Chain {
        Chain {
            readable: Vec::with_capacity(RUNS_AT_START),
            writable: Vec::with_capacity(RUNS_AT_START),
            ranges: Vec::with_capacity(RUNS_AT_START),
            header: [0; HEADER_BYTES],
            status: None,
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
        self.take_ends()
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
        let (access, runs) = if writes {
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
            match runs.last_mut() {
                Some(last) if last.continues_in(run) => last.len += run.len,
                _ => runs.push(run),
            }
        }
        Ok(())
    }

    /// Takes the header off the front and the status off the end.
    fn take_ends(&mut self) -> Result<(), Violation> {
        let len: u64 = self.readable.iter().map(|run| run.len as u64).sum();
        if len < HEADER_BYTES as u64 {
            return Err(Violation::Header { len });
        }
        let mut header = [0; HEADER_BYTES];
        take_front(&mut self.readable, &mut header);
        self.header = header;
        let last = self.writable.last_mut().ok_or(Violation::Status)?;
        self.status = Some(last.skip(last.len - 1));
        last.len -= 1;
        if last.len == 0 {
            self.writable.pop();
        }
        Ok(())
    }

    /// Bytes to read behind the header.
    pub(super) fn readable_bytes(&self) -> u64 {
        self.readable.iter().map(|run| run.len as u64).sum()
    }

    /// Bytes to write before the status.
    pub(super) fn writable_bytes(&self) -> u64 {
        self.writable.iter().map(|run| run.len as u64).sum()
    }
}

/// Copies the first bytes of `runs`, which have as many, and takes them off.
pub(super) fn take_front(runs: &mut Vec<Run>, into: &mut [u8]) {
    let mut at = 0;
    let mut whole = 0;
    while at < into.len() {
        let run = runs[whole];
        let count = run.len.min(into.len() - at);
        run.copy_to(&mut into[at..at + count]);
        at += count;
        if count == run.len {
            whole += 1;
        } else {
            runs[whole] = run.skip(count);
        }
    }
    runs.drain(..whole);
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
