//! Look-up: where the bytes of a guest offset are.
//!
//! A disk in one piece answers at once. Otherwise the table has an entry for each block, and the caller is asked for
//! its bytes. Blocks that follow each other in the file, or have nothing, are answered as one run, as far as the
//! caller has their entries at hand.

use crate::error::Damage;
use crate::limit;

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
}

/// What a run of guest bytes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Zeros that take no space.
    Zero,
    /// Data, from this host offset on.
    Data(u64),
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

impl Disk {
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
            let place = table.entry_at(block);
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

    /// Host offset of a block's entry.
    fn entry_at(&self, block: u64) -> u64 {
        let index = match self.entries {
            Entries::Vhdx { chunk } => {
                block.saturating_add(block.checked_div(chunk).unwrap_or_default())
            }
            _ => block,
        };
        let bytes = index.saturating_mul(self.entry_bytes() as u64);
        self.offset.saturating_add(bytes)
    }

    /// What an entry says, with the host offset at which its block begins.
    fn decode(&self, raw: [u8; 8], unit: u64, file_bytes: u64) -> Result<Kind, Damage> {
        let [a, b, c, d, ..] = raw;
        let host = match self.entries {
            Entries::Vdi { data } => match u32::from_le_bytes([a, b, c, d]) {
                u32::MAX | VDI_DISCARDED => return Ok(Kind::Zero),
                number => u64::from(number).saturating_mul(unit).saturating_add(data),
            },
            Entries::Vhd { skip } => match u32::from_be_bytes([a, b, c, d]) {
                u32::MAX => return Ok(Kind::Zero),
                sector => u64::from(sector).saturating_mul(512).saturating_add(skip),
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
        };
        // The last block may be short, what is missing are zeros; but one that is not there at all was lost.
        if host >= file_bytes {
            return Err(Damage::BehindEnd(host));
        }
        Ok(Kind::Data(host))
    }
}

/// A block of a VDI whose content was discarded.
const VDI_DISCARDED: u32 = 0xffff_fffe;
/// The bits of a VHDX entry that are the host offset, in whole MiB.
const VHDX_OFFSET: u64 = !0xf_ffff;
