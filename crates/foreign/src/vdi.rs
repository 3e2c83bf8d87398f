//! VDI, VirtualBox's format: one header, one table of 32-bit block numbers, blocks of 1 MiB. Little endian.

use alloc::format;

use crate::bytes::{le32, le64};
use crate::error::Error;
use crate::limit;
use crate::map::{Disk, Entries, Map, Table, check_size, check_table};

/// Bytes of the header, at the start of the file.
pub const HEADER_BYTES: u64 = 512;

/// Offsets of header fields, behind a text of 64 bytes.
const SIGNATURE: usize = 64;
const VERSION: usize = 68;
const TYPE: usize = 76;
const TABLE_OFFSET: usize = 340;
const DATA_OFFSET: usize = 344;
const SECTOR_BYTES: usize = 360;
const DISK_BYTES: usize = 368;
const BLOCK_BYTES: usize = 376;
const BLOCK_EXTRA: usize = 380;
const BLOCKS: usize = 384;
/// UUIDs of the image that this one continues: of its last change, and its own.
const LINK: core::ops::Range<usize> = 424..456;

const MAGIC: u32 = 0xbeda_107f;
const VERSION_1_1: u32 = 0x0001_0001;
const DYNAMIC: u32 = 1;
const STATIC: u32 = 2;

/// Reads the header of a file of `file_bytes`.
pub fn parse(header: &[u8], file_bytes: u64) -> Result<Disk, Error> {
    let short = || Error::damaged("the file ends in its VDI header");
    let le32 = |at: usize| le32(header, at).ok_or_else(short);
    if le32(SIGNATURE)? != MAGIC {
        return Err(Error::damaged("not a VDI image: it lacks their signature"));
    }
    let version = le32(VERSION)?;
    if version != VERSION_1_1 {
        let (major, minor) = (version >> 16, version & 0xffff);
        let text = format!("VDI version {major}.{minor} is not supported, 1.1 is");
        return Err(Error::unsupported(text));
    }
    let kind = le32(TYPE)?;
    let link = header.get(LINK).ok_or_else(short)?;
    if !matches!(kind, DYNAMIC | STATIC) || link.iter().any(|byte| *byte != 0) {
        let text = "VDI image is a snapshot or difference of another, which is not supported; \
                    'VBoxManage clonemedium' makes a whole one";
        return Err(Error::unsupported(text));
    }
    if le32(SECTOR_BYTES)? != 512 || le32(BLOCK_EXTRA)? != 0 {
        let text = "VDI image has other sectors than of 512 bytes, which is not supported";
        return Err(Error::unsupported(text));
    }
    let block_bytes = u64::from(le32(BLOCK_BYTES)?);
    if !block_bytes.is_power_of_two() || !limit::BLOCK_BYTES.contains(&block_bytes) {
        let text = format!("VDI blocks of {block_bytes} bytes are not supported");
        return Err(Error::unsupported(text));
    }
    let size = le64(header, DISK_BYTES).ok_or_else(short)?;
    check_size(size)?;
    let size_bytes = size.next_multiple_of(512);
    let (table, data) = (
        u64::from(le32(TABLE_OFFSET)?),
        u64::from(le32(DATA_OFFSET)?),
    );
    if !data.is_multiple_of(512) {
        let text = format!("VDI data at {data} do not begin with a sector");
        return Err(Error::damaged(text));
    }
    let blocks = u64::from(le32(BLOCKS)?);
    if blocks < size_bytes.div_ceil(block_bytes) {
        let text = format!("VDI table of {blocks} blocks is too short for {size} bytes");
        return Err(Error::damaged(text));
    }
    check_table("VDI", table, blocks.saturating_mul(4), file_bytes)?;
    Ok(Disk {
        size_bytes,
        block_bytes: Some(block_bytes),
        map: Map::Table(Table {
            offset: table,
            entries: Entries::Vdi { data },
        }),
        file_bytes,
        patches: None,
    })
}
