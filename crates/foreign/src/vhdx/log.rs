//! The log of a VHDX: changes of its metadata that are durable and may not have reached their places yet.
//!
//! It is a ring of entries, each with a checksum. The entries of the newest sequence that is whole count, from its tail on;
//! what they say is laid over what is read of the tables ([`Patches`]). The file is not changed.
//!
//! Time is bounded by the length of the log: each place in it is looked at once, and entries may not lie over each other
//! more than [`WORK_FACTOR`] times.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;

use super::{LOG_GUID, Region};
use crate::bytes::{crc32c, le32, le64};
use crate::error::Error;
use crate::limit;

/// The unit of the log and of what it changes, in bytes.
const SECTOR: usize = 4096;
/// Length of an entry's header, and of a descriptor.
const ENTRY_HEADER_BYTES: usize = 64;
const DESCRIPTOR_BYTES: usize = 32;
/// How many times the length of the log is checked at most.
const WORK_FACTOR: u64 = 3;

/// Where the log is that a header names; `None` where it says that there is nothing to replay.
pub(super) fn log_of(header: &[u8]) -> Result<Option<Region>, Error> {
    if header.get(LOG_GUID) == Some(&[0; 16]) {
        return Ok(None);
    }
    let len = u64::from(le32(header, 68).unwrap_or_default());
    let offset = le64(header, 72).unwrap_or_default();
    if len > limit::VHDX_LOG_BYTES_MAX {
        let text = format!(
            "VHDX image was not closed and has a log of {len} bytes to be replayed, {} at most are; \
             'qemu-img check -r all -f vhdx' replays it",
            limit::VHDX_LOG_BYTES_MAX
        );
        return Err(Error::unsupported(text));
    }
    if len == 0 || !len.is_multiple_of(1 << 20) || !offset.is_multiple_of(1 << 20) {
        let text = format!("VHDX log of {len} bytes at {offset} cannot be right");
        return Err(Error::damaged(text));
    }
    Ok(Some(Region { offset, len }))
}

/// What a log changes: parts of the file, none over another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patches {
    /// By host offset.
    parts: BTreeMap<u64, Part>,
    /// Length that the file has after all of it.
    pub(super) file_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    end: u64,
    /// A sector; zeros without one.
    bytes: Option<Box<[u8]>>,
}

impl Patches {
    /// Changes `bytes`, which were read at host offset `at`.
    pub fn apply(&self, at: u64, bytes: &mut [u8]) {
        let end = at.saturating_add(bytes.len() as u64);
        let first = self.parts.range(..=at).next_back();
        let from = first.map_or(at, |(start, _)| *start);
        for (start, part) in self.parts.range(from..end) {
            let (low, high) = ((*start).max(at), part.end.min(end));
            let place = low.saturating_sub(at) as usize..high.saturating_sub(at) as usize;
            let Some(place) = bytes.get_mut(place).filter(|_| low < high) else {
                continue;
            };
            let skip = low.saturating_sub(*start) as usize;
            let source = part.bytes.as_ref().and_then(|source| source.get(skip..));
            match source.and_then(|source| source.get(..place.len())) {
                Some(source) => place.copy_from_slice(source),
                None => place.fill(0),
            }
        }
    }

    /// Whether all of it lies in these parts of the file.
    pub(super) fn are_within(&self, regions: &[Region]) -> bool {
        self.parts.iter().all(|(start, part)| {
            regions.iter().any(|region| {
                let end = region.offset.saturating_add(region.len);
                *start >= region.offset && part.end <= end
            })
        })
    }

    /// Lays a part over what is there.
    fn add(&mut self, start: u64, part: Part) {
        let before = self.parts.range(..start).next_back();
        let before = before.map(|(start, part)| (*start, part.clone()));
        if let Some((low, below)) = before.filter(|(_, below)| below.end > start) {
            // Only zeros are longer than a sector.
            let rest = Part {
                end: below.end,
                bytes: None,
            };
            self.parts.insert(
                low,
                Part {
                    end: start,
                    ..below
                },
            );
            if rest.end > part.end {
                self.parts.insert(part.end, rest);
            }
        }
        while let Some((&low, below)) = self.parts.range(start..part.end).next() {
            let below_end = below.end;
            self.parts.remove(&low);
            if below_end > part.end {
                let rest = Part {
                    end: below_end,
                    bytes: None,
                };
                self.parts.insert(part.end, rest);
            }
        }
        self.parts.insert(start, part);
    }
}

/// An entry that is sound by itself.
#[derive(Clone, Copy, Debug)]
struct Entry {
    sequence: u64,
    /// Sectors of the log: where it begins, how many it has, and where the first entry of its sequence begins.
    at: usize,
    sectors: usize,
    tail: usize,
}

/// A log that was read.
struct Log<'a> {
    bytes: &'a [u8],
    guid: &'a [u8],
    /// Bytes that may still be checked.
    work: u64,
}

/// What the log changes, which is in a file of `file_bytes`; nothing if no sequence of entries is whole.
pub(super) fn replay(header: &[u8], bytes: &[u8], file_bytes: u64) -> Result<Patches, Error> {
    let mut log = Log {
        bytes,
        guid: header.get(LOG_GUID).unwrap_or_default(),
        work: (bytes.len() as u64).saturating_mul(WORK_FACTOR),
    };
    let mut entries = BTreeMap::new();
    for at in 0..log.sectors() {
        if let Some(entry) = log.entry(at)? {
            entries.insert(at, entry);
        }
    }
    let mut patches = Patches {
        file_bytes,
        ..Patches::default()
    };
    for entry in log.active(&entries)? {
        log.add(&entry, &mut patches)?;
    }
    Ok(patches)
}

impl Log<'_> {
    fn sectors(&self) -> usize {
        self.bytes.len().checked_div(SECTOR).unwrap_or_default()
    }

    fn sector(&self, number: usize) -> &[u8] {
        let number = number.checked_rem(self.sectors()).unwrap_or_default();
        let start = number.saturating_mul(SECTOR);
        let bytes = self.bytes.get(start..start.saturating_add(SECTOR));
        bytes.unwrap_or_default()
    }

    fn spend(&mut self, bytes: u64) -> Result<(), Error> {
        let left = self.work.checked_sub(bytes);
        self.work = left.ok_or_else(|| Error::damaged("entries of the VHDX log overlap"))?;
        Ok(())
    }

    /// The entry at a sector; `None` if there is none, or none that is whole.
    fn entry(&mut self, at: usize) -> Result<Option<Entry>, Error> {
        let head = self.sector(at);
        let field = |offset| le32(head, offset).unwrap_or_default();
        let (len, tail) = (field(8) as usize, field(12) as usize);
        let sequence = le64(head, 16).unwrap_or_default();
        let sectors = len.checked_div(SECTOR).unwrap_or_default();
        let sound = head.starts_with(b"loge")
            && head.get(32..48) == Some(self.guid)
            && sequence > 0
            && sectors > 0
            && sectors <= self.sectors()
            && len.is_multiple_of(SECTOR)
            && tail.is_multiple_of(SECTOR)
            && tail < self.bytes.len();
        if !sound {
            return Ok(None);
        }
        let stored = field(4);
        self.spend(len as u64)?;
        let head = self.sector(at);
        let (before, after) = head.split_at_checked(8).unwrap_or_default();
        let mut parts = Vec::with_capacity(sectors.saturating_add(3));
        parts.extend([before.get(..4).unwrap_or_default(), &[0; 4], after]);
        parts.extend((1..sectors).map(|number| self.sector(at.saturating_add(number))));
        let whole = crc32c(&parts) == stored;
        Ok(whole.then_some(Entry {
            sequence,
            at,
            sectors,
            tail: tail.checked_div(SECTOR).unwrap_or_default(),
        }))
    }

    /// The entries of the newest sequence that is whole, the oldest first.
    fn active(&mut self, entries: &BTreeMap<usize, Entry>) -> Result<Vec<Entry>, Error> {
        let mut heads: Vec<&Entry> = entries.values().collect();
        heads.sort_unstable_by_key(|entry| core::cmp::Reverse(entry.sequence));
        for head in heads {
            let mut sequence = Vec::new();
            let mut next = entries.get(&head.tail);
            while let Some(entry) = next {
                self.spend(DESCRIPTOR_BYTES as u64)?;
                let follows = sequence.last().is_none_or(|last: &Entry| {
                    last.sequence.checked_add(1) == Some(entry.sequence)
                });
                if !follows || sequence.len() >= self.sectors() {
                    break;
                }
                sequence.push(*entry);
                if entry.at == head.at {
                    return Ok(sequence);
                }
                let behind = entry.at.saturating_add(entry.sectors);
                next = entries.get(&behind.checked_rem(self.sectors()).unwrap_or_default());
            }
        }
        Ok(Vec::new())
    }

    /// Adds what an entry changes.
    fn add(&self, entry: &Entry, patches: &mut Patches) -> Result<(), Error> {
        let broken = || {
            let sequence = entry.sequence;
            Error::damaged(format!("entry {sequence} of the VHDX log is damaged"))
        };
        let head = self.sector(entry.at);
        let count = le32(head, 24).ok_or_else(broken)? as usize;
        let (flushed, last) = (le64(head, 48), le64(head, 56));
        let last = last.ok_or_else(broken)?;
        if flushed.is_none_or(|flushed| flushed > patches.file_bytes) {
            let text = "the VHDX file is shorter than its log says; it was truncated";
            return Err(Error::damaged(text));
        }
        if last > limit::DISK_BYTES_MAX {
            return Err(broken());
        }
        patches.file_bytes = patches.file_bytes.max(last);
        let listed = count
            .saturating_mul(DESCRIPTOR_BYTES)
            .saturating_add(ENTRY_HEADER_BYTES);
        let mut data = listed.div_ceil(SECTOR);
        if data > entry.sectors {
            return Err(broken());
        }
        for number in 0..count {
            let at = number
                .saturating_mul(DESCRIPTOR_BYTES)
                .saturating_add(ENTRY_HEADER_BYTES);
            let sector = entry
                .at
                .saturating_add(at.checked_div(SECTOR).unwrap_or_default());
            let place = at.checked_rem(SECTOR).unwrap_or_default();
            let descriptor = self.sector(sector).get(place..).ok_or_else(broken)?;
            let start = le64(descriptor, 16).ok_or_else(broken)?;
            let aligned = start.is_multiple_of(SECTOR as u64);
            if le64(descriptor, 24) != Some(entry.sequence) || !aligned {
                return Err(broken());
            }
            let (len, bytes) = if descriptor.starts_with(b"zero") {
                (le64(descriptor, 8).ok_or_else(broken)?, None)
            } else {
                if !descriptor.starts_with(b"desc") || data >= entry.sectors {
                    return Err(broken());
                }
                let sector = self.sector(entry.at.saturating_add(data));
                data = data.saturating_add(1);
                let bytes = restored(descriptor, sector, entry.sequence).ok_or_else(broken)?;
                (SECTOR as u64, Some(bytes))
            };
            let end = start
                .checked_add(len)
                .filter(|_| len > 0 && len.is_multiple_of(SECTOR as u64));
            let end = end.ok_or_else(broken)?;
            patches.add(start, Part { end, bytes });
        }
        Ok(())
    }
}

/// A sector as it was before it was logged: its first 8 and last 4 bytes are in the descriptor.
fn restored(descriptor: &[u8], sector: &[u8], sequence: u64) -> Option<Box<[u8]>> {
    let numbers = (le32(sector, 4)?, le32(sector, 4092)?);
    let own = ((sequence >> 32) as u32, sequence as u32);
    if !sector.starts_with(b"data") || numbers != own {
        return None;
    }
    let mut bytes = Vec::with_capacity(SECTOR);
    bytes.extend_from_slice(descriptor.get(8..16)?);
    bytes.extend_from_slice(sector.get(8..4092)?);
    bytes.extend_from_slice(descriptor.get(4..8)?);
    Some(bytes.into_boxed_slice())
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    fn zeros(end: u64) -> Part {
        Part { end, bytes: None }
    }

    fn sector(start: u64, byte: u8) -> Part {
        Part {
            end: start + SECTOR as u64,
            bytes: Some(vec![byte; SECTOR].into()),
        }
    }

    #[test]
    fn later_parts_lie_over_earlier_ones() {
        const S: u64 = SECTOR as u64;
        let mut patches = Patches::default();
        patches.add(0, zeros(8 * S));
        patches.add(2 * S, sector(2 * S, 2));
        patches.add(3 * S, sector(3 * S, 3));
        patches.add(S, zeros(3 * S));
        patches.add(5 * S, sector(5 * S, 5));
        patches.add(5 * S, sector(5 * S, 6));
        let mut bytes = vec![9; 10 * SECTOR];
        patches.apply(0, &mut bytes);
        let firsts: Vec<u8> = bytes.chunks(SECTOR).map(|sector| sector[0]).collect();
        assert_eq!(firsts, [0, 0, 0, 3, 0, 6, 0, 0, 9, 9]);
        // Reads that begin and end inside of parts.
        for (at, len) in [
            (1, 1),
            (100, 5 * SECTOR),
            (3 * SECTOR + 7, 4000),
            (6 * SECTOR + 1, 9000),
        ] {
            let mut part = vec![9; len];
            patches.apply(at as u64, &mut part);
            assert_eq!(part, bytes[at..at + len], "{at}");
        }
        let within = |regions: &[(u64, u64)]| {
            let regions: Vec<Region> = regions
                .iter()
                .map(|(offset, len)| Region {
                    offset: *offset,
                    len: *len,
                })
                .collect();
            patches.are_within(&regions)
        };
        assert!(within(&[(0, 8 * S)]) && !within(&[(0, 7 * S)]) && !within(&[(S, 9 * S)]));
    }
}
