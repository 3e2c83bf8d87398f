//! Look-up: where the bytes of a guest offset are.
//!
//! A disk in one piece answers at once. Otherwise the table has an entry for each block, and the caller is asked for
//! its bytes. Blocks that follow each other in the file, or have nothing, are answered as one run, as far as the
//! caller has their entries at hand.

use alloc::format;
use alloc::vec::Vec;

use crate::error::{Damage, Error};
use crate::limit;
use crate::vhdx::Patches;

/// A disk as its image's header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Length for the guest, in bytes, a multiple of 512.
    pub size_bytes: u64,
    /// Bytes that are allocated together; `None` where the disk lies in one piece.
    pub block_bytes: Option<u64>,
    pub(crate) map: Map,
    /// Length of the file in bytes.
    pub(crate) file_bytes: u64,
    /// What a log changes in the table.
    pub(crate) patches: Option<Patches>,
}

/// Where blocks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Map {
    /// One after the other from this host offset on.
    Flat(u64),
    /// As a table of entries says.
    Table(Table),
}

/// A table with an entry for each block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    /// Host offset of the first entry, a multiple of 512.
    pub(crate) offset: u64,
    pub(crate) entries: Entries,
}

/// What an entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entries {
    /// The number of the block in the part of the file that begins at host offset `data`.
    Vdi { data: u64 },
    /// The sector in which the block begins, with `skip` bytes that are not the guest's.
    Vhd { skip: u64 },
    /// The place and state of the block in 64 bits. So many are followed by one of something else.
    Vhdx { chunk: u64 },
    /// The sector in which the grain begins, in one of several tables.
    Vmdk(Grains),
}

/// The tables of a VMDK.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grains {
    /// The sector in which each begins; 0 where nothing was written.
    pub(crate) tables: Vec<u32>,
    /// Entries of each, 1 or more.
    pub(crate) table_entries: u64,
    /// The entry 1 is a grain of zeros.
    pub(crate) has_zero_grains: bool,
    pub(crate) compressed: bool,
}

/// What a run of guest bytes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing was ever written; it reads as zeros.
    Absent,
    /// Zeros that take no space.
    Zero,
    /// Data, from this host offset on.
    Data(u64),
    /// Part of a compressed grain, whose marker is at this host offset.
    Compressed(u64),
}

/// A run of guest bytes of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, at least 1.
    pub len: u64,
    /// What it is.
    pub kind: Kind,
}

/// The answer to a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The run that was asked for.
    Found(Extent),
    /// The entry at this host offset is needed first.
    Need(u64),
}

/// A damaged entry, and its host offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadEntry {
    /// Host offset of the entry.
    pub at: u64,
    /// What is wrong with it.
    pub damage: Damage,
}

/// Checks that the table of a `format` begins with a sector and is inside the file.
pub(crate) fn check_table(
    format: &str,
    offset: u64,
    len: u64,
    file_bytes: u64,
) -> Result<(), Error> {
    let end = offset.checked_add(len);
    let inside = end.is_some_and(|end| end <= file_bytes.next_multiple_of(512));
    if inside && offset.is_multiple_of(512) {
        return Ok(());
    }
    Err(Error::damaged(format!(
        "{format} table of {len} bytes at {offset} is not in sectors inside the file of {file_bytes} bytes; it is \
         damaged or was truncated"
    )))
}

/// Checks the size of a disk.
pub(crate) fn check_size(size_bytes: u64) -> Result<(), Error> {
    if size_bytes <= limit::DISK_BYTES_MAX {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "a disk of {size_bytes} bytes is more than is supported"
    )))
}

impl Disk {
    /// A disk of `size_bytes` that lies in one piece from host offset `start` on; shorter if the file ends before.
    pub fn flat(start: u64, size_bytes: u64, file_bytes: u64) -> Disk {
        let there = file_bytes.next_multiple_of(512).saturating_sub(start);
        Disk {
            size_bytes: size_bytes.min(there),
            block_bytes: None,
            map: Map::Flat(start),
            file_bytes,
            patches: None,
        }
    }

    /// Makes `bytes` of its table, which were read at host offset `at`, what they are to be.
    pub fn patch(&self, at: u64, bytes: &mut [u8]) {
        if let Some(patches) = &self.patches {
            patches.apply(at, bytes);
        }
    }

    /// Whether its blocks are compressed.
    pub fn is_compressed(&self) -> bool {
        matches!(&self.map, Map::Table(Table { entries: Entries::Vmdk(grains), .. }) if grains.compressed)
    }

    /// Whether the disk lies in one piece, so that holes of the file are holes of the disk.
    pub fn is_flat(&self) -> bool {
        matches!(self.map, Map::Flat(_))
    }

    /// The run that begins at guest offset `at` (below the size of the disk) and is at most `len` bytes (1 or more)
    /// long. `read` fills its argument with the bytes at a host offset, if the caller has them; entries are
    /// aligned to their length.
    pub fn extent(
        &self,
        at: u64,
        len: u64,
        mut read: impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<Lookup, BadEntry> {
        let len = len.min(self.size_bytes.saturating_sub(at)).max(1);
        let table = match &self.map {
            Map::Flat(start) => {
                let kind = Kind::Data(start.saturating_add(at));
                return Ok(Lookup::Found(Extent { len, kind }));
            }
            Map::Table(table) => table,
        };
        let unit = self.block_bytes.unwrap_or(1).max(1);
        let inside = at.checked_rem(unit).unwrap_or_default();
        let first = at.checked_div(unit).unwrap_or_default();
        let width = table.entry_bytes();
        let mut entry = |block: u64| -> Result<Result<Kind, u64>, BadEntry> {
            let Some(place) = table.entry_at(block, self.file_bytes)? else {
                return Ok(Ok(Kind::Absent));
            };
            let mut raw = [0; 8];
            if !raw.get_mut(..width).is_some_and(|raw| read(place, raw)) {
                return Ok(Err(place));
            }
            let bad = |damage| BadEntry { at: place, damage };
            table
                .decode(raw, unit, self.file_bytes)
                .map(Ok)
                .map_err(bad)
        };
        let start = match entry(first)? {
            Ok(kind) => kind,
            Err(needed) => return Ok(Lookup::Need(needed)),
        };
        let mut run = unit.saturating_sub(inside);
        let mut block = first;
        let mut joined = 1;
        while run < len && joined < limit::RUN_BLOCKS_MAX {
            block = block.saturating_add(1);
            let next = match start {
                // From the start of its first block on.
                Kind::Data(host) => Kind::Data(host.saturating_add(run.saturating_add(inside))),
                Kind::Compressed(_) => break,
                other => other,
            };
            // What is wrong with a later block is for the request to find that begins there.
            if entry(block) != Ok(Ok(next)) {
                break;
            }
            run = run.saturating_add(unit);
            joined = joined.saturating_add(1);
        }
        let kind = match start {
            Kind::Data(host) => Kind::Data(host.saturating_add(inside)),
            other => other,
        };
        let len = run.min(len);
        Ok(Lookup::Found(Extent { len, kind }))
    }
}

impl Table {
    /// Bytes of an entry.
    fn entry_bytes(&self) -> usize {
        match self.entries {
            Entries::Vhdx { .. } => 8,
            _ => 4,
        }
    }

    /// Host offset of a block's entry; `None` where there is no table because nothing was written.
    fn entry_at(&self, block: u64, file_bytes: u64) -> Result<Option<u64>, BadEntry> {
        let (start, index) = match &self.entries {
            Entries::Vdi { .. } | Entries::Vhd { .. } => (self.offset, block),
            Entries::Vhdx { chunk } => {
                let others = block.checked_div(*chunk).unwrap_or_default();
                (self.offset, block.saturating_add(others))
            }
            Entries::Vmdk(grains) => {
                let number = block.checked_div(grains.table_entries).unwrap_or_default();
                let inside = block.checked_rem(grains.table_entries).unwrap_or_default();
                let table = usize::try_from(number)
                    .ok()
                    .and_then(|number| grains.tables.get(number));
                let start = match table {
                    None | Some(0) => return Ok(None),
                    Some(sector) => u64::from(*sector).saturating_mul(512),
                };
                if start >= file_bytes {
                    let at = self.offset.saturating_add(number.saturating_mul(4));
                    let damage = Damage::BehindEnd(start);
                    return Err(BadEntry { at, damage });
                }
                (start, inside)
            }
        };
        let bytes = index.saturating_mul(self.entry_bytes() as u64);
        Ok(Some(start.saturating_add(bytes)))
    }

    /// What an entry says, with the host offset at which its block begins.
    fn decode(&self, raw: [u8; 8], unit: u64, file_bytes: u64) -> Result<Kind, Damage> {
        let [a, b, c, d, ..] = raw;
        let host = match &self.entries {
            Entries::Vdi { data } => match u32::from_le_bytes([a, b, c, d]) {
                u32::MAX | VDI_DISCARDED => return Ok(Kind::Zero),
                number => u64::from(number).saturating_mul(unit).saturating_add(*data),
            },
            Entries::Vhd { skip } => match u32::from_be_bytes([a, b, c, d]) {
                u32::MAX => return Ok(Kind::Zero),
                sector => u64::from(sector).saturating_mul(512).saturating_add(*skip),
            },
            Entries::Vhdx { .. } => {
                let entry = u64::from_le_bytes(raw);
                match entry & 7 {
                    // Not present, undefined, zero, unmapped, and unmapped before version 1.
                    0..=3 | 5 => return Ok(Kind::Zero),
                    6 => entry & VHDX_OFFSET,
                    _ => return Err(Damage::Entry(entry)),
                }
            }
            Entries::Vmdk(grains) => match u32::from_le_bytes([a, b, c, d]) {
                0 => return Ok(Kind::Absent),
                1 if grains.has_zero_grains => return Ok(Kind::Zero),
                sector => u64::from(sector).saturating_mul(512),
            },
        };
        // The last block may be short, what is missing are zeros; but one that is not there at all was lost.
        if host >= file_bytes {
            return Err(Damage::BehindEnd(host));
        }
        match &self.entries {
            Entries::Vmdk(grains) if grains.compressed => Ok(Kind::Compressed(host)),
            _ => Ok(Kind::Data(host)),
        }
    }
}

/// A block of a VDI whose content was discarded.
const VDI_DISCARDED: u32 = 0xffff_fffe;
/// The bits of a VHDX entry that are the host offset, in whole MiB.
const VHDX_OFFSET: u64 = !0xf_ffff;
