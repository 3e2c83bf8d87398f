//! VHD, the format of Virtual PC and Hyper-V before VHDX; QEMU calls it vpc. Big endian.
//!
//! A footer of one sector ends the file. A fixed disk lies before it in one piece. A dynamic one begins with a copy of
//! the footer, which leads to a second header and that to a table of 32-bit sector numbers. Each block begins with a map of
//! its sectors, which says what was written; it is of use to differencing disks alone, elsewhere what was not written is
//! zeros, and it is skipped, as QEMU does.

use alloc::format;

use crate::bytes::{be16, be32, be64, sum};
use crate::error::Error;
use crate::limit;
use crate::map::{Disk, Entries, Map, Table, check_size, check_table};

/// Bytes of the footer, at the end of the file and, of a dynamic disk, at the start too.
pub const FOOTER_BYTES: u64 = 512;
/// Bytes of the header of a dynamic disk.
pub const DYNAMIC_BYTES: u64 = 1024;

/// Fields of the footer.
const COOKIE: &[u8] = b"conectix";
const DATA_OFFSET: usize = 16;
const CREATOR: core::ops::Range<usize> = 28..32;
const CURRENT_SIZE: usize = 48;
const GEOMETRY: usize = 56;
const TYPE: usize = 60;
const CHECKSUM: usize = 64;

const FIXED: u32 = 2;
const DYNAMIC: u32 = 3;
const DIFFERENCING: u32 = 4;

/// Fields of the header of a dynamic disk.
const DYNAMIC_COOKIE: &[u8] = b"cxsparse";
const TABLE_OFFSET: usize = 16;
const TABLE_ENTRIES: usize = 28;
const BLOCK_BYTES: usize = 32;
const DYNAMIC_CHECKSUM: usize = 36;

/// Programs whose disks are as long as their geometry says; those of others are as long as the footer says.
const BY_GEOMETRY: [&[u8]; 2] = [b"vpc ", b"qemu"];
/// Sectors of the largest geometry, which stands for any size.
const GEOMETRY_MAX: u64 = 65535 * 16 * 255;

/// A footer whose checksum is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footer {
    kind: u32,
    size_bytes: u64,
    /// Host offset of the header of a dynamic disk.
    data_offset: u64,
}

/// Whether a structure has the complement of the sum of all its other bytes.
fn has_checksum(bytes: &[u8], at: usize) -> bool {
    let (Some(stored), Some(field)) = (be32(bytes, at), bytes.get(at..at.saturating_add(4))) else {
        return false;
    };
    !sum(bytes).wrapping_sub(sum(field)) == stored
}

impl Footer {
    /// The footer of a file whose first and last sectors these are. The one at the end counts, unless it is damaged.
    pub fn find(first: &[u8], last: &[u8]) -> Result<Footer, Error> {
        let is_one = |sector: &&[u8]| sector.starts_with(COOKIE);
        let found = [last, first].into_iter().filter(is_one);
        if found.clone().next().is_none() {
            return Err(Error::damaged("not a VHD image: it has no footer"));
        }
        let sound = found.clone().find(|sector| has_checksum(sector, CHECKSUM));
        let sound = sound.and_then(Footer::read);
        sound.ok_or_else(|| Error::damaged("the checksum of the VHD footer is wrong"))
    }

    fn read(sector: &[u8]) -> Option<Footer> {
        let current = be64(sector, CURRENT_SIZE)?;
        let (cylinders, rest) = (be16(sector, GEOMETRY)?, be16(sector, GEOMETRY + 2)?);
        let [heads, sectors] = rest.to_be_bytes().map(u64::from);
        let by_geometry = u64::from(cylinders).saturating_mul(heads.saturating_mul(sectors));
        let creator = sector.get(CREATOR)?;
        let size_bytes = match by_geometry < GEOMETRY_MAX && BY_GEOMETRY.contains(&creator) {
            true => by_geometry.saturating_mul(512),
            false => current,
        };
        Some(Footer {
            kind: be32(sector, TYPE)?,
            size_bytes,
            data_offset: be64(sector, DATA_OFFSET)?,
        })
    }

    /// Host offset of the header of a dynamic disk.
    pub fn dynamic_header(&self) -> Option<u64> {
        (self.kind == DYNAMIC).then_some(self.data_offset)
    }

    /// The disk in a file of `file_bytes`; `header` is that of a dynamic disk.
    pub fn disk(&self, header: Option<&[u8]>, file_bytes: u64) -> Result<Disk, Error> {
        check_size(self.size_bytes)?;
        let size_bytes = self.size_bytes.next_multiple_of(512);
        match (self.kind, header) {
            (FIXED, _) if size_bytes.saturating_add(FOOTER_BYTES) > file_bytes => {
                let text = format!(
                    "fixed VHD of {size_bytes} bytes is in a file of {file_bytes}; it is damaged or was truncated"
                );
                Err(Error::damaged(text))
            }
            (FIXED, _) => Ok(Disk {
                size_bytes,
                block_bytes: None,
                map: Map::Flat(0),
                file_bytes,
                patches: None,
            }),
            (DYNAMIC, Some(header)) => dynamic(size_bytes, header, file_bytes),
            (DIFFERENCING, _) => {
                let text = "differencing VHD, which needs its parent, is not supported; \
                            merge it into its parent first";
                Err(Error::unsupported(text))
            }
            (other, _) => {
                let text = format!("VHD of type {other} is not supported, fixed and dynamic are");
                Err(Error::unsupported(text))
            }
        }
    }
}

/// A dynamic disk, by its header.
fn dynamic(size_bytes: u64, header: &[u8], file_bytes: u64) -> Result<Disk, Error> {
    if !header.starts_with(DYNAMIC_COOKIE) || !has_checksum(header, DYNAMIC_CHECKSUM) {
        return Err(Error::damaged("the header of the dynamic VHD is damaged"));
    }
    let short = || Error::damaged("the file ends in the header of the dynamic VHD");
    let offset = be64(header, TABLE_OFFSET).ok_or_else(short)?;
    let entries = u64::from(be32(header, TABLE_ENTRIES).ok_or_else(short)?);
    let block_bytes = u64::from(be32(header, BLOCK_BYTES).ok_or_else(short)?);
    if !block_bytes.is_power_of_two() || !limit::BLOCK_BYTES.contains(&block_bytes) {
        let text = format!("VHD blocks of {block_bytes} bytes are not supported");
        return Err(Error::unsupported(text));
    }
    if entries < size_bytes.div_ceil(block_bytes) {
        let text = format!("VHD table of {entries} blocks is too short for {size_bytes} bytes");
        return Err(Error::damaged(text));
    }
    check_table("VHD", offset, entries.saturating_mul(4), file_bytes)?;
    Ok(Disk {
        size_bytes,
        block_bytes: Some(block_bytes),
        map: Map::Table(Table {
            offset,
            entries: Entries::Vhd {
                // A bit for each sector, in whole sectors.
                skip: block_bytes.div_ceil(512 * 8).next_multiple_of(512),
            },
        }),
        file_bytes,
        patches: None,
    })
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    /// A footer of a fixed disk, with its checksum.
    fn footer(creator: &[u8; 4], current: u64, geometry: [u8; 4]) -> Vec<u8> {
        let mut footer = [0; 512];
        footer[..8].copy_from_slice(COOKIE);
        footer[CREATOR].copy_from_slice(creator);
        footer[CURRENT_SIZE..GEOMETRY].copy_from_slice(&current.to_be_bytes());
        footer[GEOMETRY..TYPE].copy_from_slice(&geometry);
        footer[TYPE..CHECKSUM].copy_from_slice(&FIXED.to_be_bytes());
        let sum = !sum(&footer);
        footer[CHECKSUM..CHECKSUM + 4].copy_from_slice(&sum.to_be_bytes());
        footer.to_vec()
    }

    /// Disks of VirtualBox lost their last megabytes when their geometry was taken for their size, those of old
    /// QEMU gained some when it was not.
    #[test]
    fn size_is_the_geometry_of_who_means_it_and_else_that_of_the_footer() {
        let small = [0, 10, 4, 17];
        let largest = [0xff, 0xff, 16, 255];
        for (creator, geometry, size) in [
            (b"vpc ", small, 10 * 4 * 17 * 512),
            (b"qemu", small, 10 * 4 * 17 * 512),
            (b"qemu", largest, 1 << 20),
            (b"win ", small, 1 << 20),
            (b"qem2", small, 1 << 20),
            (b"vbox", small, 1 << 20),
        ] {
            let footer = Footer::find(&[], &footer(creator, 1 << 20, geometry)).expect("sound");
            let disk = footer.disk(None, 4 << 20).expect("a disk");
            assert_eq!(disk.size_bytes, size, "{creator:?}");
        }
    }

    #[test]
    fn a_damaged_footer_is_replaced_by_its_copy() {
        let sound = footer(b"win ", 1 << 20, [0; 4]);
        let mut damaged = sound.clone();
        damaged[50] ^= 1;
        assert!(Footer::find(&sound, &damaged).is_ok());
        assert!(Footer::find(&damaged, &sound).is_ok());
        assert!(Footer::find(&damaged, &damaged).is_err());
        assert!(Footer::find(&[], &[]).is_err());
    }
}
