//! L2 table entries, standard (8 bytes) and extended (16 bytes), as one type.
//!
//! A standard entry is a cluster of one subcluster (mask 1), an extended one of 32, so that code
//! above this module knows subclusters only:
//!
//! | state | `host` | `alloc` | `zero` |
//! |---|---|---|---|
//! | unallocated: reads the backing file, or zeros | `None` | 0 | 0 |
//! | zeros without space | `None` | 0 | bits |
//! | zeros with space kept | `Some` | 0 | bits |
//! | data | `Some` | bits | 0 |
//! | space kept, reads the backing file (extended only) | `Some` | 0 | 0 |
//!
//! Invariant of every decoded entry: `alloc & zero == 0`, both within the geometry's mask, `alloc`
//! is 0 without `host`, `copied` is false without `host`, and `host` is cluster aligned.
//!
//! [`L2Entry::decode`] is as strict as QEMU's data path, which reads entries that its checker
//! reports; [`L2Entry::lint`] is what the checker adds.

use crate::addr::HostOffset;
use crate::bytes;
use crate::compressed::CompressedDescriptor;
use crate::error::{Corruption, CorruptionKind};
use crate::geometry::{Geometry, Version};
use crate::l1::{COPIED, OFFSET_MASK};

/// The flag of a compressed cluster.
pub const COMPRESSED: u64 = 1 << 62;

/// The flag of a cluster that reads as zeros, in standard entries of version 3.
pub const ZERO: u64 = 1;

const RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// What one cluster of the virtual disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum L2Entry {
    /// The whole cluster is compressed.
    Compressed(CompressedDescriptor),
    /// Anything else; see the table of the module.
    Cluster {
        /// The allocated host cluster, if there is one.
        host: Option<HostOffset>,
        /// Its refcount is exactly one: it may be written in place.
        copied: bool,
        /// Subclusters whose data is in it.
        alloc: u32,
        /// Subclusters that read as zeros.
        zero: u32,
    },
}

impl L2Entry {
    /// Nothing: reads the backing file, or zeros.
    pub const UNALLOCATED: L2Entry = L2Entry::Cluster {
        host: None,
        copied: false,
        alloc: 0,
        zero: 0,
    };

    /// Decodes an entry. `bitmap` is the second half of an extended entry and ignored for standard
    /// ones.
    #[inline]
    pub fn decode(raw: u64, bitmap: u64, geometry: &Geometry) -> Result<L2Entry, Corruption> {
        if raw & COMPRESSED != 0 {
            if geometry.data_file() {
                return Err(Corruption::new(CorruptionKind::CompressedInDataFile, raw));
            }
            return CompressedDescriptor::decode(raw, geometry).map(L2Entry::Compressed);
        }
        let offset = HostOffset(raw & OFFSET_MASK);
        let flagged_zero = raw & ZERO != 0 && !geometry.extended_l2();
        // The first cluster of a data file has offset 0; the copied flag tells it from an unallocated one.
        let first = geometry.data_file() && raw & COPIED != 0 && !flagged_zero;
        let host = (offset.0 != 0 || first).then_some(offset);
        let (alloc, zero) = if geometry.extended_l2() {
            (bitmap as u32, (bitmap >> 32) as u32)
        } else if flagged_zero {
            if geometry.version() == Version::V2 {
                return Err(Corruption::new(CorruptionKind::ZeroFlagInV2, raw));
            }
            (0, 1)
        } else {
            (u32::from(host.is_some()), 0)
        };
        if alloc & zero != 0 && host.is_some() {
            return Err(Corruption::new(CorruptionKind::SubclusterBothSet, bitmap));
        }
        if alloc != 0 && host.is_none() {
            return Err(Corruption::new(
                CorruptionKind::SubclusterWithoutCluster,
                bitmap,
            ));
        }
        if !geometry.is_aligned(offset) {
            return Err(Corruption::new(CorruptionKind::DataUnaligned, raw));
        }
        Ok(L2Entry::Cluster {
            host,
            copied: host.is_some() && raw & COPIED != 0,
            alloc,
            zero,
        })
    }

    /// The two halves of the entry; the second is 0 for standard entries.
    #[inline]
    pub fn encode(self, geometry: &Geometry) -> (u64, u64) {
        match self {
            L2Entry::Compressed(descriptor) => (COMPRESSED | descriptor.encode(geometry), 0),
            L2Entry::Cluster {
                host,
                copied,
                alloc,
                zero,
            } => {
                let mask = geometry.subcluster_mask();
                debug_assert!(alloc & zero == 0, "a subcluster is either data or zeros");
                debug_assert!(
                    (alloc | zero) & !mask == 0,
                    "subclusters lie inside the cluster"
                );
                debug_assert!(host.is_some() || alloc == 0, "data needs a host cluster");
                let entry = match host {
                    Some(offset) => (offset.0 & OFFSET_MASK) | if copied { COPIED } else { 0 },
                    None => 0,
                };
                if geometry.extended_l2() {
                    (entry, u64::from(zero) << 32 | u64::from(alloc))
                } else {
                    debug_assert!(
                        host.is_none() || (alloc | zero) == 1,
                        "a standard cluster with space is data or zeros"
                    );
                    (entry | u64::from(zero & 1), 0)
                }
            }
        }
    }

    /// What is wrong with an entry although [`L2Entry::decode`] may accept it: reserved bits, bit 0
    /// in an extended entry, a compressed cluster with the copied flag or a bitmap.
    pub fn lint(raw: u64, bitmap: u64, geometry: &Geometry) -> Option<Corruption> {
        let extended = geometry.extended_l2();
        if raw & COMPRESSED != 0 {
            if raw & COPIED != 0 {
                return Some(Corruption::new(CorruptionKind::CompressedCopied, raw));
            }
            if extended && bitmap != 0 {
                return Some(Corruption::new(CorruptionKind::CompressedBitmap, bitmap));
            }
            return None;
        }
        if raw & RESERVED != 0 {
            return Some(Corruption::new(CorruptionKind::L2Reserved, raw));
        }
        if extended && raw & ZERO != 0 {
            return Some(Corruption::new(CorruptionKind::ZeroFlagInExtended, raw));
        }
        None
    }
}

/// The two halves of entry `index` of a table (or of a slice of one), `None` outside of it.
#[inline]
pub fn raw_at(table: &[u8], index: u64, geometry: &Geometry) -> Option<(u64, u64)> {
    let index = usize::try_from(index).ok()?;
    if geometry.extended_l2() {
        let start = index.checked_mul(16)?;
        Some((
            bytes::u64_at(table, start)?,
            bytes::u64_at(table, start.checked_add(8)?)?,
        ))
    } else {
        Some((bytes::u64_at(table, index.checked_mul(8)?)?, 0))
    }
}

/// How many entries from `index` on are sound data clusters with the same flags, each of which lies behind its
/// predecessor in the file; 0 when the first is something else.
pub fn data_run(table: &[u8], index: u64, geometry: &Geometry) -> u64 {
    let flags = COMPRESSED | RESERVED | ZERO;
    let follows = |wanted: u64, at: u64| {
        let found = raw_at(table, at, geometry)?;
        let alone = found.1 as u32 & (found.1 >> 32) as u32 == 0;
        (found.0 == wanted && alone).then_some(())
    };
    let Some((first, _)) = raw_at(table, index, geometry) else {
        return 0;
    };
    let offset = HostOffset(first & OFFSET_MASK);
    if first & flags != 0 || offset.0 == 0 || !geometry.is_aligned(offset) {
        return 0;
    }
    let (mut wanted, mut count) = (first, 0_u64);
    while follows(wanted, index.saturating_add(count)).is_some() {
        count = count.saturating_add(1);
        wanted = wanted.wrapping_add(geometry.cluster_size());
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standard() -> Geometry {
        Geometry::new(Version::V3, 16, false, 4).unwrap()
    }

    fn extended() -> Geometry {
        Geometry::new(Version::V3, 16, true, 4).unwrap()
    }

    fn cluster(host: u64, copied: bool, alloc: u32, zero: u32) -> L2Entry {
        let host = (host != 0).then_some(HostOffset(host));
        L2Entry::Cluster {
            host,
            copied,
            alloc,
            zero,
        }
    }

    #[test]
    fn every_state_of_a_standard_entry() {
        let cases = [
            (0, L2Entry::UNALLOCATED),
            (1, cluster(0, false, 0, 1)),
            (0x50001, cluster(0x50000, false, 0, 1)),
            (COPIED | 0x50001, cluster(0x50000, true, 0, 1)),
            (COPIED | 0x50000, cluster(0x50000, true, 1, 0)),
            (0x50000, cluster(0x50000, false, 1, 0)),
        ];
        for (raw, entry) in cases {
            assert_eq!(
                L2Entry::decode(raw, u64::MAX, &standard()),
                Ok(entry),
                "{raw:#x}"
            );
            assert_eq!(entry.encode(&standard()), (raw, 0));
        }
        assert_eq!(
            L2Entry::decode(COPIED, 0, &standard()),
            Ok(L2Entry::UNALLOCATED)
        );
    }

    #[test]
    fn every_state_of_an_extended_entry() {
        let cases = [
            (0, 0, L2Entry::UNALLOCATED),
            (0, 0xff << 32, cluster(0, false, 0, 0xff)),
            (0x50000, 0, cluster(0x50000, false, 0, 0)),
            (
                COPIED | 0x50000,
                0xff << 32 | 0xf00,
                cluster(0x50000, true, 0xf00, 0xff),
            ),
            (
                COPIED | 0x50000,
                0xffff_ffff,
                cluster(0x50000, true, u32::MAX, 0),
            ),
        ];
        for (raw, bitmap, entry) in cases {
            assert_eq!(
                L2Entry::decode(raw, bitmap, &extended()),
                Ok(entry),
                "{raw:#x}"
            );
            assert_eq!(entry.encode(&extended()), (raw, bitmap));
        }
    }

    #[test]
    fn first_cluster_of_a_data_file_is_told_by_its_copied_flag() {
        let first = |copied, alloc, zero| L2Entry::Cluster {
            host: Some(HostOffset(0)),
            copied,
            alloc,
            zero,
        };
        let standard = standard().with_data_file(true);
        let extended = extended().with_data_file(true);
        let cases = [
            (standard, COPIED, 0, first(true, 1, 0)),
            (standard, 0, 0, L2Entry::UNALLOCATED),
            (standard, 1, 0, cluster(0, false, 0, 1)),
            (extended, COPIED, 0xf, first(true, 0xf, 0)),
            (extended, COPIED, 0xf << 32, first(true, 0, 0xf)),
        ];
        for (geometry, raw, bitmap, entry) in cases {
            assert_eq!(
                L2Entry::decode(raw, bitmap, &geometry),
                Ok(entry),
                "{raw:#x}"
            );
            assert_eq!(entry.encode(&geometry), (raw, bitmap));
        }
        // With the zero flag the first cluster has no space to tell of.
        assert_eq!(
            L2Entry::decode(COPIED | 1, 0, &standard),
            Ok(cluster(0, false, 0, 1))
        );
        let packed = L2Entry::decode(COMPRESSED | 0x50000, 0, &standard).unwrap_err();
        assert_eq!(packed.kind, CorruptionKind::CompressedInDataFile);
    }

    #[test]
    fn l2_entry_refused_by_qemu_is_corruption() {
        let both = 1 << 32 | 1;
        let v2 = Geometry::new(Version::V2, 16, false, 4).unwrap();
        let cases = [
            (extended(), 0x50000, both, CorruptionKind::SubclusterBothSet),
            (extended(), 0, 1, CorruptionKind::SubclusterWithoutCluster),
            (
                extended(),
                0,
                both,
                CorruptionKind::SubclusterWithoutCluster,
            ),
            (extended(), 0x50200, 1, CorruptionKind::DataUnaligned),
            (standard(), 0x50200, 0, CorruptionKind::DataUnaligned),
            (standard(), 0x50201, 0, CorruptionKind::DataUnaligned),
            (v2, 1, 0, CorruptionKind::ZeroFlagInV2),
            (v2, 0x50001, 0, CorruptionKind::ZeroFlagInV2),
        ];
        for (geometry, raw, bitmap, kind) in cases {
            let found = L2Entry::decode(raw, bitmap, &geometry).unwrap_err();
            assert_eq!(found.kind, kind, "{raw:#x} {bitmap:#x}");
        }
    }

    #[test]
    fn l2_entry_reported_by_qemu_check_only_is_read_and_linted() {
        let (data, packed) = (COPIED | 0x50000, COMPRESSED | 0x50000);
        let cases = [
            (standard(), data | 1 << 57, 0, CorruptionKind::L2Reserved),
            (standard(), data | 2, 0, CorruptionKind::L2Reserved),
            (extended(), data | 1, 1, CorruptionKind::ZeroFlagInExtended),
            (extended(), packed, 1, CorruptionKind::CompressedBitmap),
            (
                extended(),
                packed | COPIED,
                0,
                CorruptionKind::CompressedCopied,
            ),
            (
                standard(),
                packed | COPIED,
                0,
                CorruptionKind::CompressedCopied,
            ),
        ];
        for (geometry, raw, bitmap, kind) in cases {
            assert!(L2Entry::decode(raw, bitmap, &geometry).is_ok(), "{raw:#x}");
            let found = L2Entry::lint(raw, bitmap, &geometry).unwrap();
            assert_eq!(found.kind, kind, "{raw:#x}");
        }
        assert_eq!(L2Entry::lint(data, 0, &standard()), None);
        assert_eq!(L2Entry::lint(packed, u64::MAX, &standard()), None);
    }

    #[test]
    fn l2_raw_at_reads_both_entry_sizes_within_bounds() {
        let bytes: std::vec::Vec<u8> = (0..40).collect();
        let number =
            |first: u8| u64::from_be_bytes(core::array::from_fn(|index| first + index as u8));
        assert_eq!(raw_at(&bytes, 1, &standard()), Some((number(8), 0)));
        assert_eq!(
            raw_at(&bytes, 1, &extended()),
            Some((number(16), number(24)))
        );
        assert_eq!(raw_at(&bytes, 5, &standard()), None);
        assert_eq!(raw_at(&bytes, 2, &extended()), None);
        assert_eq!(raw_at(&bytes, u64::MAX, &standard()), None);
    }
}
