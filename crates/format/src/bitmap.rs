//! Persistent dirty bitmaps: the directory and the entries of a bitmap's table.
//!
//! A directory entry is 24 bytes, extra data, the name, and zeros up to a multiple of eight. A table
//! entry is the host offset of a cluster of bits (9 to 55), or, where that is 0, a flag (bit 0) that
//! says whether all its bits are one.
//!
//! Crash rule: a bitmap that is being changed has [`IN_USE`] set in the directory, durably, before
//! the first change; a reader treats such a bitmap as lost.

use alloc::vec::Vec;
use core::ops::Range;

use crate::addr::HostOffset;
use crate::bytes;
use crate::error::{Corruption, CorruptionKind, Error, ErrorKind};
use crate::geometry::Geometry;
use crate::l1::OFFSET_MASK;
use crate::limit;

/// Flag: the bitmap was not closed and is out of date.
pub const IN_USE: u32 = 1;
/// Flag: the bitmap records all writes while the image is open.
pub const AUTO: u32 = 1 << 1;
/// Flag: the bitmap may be used although its extra data is not understood.
pub const EXTRA_DATA_COMPATIBLE: u32 = 1 << 2;

/// Name of the bitmap that is Gaur's own: the write-intent map, whose bits say which regions of the disk have
/// changed since the bitmaps that are in use were stored. It is in the directory while there are such bitmaps, and not in
/// use itself. It vouches for those behind it.
pub const WRITE_INTENT_MAP: &[u8] = b"gaur-write-intent-map";

/// A region of a write-intent map as a power of two, 64 MiB. Disks too large for a map of one cluster have larger
/// ones, and disks with less than [`REGIONS_WANTED`] of them smaller ones.
const REGION_BITS: u32 = 26;
const REGIONS_WANTED: u64 = 16;
const REGION_BITS_MIN: u32 = 16;

/// Where the flags are in an entry of the directory.
pub const FLAGS_AT: u64 = 12;

const KNOWN_FLAGS: u32 = IN_USE | AUTO | EXTRA_DATA_COMPATIBLE;
const DIRTY_TRACKING: u8 = 1;
const FIXED_BYTES: usize = 24;
const STRUCTURE: &str = "bitmap directory";

/// An entry of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Where its table starts.
    pub table_offset: HostOffset,
    /// Entries of its table, at least 1.
    pub table_entries: u32,
    /// [`IN_USE`], [`AUTO`], [`EXTRA_DATA_COMPATIBLE`].
    pub flags: u32,
    /// Bytes of the disk that one bit stands for, as a power of two, 9 to 31.
    pub granularity_bits: u8,
    /// Its unique name, 1 to 1023 bytes.
    pub name: Vec<u8>,
    /// Extra data, kept as it is.
    pub extra: Vec<u8>,
}

/// What one cluster of a bitmap is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapCluster {
    /// All bits are zero.
    Zeros,
    /// All bits are one.
    Ones,
    /// The bits are at a host offset.
    Stored(HostOffset),
}

/// How the bits of a bitmap lie: bit `n`, the lowest first in each byte, stands for the bytes of the disk from
/// `n` times the granularity on. Each entry of the table has a cluster of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapShape {
    size_bytes: u64,
    granularity_bits: u8,
    cluster_bits: u32,
}

impl BitmapShape {
    /// Of a bitmap for a disk of `size_bytes`.
    pub fn new(
        size_bytes: u64,
        granularity_bits: u8,
        geometry: &Geometry,
    ) -> Result<BitmapShape, Error> {
        check_granularity(granularity_bits)?;
        let shape = BitmapShape {
            size_bytes,
            granularity_bits,
            cluster_bits: geometry.cluster_bits(),
        };
        if shape.bits().div_ceil(8) > limit::BITMAP_BYTES_MAX {
            return Err(Error::new(
                ErrorKind::TooLarge,
                "bitmap",
                "granularity is too small for a disk of this size",
            )
            .found(format_args!("2^{granularity_bits} for {size_bytes} bytes"))
            .allowed("up to 2^32 bits"));
        }
        Ok(shape)
    }

    /// The granularity of a new bitmap, as QEMU chooses it: a cluster, but 4 to 64 KiB.
    pub fn default_granularity_bits(geometry: &Geometry) -> u8 {
        geometry.cluster_bits().clamp(12, 16) as u8
    }

    /// Of the write-intent map of a disk of `size_bytes`.
    pub fn of_write_intent_map(size_bytes: u64, geometry: &Geometry) -> Result<BitmapShape, Error> {
        let bits_per_cluster = 8u64.wrapping_shl(geometry.cluster_bits());
        let regions = |bits: u32| size_bytes.div_ceil(1u64.wrapping_shl(bits));
        let mut bits = REGION_BITS;
        while regions(bits) < REGIONS_WANTED && bits > REGION_BITS_MIN {
            bits = bits.saturating_sub(1);
        }
        let largest = u32::from(limit::BITMAP_GRANULARITY_BITS_MAX);
        while regions(bits) > bits_per_cluster && bits < largest {
            bits = bits.saturating_add(1);
        }
        BitmapShape::new(size_bytes, bits as u8, geometry)
    }

    /// The shape of the same table, for the largest disk that it has room for.
    pub fn with_all_bits(&self) -> BitmapShape {
        let bits = u64::from(self.table_entries()).saturating_mul(self.bits_per_cluster());
        let granularity = 1u64.wrapping_shl(u32::from(self.granularity_bits));
        BitmapShape {
            size_bytes: bits.saturating_mul(granularity),
            ..*self
        }
    }

    /// Size of the disk.
    pub const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The granularity as a power of two.
    pub const fn granularity_bits(&self) -> u8 {
        self.granularity_bits
    }

    /// Number of bits.
    pub fn bits(&self) -> u64 {
        let granularity = 1u64.wrapping_shl(u32::from(self.granularity_bits));
        self.size_bytes.div_ceil(granularity)
    }

    /// Bits in a cluster.
    pub fn bits_per_cluster(&self) -> u64 {
        8u64.wrapping_shl(self.cluster_bits)
    }

    /// Entries of the table; a bitmap of an empty disk has one.
    pub fn table_entries(&self) -> u32 {
        let entries = self.bits().div_ceil(self.bits_per_cluster()).max(1);
        u32::try_from(entries).unwrap_or(u32::MAX)
    }

    /// The bits that stand for `len` bytes of the disk at `offset`, as far as there are some.
    pub fn bits_of(&self, offset: u64, len: u64) -> Range<u64> {
        let shift = u32::from(self.granularity_bits);
        let end = offset.saturating_add(len).min(self.size_bytes);
        let first = offset.min(end).wrapping_shr(shift);
        let last = end.saturating_sub(1).wrapping_shr(shift);
        match offset < end {
            true => first..last.saturating_add(1),
            false => first..first,
        }
    }
}

fn check_granularity(bits: u8) -> Result<(), Error> {
    let granularity = limit::BITMAP_GRANULARITY_BITS_MIN..=limit::BITMAP_GRANULARITY_BITS_MAX;
    if granularity.contains(&bits) {
        return Ok(());
    }
    let error = Error::new(
        ErrorKind::Malformed,
        STRUCTURE,
        "bad granularity of a bitmap",
    );
    Err(error.found(format_args!("2^{bits}")).allowed("2^9 to 2^31"))
}

/// Parses a directory of `count` bitmaps, which fills `bytes`.
pub fn parse_directory(
    bytes: &[u8],
    count: u32,
    geometry: &Geometry,
) -> Result<Vec<Bitmap>, Error> {
    let mut list = Vec::new();
    for (bitmap, checked) in parse_entries(bytes, count, geometry)? {
        checked?;
        list.push(bitmap);
    }
    Ok(list)
}

/// A bitmap, and what is wrong with it.
pub(crate) type CheckedBitmap = (Bitmap, Result<(), Error>);

/// Like [`parse_directory`], with what is wrong with each of them.
pub(crate) fn parse_entries(
    bytes: &[u8],
    count: u32,
    geometry: &Geometry,
) -> Result<Vec<CheckedBitmap>, Error> {
    let mut list = Vec::new();
    let mut at = 0usize;
    while at < bytes.len() {
        if list.len() as u64 >= u64::from(count) {
            return Err(wrong("more bitmaps than the header says", at));
        }
        let (bitmap, len) = parse_entry(bytes, at).ok_or_else(|| {
            Error::new(ErrorKind::Truncated, STRUCTURE, "entry ends too early").at(at as u64)
        })?;
        let checked = bitmap.check(geometry, at);
        list.push((bitmap, checked));
        at = at.saturating_add(len);
    }
    if list.len() as u64 != u64::from(count) {
        return Err(wrong("fewer bitmaps than the header says", at).found(list.len()));
    }
    Ok(list)
}

fn wrong(what: &'static str, at: usize) -> Error {
    Error::new(ErrorKind::Malformed, STRUCTURE, what).at(at as u64)
}

/// The entry at `at` and its length with padding. An unknown type gives flags that are refused.
fn parse_entry(bytes: &[u8], at: usize) -> Option<(Bitmap, usize)> {
    let fixed = bytes::slice(bytes, at, FIXED_BYTES)?;
    let name_len = usize::from(bytes::u16_at(fixed, 18)?);
    let extra_len = bytes::u32_at(fixed, 20)? as usize;
    let extra_at = at.checked_add(FIXED_BYTES)?;
    let name_at = extra_at.checked_add(extra_len)?;
    let known_type = fixed.get(16).copied()? == DIRTY_TRACKING;
    let flags = bytes::u32_at(fixed, 12)?;
    let bitmap = Bitmap {
        table_offset: HostOffset(bytes::u64_at(fixed, 0)?),
        table_entries: bytes::u32_at(fixed, 8)?,
        flags: if known_type { flags } else { u32::MAX },
        granularity_bits: fixed.get(17).copied()?,
        name: bytes::slice(bytes, name_at, name_len)?.to_vec(),
        extra: bytes::slice(bytes, extra_at, extra_len)?.to_vec(),
    };
    let end = name_at.checked_add(name_len)?;
    let len = end.saturating_sub(at).checked_next_multiple_of(8)?;
    Some((bitmap, len))
}

impl Bitmap {
    fn check(&self, geometry: &Geometry, at: usize) -> Result<(), Error> {
        if self.table_entries == 0 || self.table_entries > limit::BITMAP_TABLE_ENTRIES_MAX {
            return Err(wrong("bad length of a bitmap table", at)
                .found(format_args!("{} entries", self.table_entries))
                .allowed("1 to 134217728 entries"));
        }
        let len = u64::from(self.table_entries).saturating_mul(8);
        let end = self.table_offset.0.saturating_add(len);
        if self.table_offset.0 == 0
            || !geometry.is_aligned(self.table_offset)
            || end > limit::HOST_END
        {
            return Err(wrong("bad offset of a bitmap table", at)
                .found(format_args!("{:#x}", self.table_offset))
                .allowed("a multiple of the cluster size below 2^56, not 0"));
        }
        if self.flags & !KNOWN_FLAGS != 0 {
            return Err(wrong("unknown type or flags of a bitmap", at)
                .found(format_args!("{:#x}", self.flags)));
        }
        check_granularity(self.granularity_bits).map_err(|error| error.at(at as u64))?;
        if self.name.is_empty() || self.name.len() > usize::from(limit::BITMAP_NAME_BYTES_MAX) {
            return Err(wrong("bad length of a bitmap name", at)
                .found(format_args!("{} bytes", self.name.len()))
                .allowed("1 to 1023 bytes"));
        }
        Ok(())
    }

    /// Whether [`IN_USE`] or another of the flags is set.
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Whether it is a write-intent map.
    pub fn is_write_intent_map(&self) -> bool {
        self.name == WRITE_INTENT_MAP
    }

    /// Whether a program that changed the disk would have marked it in use, or kept it up to date.
    pub fn is_kept(&self) -> bool {
        self.flags == AUTO && self.extra.is_empty()
    }

    /// Length of its entry in the directory in bytes.
    pub fn entry_bytes(&self) -> u64 {
        let len = FIXED_BYTES
            .saturating_add(self.extra.len())
            .saturating_add(self.name.len());
        (len as u64).next_multiple_of(8)
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), Error> {
        let too_long = || Error::new(ErrorKind::InvalidInput, STRUCTURE, "bitmap is too long");
        let name_len = u16::try_from(self.name.len()).map_err(|_| too_long())?;
        let extra_len = u32::try_from(self.extra.len()).map_err(|_| too_long())?;
        out.extend_from_slice(&self.table_offset.0.to_be_bytes());
        out.extend_from_slice(&self.table_entries.to_be_bytes());
        out.extend_from_slice(&self.flags.to_be_bytes());
        out.extend_from_slice(&[DIRTY_TRACKING, self.granularity_bits]);
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&extra_len.to_be_bytes());
        out.extend_from_slice(&self.extra);
        out.extend_from_slice(&self.name);
        bytes::pad_to_8(out);
        Ok(())
    }
}

/// The directory for `bitmaps`; checks each.
pub fn encode_directory(bitmaps: &[Bitmap], geometry: &Geometry) -> Result<Vec<u8>, Error> {
    let mut out = Vec::new();
    for bitmap in bitmaps {
        bitmap.check(geometry, out.len())?;
        bitmap.encode(&mut out)?;
    }
    if out.len() as u64 > limit::BITMAP_DIRECTORY_BYTES_MAX {
        return Err(Error::new(
            ErrorKind::TooLarge,
            STRUCTURE,
            "directory is too long",
        ));
    }
    Ok(out)
}

/// Takes the write-intent map out of a directory. The bitmaps from the number that is returned with it on, which are in use,
/// lack changes of its regions at most.
pub fn take_write_intent_map(directory: &mut Vec<Bitmap>) -> Option<(usize, Bitmap)> {
    let at = directory.iter().position(Bitmap::is_write_intent_map)?;
    Some((at, directory.remove(at)))
}

/// What a table entry says.
pub fn decode_table_entry(raw: u64, geometry: &Geometry) -> Result<BitmapCluster, Corruption> {
    let offset = HostOffset(raw & OFFSET_MASK);
    let flag = raw & 1 != 0;
    let reserved = raw & !(OFFSET_MASK | 1) != 0;
    if reserved || (flag && offset.0 != 0) {
        return Err(Corruption::new(CorruptionKind::BitmapReserved, raw));
    }
    if !geometry.is_aligned(offset) {
        return Err(Corruption::new(CorruptionKind::BitmapUnaligned, raw));
    }
    Ok(match (offset.0, flag) {
        (0, false) => BitmapCluster::Zeros,
        (0, true) => BitmapCluster::Ones,
        _ => BitmapCluster::Stored(offset),
    })
}

/// The table entry for a cluster of bits.
pub fn encode_table_entry(cluster: BitmapCluster) -> u64 {
    match cluster {
        BitmapCluster::Zeros => 0,
        BitmapCluster::Ones => 1,
        BitmapCluster::Stored(offset) => offset.0 & OFFSET_MASK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Version;
    use std::vec;

    fn bitmap() -> Bitmap {
        Bitmap {
            table_offset: HostOffset(0x50000),
            table_entries: 2,
            flags: AUTO,
            granularity_bits: 16,
            name: b"backup".to_vec(),
            extra: vec![],
        }
    }

    #[test]
    fn a_directory_has_as_many_bitmaps_as_the_header_says() {
        let geometry = Geometry::FALLBACK;
        let list = vec![bitmap(), bitmap()];
        let bytes = encode_directory(&list, &geometry).unwrap();
        assert_eq!(parse_directory(&bytes, 2, &geometry), Ok(list));
        assert!(parse_directory(&bytes, 1, &geometry).is_err());
        assert!(parse_directory(&bytes, 3, &geometry).is_err());
        assert!(parse_directory(&bytes[..40], 2, &geometry).is_err());
    }

    #[test]
    fn hostile_entries_are_refused() {
        type Edit = fn(&mut Bitmap);
        let edits: [Edit; 9] = [
            |bitmap| bitmap.table_entries = 0,
            |bitmap| bitmap.table_entries = u32::MAX,
            |bitmap| bitmap.table_offset = HostOffset(0),
            |bitmap| bitmap.table_offset = HostOffset(0x50200),
            |bitmap| bitmap.table_offset = HostOffset(1 << 63),
            |bitmap| bitmap.flags = 8,
            |bitmap| bitmap.granularity_bits = 8,
            |bitmap| bitmap.granularity_bits = 32,
            |bitmap| bitmap.name.clear(),
        ];
        for edit in edits {
            let mut entry = bitmap();
            edit(&mut entry);
            let mut bytes = vec![];
            entry.encode(&mut bytes).unwrap();
            assert!(
                parse_directory(&bytes, 1, &Geometry::FALLBACK).is_err(),
                "{entry:?}"
            );
            assert!(encode_directory(&[entry], &Geometry::FALLBACK).is_err());
        }
        let mut bytes = encode_directory(&[bitmap()], &Geometry::FALLBACK).unwrap();
        bytes[16] = 2;
        assert!(
            parse_directory(&bytes, 1, &Geometry::FALLBACK).is_err(),
            "an unknown type"
        );
    }

    #[test]
    fn a_shape_covers_the_disk_and_no_more() {
        let geometry = Geometry::FALLBACK;
        let shape = |size, bits| BitmapShape::new(size, bits, &geometry);
        let disk = shape((64 << 20) + 512, 16).unwrap();
        assert_eq!((disk.bits(), disk.table_entries()), (1025, 1));
        assert_eq!(disk.bits_of(0, 1), 0..1);
        assert_eq!(disk.bits_of(65535, 2), 0..2);
        assert_eq!(disk.bits_of(64 << 20, u64::MAX), 1024..1025);
        assert!(disk.bits_of(1 << 40, 5).is_empty() && disk.bits_of(7, 0).is_empty());
        assert_eq!(shape(1 << 30, 9).unwrap().table_entries(), 4);
        assert_eq!(shape((1 << 30) + 1, 9).unwrap().table_entries(), 5);
        assert_eq!(shape(0, 9).unwrap().table_entries(), 1);
        assert!(shape(1 << 41, 9).is_ok());
        for (size, bits) in [((1 << 41) + 1, 9), (u64::MAX, 16), (1, 8), (1, 32)] {
            assert!(shape(size, bits).is_err(), "{size} {bits}");
        }
        let entry = encode_directory(&[bitmap()], &geometry).unwrap();
        assert_eq!(entry.len() as u64, bitmap().entry_bytes());
    }

    #[test]
    fn a_write_intent_map_is_small_for_every_disk() {
        let shape = |size: u64, cluster_bits| {
            let geometry = Geometry::new(Version::V3, cluster_bits, false, 4).unwrap();
            let shape = BitmapShape::of_write_intent_map(size, &geometry).unwrap();
            assert!(shape.with_all_bits().size_bytes() >= size);
            (shape.granularity_bits(), shape.table_entries())
        };
        assert_eq!(shape(0, 16), (16, 1));
        assert_eq!(shape(3 << 20, 16), (17, 1));
        assert_eq!(shape(1 << 30, 16), (26, 1));
        assert_eq!(shape(32 << 40, 16), (26, 1));
        assert_eq!(shape((32 << 40) + 1, 16), (27, 1));
        assert_eq!(shape(1 << 50, 16), (31, 1));
        assert_eq!(shape(1 << 51, 16), (31, 2));
        assert_eq!(shape(128 << 30, 9), (26, 1));
        let mut list = vec![bitmap(), bitmap()];
        assert_eq!(take_write_intent_map(&mut list), None);
        let map = Bitmap {
            name: WRITE_INTENT_MAP.to_vec(),
            ..bitmap()
        };
        list.insert(1, map.clone());
        assert!(map.is_kept());
        assert_eq!(take_write_intent_map(&mut list), Some((1, map)));
        assert_eq!(list.len(), 2);
    }

    #[test]
    fn table_entries_are_zeros_ones_or_a_cluster() {
        let geometry = Geometry::FALLBACK;
        let stored = BitmapCluster::Stored(HostOffset(0x50000));
        for (raw, cluster) in [
            (0, BitmapCluster::Zeros),
            (1, BitmapCluster::Ones),
            (0x50000, stored),
        ] {
            assert_eq!(decode_table_entry(raw, &geometry), Ok(cluster));
            assert_eq!(encode_table_entry(cluster), raw);
        }
        for (raw, kind) in [
            (0x50001, CorruptionKind::BitmapReserved),
            (2, CorruptionKind::BitmapReserved),
            (1 << 63, CorruptionKind::BitmapReserved),
            (0x50200, CorruptionKind::BitmapUnaligned),
        ] {
            assert_eq!(decode_table_entry(raw, &geometry).unwrap_err().kind, kind);
        }
    }
}
