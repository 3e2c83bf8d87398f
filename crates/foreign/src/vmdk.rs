//! VMDK, VMware's format. Little endian.
//!
//! A sparse file has a directory of tables of 32-bit sector numbers, one for each grain of 64 KiB or so. A stream-optimised one
//! has its grains compressed, each behind a marker, and may have its header once more at the end, where the
//! directory was known. A descriptor ([`descriptor`]) names the files of a disk and says how each is laid out; a file that
//! stands alone has it inside.

pub mod descriptor;

use alloc::format;
use alloc::vec::Vec;

use crate::bytes::{le16, le32, le64};
use crate::error::Error;
use crate::limit;
use crate::map::{Disk, Entries, Grains, Map, Table, check_size};

/// Bytes of the header, at the start of the file.
pub const HEADER_BYTES: u64 = 512;
/// Bytes at the end of a stream-optimised file: a marker, the header once more, and a marker.
pub const FOOTER_BYTES: u64 = 1536;

const MAGIC: &[u8] = b"KDMV";
/// The sparse files of ESX.
const MAGIC_ESX: &[u8] = b"COWD";
/// Fields of the header.
const VERSION: usize = 4;
const FLAGS: usize = 8;
const CAPACITY: usize = 12;
const GRAIN: usize = 20;
const DESCRIPTOR: usize = 28;
const DESCRIPTOR_LEN: usize = 36;
const TABLE_ENTRIES: usize = 44;
const DIRECTORY: usize = 56;
const COMPRESSION: usize = 77;

const FLAG_ZERO_GRAINS: u32 = 1 << 2;
const FLAG_COMPRESSED: u32 = 1 << 16;
/// The directory's place is told by the header at the end.
const AT_END: u64 = u64::MAX;
/// Of a compressed grain: the sector of the disk where it begins, its length in bytes, and then its bytes.
pub const GRAIN_MARKER_BYTES: u64 = 12;

/// A sparse file's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Length of the disk in bytes.
    pub size_bytes: u64,
    grain_bytes: u64,
    /// Host offset of the descriptor inside the file.
    descriptor: u64,
    descriptor_bytes: u64,
    table_entries: u64,
    directory: u64,
    flags: u32,
}

/// Whether the file begins like a sparse file; else it is a descriptor.
pub fn is_sparse(head: &[u8]) -> bool {
    head.starts_with(MAGIC) || head.starts_with(MAGIC_ESX)
}

impl Header {
    /// Reads the header of a sparse file. `end` is the last [`FOOTER_BYTES`] of the file.
    pub fn parse(head: &[u8], end: &[u8]) -> Result<Header, Error> {
        let header = Header::read(head)?;
        if header.directory != AT_END.saturating_mul(512) {
            return Ok(header);
        }
        let footer = end
            .get(512..)
            .ok_or_else(|| Error::damaged("the file lacks its VMDK footer"))?;
        let last = Header::read(footer)?;
        if last.directory == AT_END.saturating_mul(512) {
            return Err(Error::damaged(
                "the VMDK footer does not tell where its directory is",
            ));
        }
        // The descriptor is told by the first alone.
        Ok(Header {
            descriptor: header.descriptor,
            descriptor_bytes: header.descriptor_bytes,
            ..last
        })
    }

    fn read(head: &[u8]) -> Result<Header, Error> {
        if head.starts_with(MAGIC_ESX) {
            let text =
                "sparse VMDK of ESX (COWD) is not supported; 'vmkfstools -i' makes one that is";
            return Err(Error::unsupported(text));
        }
        if !head.starts_with(MAGIC) {
            return Err(Error::damaged("not a VMDK file: it lacks their signature"));
        }
        let short = || Error::damaged("the file ends in its VMDK header");
        let sectors = |at: usize| {
            le64(head, at)
                .map(|count| count.saturating_mul(512))
                .ok_or_else(short)
        };
        let version = le32(head, VERSION).ok_or_else(short)?;
        if !(1..=3).contains(&version) {
            let text = format!("VMDK version {version} is not supported, 1 to 3 are");
            return Err(Error::unsupported(text));
        }
        let header = Header {
            size_bytes: sectors(CAPACITY)?,
            grain_bytes: sectors(GRAIN)?,
            descriptor: sectors(DESCRIPTOR)?,
            descriptor_bytes: sectors(DESCRIPTOR_LEN)?,
            table_entries: u64::from(le32(head, TABLE_ENTRIES).ok_or_else(short)?),
            directory: sectors(DIRECTORY)?,
            flags: le32(head, FLAGS).ok_or_else(short)?,
        };
        check_size(header.size_bytes)?;
        let grain = header.grain_bytes;
        if !grain.is_power_of_two() || !limit::GRAIN_BYTES.contains(&grain) {
            return Err(Error::unsupported(format!(
                "VMDK grains of {grain} bytes are not supported"
            )));
        }
        if !limit::GRAIN_TABLE_ENTRIES.contains(&header.table_entries) {
            let text = format!(
                "VMDK tables of {} grains are not supported",
                header.table_entries
            );
            return Err(Error::unsupported(text));
        }
        if header.directory().1 > limit::DIRECTORY_BYTES_MAX {
            let text = format!(
                "a disk of {} bytes in grains of {grain} is more than is supported",
                header.size_bytes
            );
            return Err(Error::unsupported(text));
        }
        let compression = le16(head, COMPRESSION).ok_or_else(short)?;
        if header.is_compressed() && compression != 1 {
            let text = format!("VMDK compression {compression} is not supported, deflate (1) is");
            return Err(Error::unsupported(text));
        }
        Ok(header)
    }

    /// Whether grains are compressed.
    pub fn is_compressed(&self) -> bool {
        self.flags & FLAG_COMPRESSED != 0
    }

    /// Host offset and length in bytes of the descriptor inside the file, if it has one.
    pub fn descriptor(&self) -> Option<(u64, u64)> {
        let len = self.descriptor_bytes.min(limit::DESCRIPTOR_BYTES_MAX);
        (self.descriptor != 0 && len != 0).then_some((self.descriptor, len))
    }

    /// Host offset and length in bytes of the directory.
    pub fn directory(&self) -> (u64, u64) {
        let covered = self.grain_bytes.saturating_mul(self.table_entries).max(1);
        (
            self.directory,
            self.size_bytes.div_ceil(covered).saturating_mul(4),
        )
    }

    /// The disk in a file of `file_bytes`, by the bytes of its directory.
    pub fn disk(&self, directory: &[u8], file_bytes: u64) -> Disk {
        let tables = directory
            .as_chunks()
            .0
            .iter()
            .map(|raw| u32::from_le_bytes(*raw));
        let grains = Grains {
            tables: tables.collect::<Vec<u32>>(),
            table_entries: self.table_entries,
            has_zero_grains: self.flags & FLAG_ZERO_GRAINS != 0,
            compressed: self.is_compressed(),
        };
        Disk {
            size_bytes: self.size_bytes,
            block_bytes: Some(self.grain_bytes),
            map: Map::Table(Table {
                offset: self.directory,
                entries: Entries::Vmdk(grains),
            }),
            file_bytes,
            patches: None,
        }
    }
}

/// Length in bytes of the compressed grain behind a marker, if that is the marker of the grain at guest offset `at`.
pub fn grain_len(marker: &[u8], at: u64, grain_bytes: u64) -> Option<u64> {
    let start = le64(marker, 0)?.checked_mul(512)?;
    let len = u64::from(le32(marker, 8)?);
    // What does not compress grows by little.
    (start == at && len > 0 && len <= grain_bytes.saturating_mul(2)).then_some(len)
}
