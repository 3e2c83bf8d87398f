//! VHDX, the format of Hyper-V: two headers, two tables of regions, metadata as a list of items, and a table of blocks.
//! Little endian.
//!
//! Changes of its metadata go through a log. Where it was not replayed, what it says counts more than the tables
//! (`log`).

use alloc::format;

use crate::bytes::{crc32c, le16, le32, le64};
use crate::error::Error;
use crate::map::{Disk, Entries, Map, Table, check_size, check_table};

mod log;

pub use log::Patches;

/// Host offsets of the two headers, and their length in bytes.
pub const HEADERS: [u64; 2] = [64 << 10, 128 << 10];
/// See [`HEADERS`].
pub const HEADER_BYTES: u64 = 4096;
/// Host offsets of the two region tables, and their length in bytes.
pub const REGION_TABLES: [u64; 2] = [192 << 10, 256 << 10];
/// See [`REGION_TABLES`].
pub const REGION_TABLE_BYTES: u64 = 64 << 10;
/// Longest metadata region in bytes; Hyper-V makes one of 1 MiB.
const METADATA_REGION_BYTES_MAX: u64 = 16 << 20;

/// Structures that are there twice have their checksum here, and what it is a sum of has zeros there.
const CHECKSUM: usize = 4;
/// Fields of a header.
const SEQUENCE: usize = 8;
const LOG_GUID: core::ops::Range<usize> = 48..64;
const VERSION: usize = 66;
/// Entries of both kinds of table are 32 bytes long, and at most so many.
const ENTRY_BYTES: usize = 32;
const REGIONS_MAX: u32 = 2047;
const ITEMS_MAX: u16 = 2047;

/// GUIDs as they stand in the file.
type Guid = [u8; 16];
const REGION_BAT: Guid = guid(0x2dc2_7766, 0xf623, 0x4200, 0x9d64_115e_9bfd_4a08);
const REGION_METADATA: Guid = guid(0x8b7c_a206, 0x4790, 0x4b9a, 0xb8fe_575f_050f_886e);
const FILE_PARAMETERS: Guid = guid(0xcaa1_6737, 0xfa36, 0x4d43, 0xb3b6_33f0_aa44_e76b);
const DISK_SIZE: Guid = guid(0x2fa5_4224, 0xcd1b, 0x4876, 0xb211_5dbe_d83b_f4b8);
const DISK_ID: Guid = guid(0xbeca_12ab, 0xb2e6, 0x4523, 0x93ef_c309_e000_c746);
const LOGICAL_SECTOR: Guid = guid(0x8141_bf1d, 0xa96f, 0x4709, 0xba47_f233_a8fa_ab5f);
const PHYSICAL_SECTOR: Guid = guid(0xcda3_48c7, 0x445d, 0x4471, 0x9cc9_e988_5251_c556);

/// A GUID by its parts: three little-endian numbers and eight bytes.
const fn guid(one: u32, two: u16, three: u16, rest: u64) -> Guid {
    let (one, two, three) = (one.to_le_bytes(), two.to_le_bytes(), three.to_le_bytes());
    let rest = rest.to_be_bytes();
    [
        one[0], one[1], one[2], one[3], two[0], two[1], three[0], three[1], rest[0], rest[1],
        rest[2], rest[3], rest[4], rest[5], rest[6], rest[7],
    ]
}

/// A part of the file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Host offset.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Where table and metadata are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regions {
    bat: Region,
    /// It begins with the table of its items.
    pub metadata: Region,
}

fn has_checksum(bytes: &[u8]) -> bool {
    let (Some(stored), Some(rest)) = (
        le32(bytes, CHECKSUM),
        bytes.get(CHECKSUM.saturating_add(4)..),
    ) else {
        return false;
    };
    let before = bytes.get(..CHECKSUM).unwrap_or_default();
    crc32c(&[before, &[0; 4], rest]) == stored
}

/// The header that counts.
#[derive(Clone, Debug)]
pub struct Header<'a>(&'a [u8]);

impl Header<'_> {
    /// Where the log is that waits to be replayed; `None` if none does.
    pub fn log(&self) -> Result<Option<Region>, Error> {
        log::log_of(self.0)
    }

    /// What that log, whose bytes these are, changes in a file of `file_bytes`.
    pub fn replay(&self, log: &[u8], file_bytes: u64) -> Result<Patches, Error> {
        log::replay(self.0, log, file_bytes)
    }
}

/// Finds the newer of the sound headers.
pub fn find_header<'a>(headers: [&'a [u8]; 2]) -> Result<Header<'a>, Error> {
    let sound = |header: &&[u8]| header.starts_with(b"head") && has_checksum(header);
    let current = headers
        .into_iter()
        .filter(sound)
        .max_by_key(|header| le64(header, SEQUENCE));
    let current = current.ok_or_else(|| Error::damaged("both VHDX headers are damaged"))?;
    let version = le16(current, VERSION);
    if version != Some(1) {
        let version = version.unwrap_or_default();
        let text = format!("VHDX version {version} is not supported, 1 is");
        return Err(Error::unsupported(text));
    }
    Ok(Header(current))
}

/// Finds the regions in one of the two tables.
pub fn find_regions(tables: [&[u8]; 2]) -> Result<Regions, Error> {
    let sound = |table: &&[u8]| table.starts_with(b"regi") && has_checksum(table);
    let table = tables.into_iter().find(sound);
    let table = table.ok_or_else(|| Error::damaged("both VHDX region tables are damaged"))?;
    let count = le32(table, 8).unwrap_or_default();
    if count > REGIONS_MAX {
        return Err(Error::damaged(format!(
            "VHDX has {count} regions, more than there can be"
        )));
    }
    let (mut bat, mut metadata) = (None, None);
    let entries = table
        .get(16..)
        .unwrap_or_default()
        .chunks_exact(ENTRY_BYTES);
    for entry in entries.take(count as usize) {
        let region = Region {
            offset: le64(entry, 16).unwrap_or_default(),
            len: u64::from(le32(entry, 24).unwrap_or_default()),
        };
        match entry.first_chunk() {
            Some(&REGION_BAT) => bat = Some(region),
            Some(&REGION_METADATA) => metadata = Some(region),
            _ if le32(entry, 28).unwrap_or_default() & 1 != 0 => {
                let text =
                    "VHDX image needs a region that is not known, and cannot be read without it";
                return Err(Error::unsupported(text));
            }
            _ => {}
        }
    }
    match (bat, metadata) {
        (Some(bat), Some(metadata)) => Ok(Regions { bat, metadata }),
        _ => Err(Error::damaged(
            "VHDX lacks the region of its block table or its metadata",
        )),
    }
}

/// What the metadata items say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Items {
    block_bytes: u64,
    has_parent: bool,
    size_bytes: u64,
    sector_bytes: u64,
}

impl Regions {
    /// How much of the metadata region is to be read: its table and the items.
    pub fn metadata_bytes(&self) -> u64 {
        self.metadata.len.min(METADATA_REGION_BYTES_MAX)
    }

    /// The disk in a file of `file_bytes`, by what is in the metadata region. `patches` are what its log changes.
    pub fn disk(
        &self,
        metadata: &[u8],
        file_bytes: u64,
        patches: Option<Patches>,
    ) -> Result<Disk, Error> {
        let tables = REGION_TABLES.map(|offset| Region {
            offset,
            len: REGION_TABLE_BYTES,
        });
        let [first, second] = tables;
        let places = [first, second, self.bat, self.metadata];
        if patches
            .as_ref()
            .is_some_and(|patches| !patches.are_within(&places))
        {
            let text = "VHDX log changes more than the tables, which is not supported; \
                        'qemu-img check -r all -f vhdx' replays it, or opening it once in Hyper-V";
            return Err(Error::unsupported(text));
        }
        let longer = patches.as_ref().map(|patches| patches.file_bytes);
        let file_bytes = longer.unwrap_or(file_bytes);
        let items = read_items(metadata)?;
        let Items {
            block_bytes,
            size_bytes,
            sector_bytes,
            ..
        } = items;
        if items.has_parent {
            let text = "differencing VHDX, which needs its parent, is not supported; \
                        merge it into its parent first";
            return Err(Error::unsupported(text));
        }
        if !block_bytes.is_power_of_two() || !(1 << 20..=256 << 20).contains(&block_bytes) {
            return Err(Error::damaged(format!(
                "VHDX cannot have blocks of {block_bytes} bytes"
            )));
        }
        if !matches!(sector_bytes, 512 | 4096) || !size_bytes.is_multiple_of(sector_bytes) {
            let text = format!("VHDX of {size_bytes} bytes cannot have sectors of {sector_bytes}");
            return Err(Error::damaged(text));
        }
        check_size(size_bytes)?;
        // Each so many entries of blocks are followed by one of a map of sectors, which only differencing disks have.
        let chunk = sector_bytes
            .saturating_mul(1 << 23)
            .checked_div(block_bytes);
        let chunk = chunk.unwrap_or_default().max(1);
        let blocks = size_bytes.div_ceil(block_bytes);
        let last = blocks.saturating_sub(1);
        let entries = blocks.saturating_add(last.checked_div(chunk).unwrap_or_default());
        let Region { offset, len } = self.bat;
        check_table("VHDX", offset, len, file_bytes)?;
        if entries.saturating_mul(8) > len {
            let text = format!("VHDX table of {len} bytes is too short for {size_bytes} bytes");
            return Err(Error::damaged(text));
        }
        Ok(Disk {
            size_bytes,
            block_bytes: Some(block_bytes),
            map: Map::Table(Table {
                offset,
                entries: Entries::Vhdx { chunk },
            }),
            file_bytes,
            patches,
        })
    }
}

fn read_items(metadata: &[u8]) -> Result<Items, Error> {
    let broken = || Error::damaged("the metadata of the VHDX is damaged");
    if !metadata.starts_with(b"metadata") {
        return Err(broken());
    }
    let count = le16(metadata, 10).ok_or_else(broken)?;
    if count > ITEMS_MAX {
        return Err(broken());
    }
    let mut items = Items::default();
    let mut needs_more = false;
    let entries = metadata
        .get(32..)
        .unwrap_or_default()
        .chunks_exact(ENTRY_BYTES);
    for entry in entries.take(usize::from(count)) {
        let at = le32(entry, 16).ok_or_else(broken)? as usize;
        let number = || le32(metadata, at).map(u64::from).ok_or_else(broken);
        match entry.first_chunk() {
            Some(&FILE_PARAMETERS) => {
                items.block_bytes = number()?;
                let flags = le32(metadata, at.saturating_add(4)).ok_or_else(broken)?;
                items.has_parent = flags & 2 != 0;
            }
            Some(&DISK_SIZE) => items.size_bytes = le64(metadata, at).ok_or_else(broken)?,
            Some(&LOGICAL_SECTOR) => items.sector_bytes = number()?,
            Some(&DISK_ID | &PHYSICAL_SECTOR) => {}
            _ => needs_more |= le32(entry, 24).ok_or_else(broken)? & 4 != 0,
        }
    }
    // What a differencing disk needs besides is its parent.
    if needs_more && !items.has_parent {
        let text = "VHDX image needs metadata that is not known, and cannot be read without it";
        return Err(Error::unsupported(text));
    }
    Ok(items)
}
