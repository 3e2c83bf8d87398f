//! Image geometry: cluster and table sizes, and the arithmetic on offsets.
//!
//! A [`Geometry`] exists only for legal combinations, so none of its methods can overflow or
//! divide by zero: every size is a power of two between 2^4 and 2^39, and every shift is below 64.
//! All of it is on the path of each request, so it is five bytes that are passed by value and shifts.

use crate::addr::{ClusterIndex, GuestOffset, HostOffset};
use crate::error::{Error, ErrorKind};
use crate::limit;

/// Version of the format. Version 1 is a different format, qcow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Version {
    /// `compat=0.10`.
    V2 = 2,
    /// `compat=1.1`: feature bits, zero clusters, refcounts of any width.
    V3 = 3,
}

impl Version {
    /// The number in the header.
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// Cluster size, kind of L2 entries and refcount width of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    version: Version,
    extended_l2: bool,
    cluster_bits: u8,
    refcount_order: u8,
    data_file: bool,
}

#[inline]
const fn pow2(bits: u32) -> u64 {
    1u64.wrapping_shl(bits)
}

#[inline]
const fn low_bits(value: u64, bits: u32) -> u64 {
    value & pow2(bits).wrapping_sub(1)
}

#[inline]
const fn shift_up_rounding(value: u64, bits: u32) -> u64 {
    let rest = (low_bits(value, bits) != 0) as u64;
    value.wrapping_shr(bits).wrapping_add(rest)
}

impl Geometry {
    /// A legal geometry for places that cannot fail.
    pub(crate) const FALLBACK: Geometry = Geometry {
        version: Version::V3,
        extended_l2: false,
        cluster_bits: 16,
        refcount_order: 4,
        data_file: false,
    };

    /// Checks the combination. `cluster_bits` and `refcount_order` are powers of two.
    pub fn new(
        version: Version,
        cluster_bits: u32,
        extended_l2: bool,
        refcount_order: u32,
    ) -> Result<Geometry, Error> {
        let wrong = |what| Error::new(ErrorKind::Malformed, "geometry", what);
        if !(limit::CLUSTER_BITS_MIN..=limit::CLUSTER_BITS_MAX).contains(&cluster_bits) {
            return Err(wrong("unsupported cluster size")
                .found(format_args!("cluster_bits {cluster_bits}"))
                .allowed("9 to 21, 512 bytes to 2 MiB"));
        }
        if extended_l2 && version == Version::V2 {
            return Err(wrong("extended l2 entries need version 3"));
        }
        if extended_l2 && cluster_bits < limit::CLUSTER_BITS_MIN_EXTENDED {
            return Err(wrong("cluster size is too small for extended l2 entries")
                .found(format_args!("cluster_bits {cluster_bits}"))
                .allowed("14 to 21, 16 KiB to 2 MiB"));
        }
        if refcount_order > limit::REFCOUNT_ORDER_MAX {
            return Err(wrong("unsupported refcount width")
                .found(format_args!("refcount_order {refcount_order}"))
                .allowed("0 to 6, 1 to 64 bits"));
        }
        if version == Version::V2 && refcount_order != limit::REFCOUNT_ORDER_V2 {
            return Err(wrong("version 2 has refcounts of 16 bits only")
                .found(format_args!("{} bits", pow2(refcount_order))));
        }
        Ok(Geometry {
            version,
            extended_l2,
            cluster_bits: cluster_bits as u8,
            refcount_order: refcount_order as u8,
            data_file: false,
        })
    }

    /// The same for an image whose guest clusters lie in an external data file, each at its guest offset.
    #[must_use]
    pub const fn with_data_file(self, data_file: bool) -> Geometry {
        Geometry { data_file, ..self }
    }

    /// Whether guest clusters lie in an external data file.
    #[inline]
    pub const fn data_file(&self) -> bool {
        self.data_file
    }

    /// Version of the format.
    #[inline]
    pub const fn version(&self) -> Version {
        self.version
    }

    /// The cluster size as a power of two, 9 to 21.
    #[inline]
    pub const fn cluster_bits(&self) -> u32 {
        self.cluster_bits as u32
    }

    /// Bytes of a cluster.
    #[inline]
    pub const fn cluster_size(&self) -> u64 {
        pow2(self.cluster_bits())
    }

    /// Whether L2 entries are 16 bytes and have subclusters.
    #[inline]
    pub const fn extended_l2(&self) -> bool {
        self.extended_l2
    }

    /// The refcount width as a power of two, 0 to 6.
    #[inline]
    pub const fn refcount_order(&self) -> u32 {
        self.refcount_order as u32
    }

    /// Bits of a refcount, 1 to 64.
    #[inline]
    pub const fn refcount_bits(&self) -> u32 {
        1u32.wrapping_shl(self.refcount_order())
    }

    /// The largest refcount.
    #[inline]
    pub const fn refcount_max(&self) -> u64 {
        u64::MAX.wrapping_shr(64u32.wrapping_sub(self.refcount_bits()))
    }

    /// Bytes of an L2 entry: 8, or 16 when extended.
    #[inline]
    pub const fn l2_entry_size(&self) -> u64 {
        pow2(self.l2_entry_bits())
    }

    #[inline]
    const fn l2_entry_bits(&self) -> u32 {
        if self.extended_l2 { 4 } else { 3 }
    }

    /// Entries of an L2 table, as a power of two.
    #[inline]
    pub const fn l2_bits(&self) -> u32 {
        self.cluster_bits().wrapping_sub(self.l2_entry_bits())
    }

    /// Entries of an L2 table.
    #[inline]
    pub const fn l2_entries(&self) -> u64 {
        pow2(self.l2_bits())
    }

    #[inline]
    const fn l1_shift(&self) -> u32 {
        self.l2_bits().wrapping_add(self.cluster_bits())
    }

    /// Bytes of the virtual disk that one L2 table maps.
    #[inline]
    pub const fn guest_bytes_per_l2(&self) -> u64 {
        pow2(self.l1_shift())
    }

    /// Subclusters of a cluster: 1, or 32 with extended entries.
    #[inline]
    pub const fn subclusters(&self) -> u32 {
        if self.extended_l2 { 32 } else { 1 }
    }

    /// A subcluster's size as a power of two.
    #[inline]
    pub const fn subcluster_bits(&self) -> u32 {
        let bits = if self.extended_l2 { 5 } else { 0 };
        self.cluster_bits().wrapping_sub(bits)
    }

    /// Bytes of a subcluster.
    #[inline]
    pub const fn subcluster_size(&self) -> u64 {
        pow2(self.subcluster_bits())
    }

    /// One bit for each subcluster of a cluster: 1, or all 32.
    #[inline]
    pub const fn subcluster_mask(&self) -> u32 {
        if self.extended_l2 { u32::MAX } else { 1 }
    }

    /// Index in the L1 table of the entry for a guest offset.
    #[inline]
    pub const fn l1_index(&self, offset: GuestOffset) -> u64 {
        offset.0.wrapping_shr(self.l1_shift())
    }

    /// Index in its L2 table of the entry for a guest offset.
    #[inline]
    pub const fn l2_index(&self, offset: GuestOffset) -> u64 {
        low_bits(offset.0.wrapping_shr(self.cluster_bits()), self.l2_bits())
    }

    /// Bytes from the start of its cluster to a guest offset.
    #[inline]
    pub const fn offset_in_cluster(&self, offset: GuestOffset) -> u64 {
        low_bits(offset.0, self.cluster_bits())
    }

    /// Number of the subcluster, 0 to 31, in which a guest offset lies.
    #[inline]
    pub const fn subcluster_index(&self, offset: GuestOffset) -> u32 {
        self.offset_in_cluster(offset)
            .wrapping_shr(self.subcluster_bits()) as u32
    }

    /// L1 entries that map `size_bytes` of virtual disk, rounded up.
    #[inline]
    pub const fn l1_entries_for(&self, size_bytes: u64) -> u64 {
        shift_up_rounding(size_bytes, self.l1_shift())
    }

    /// The cluster that holds a host offset.
    #[inline]
    pub const fn cluster_of(&self, offset: HostOffset) -> ClusterIndex {
        ClusterIndex(offset.0.wrapping_shr(self.cluster_bits()))
    }

    /// The first byte of a cluster below [`limit::HOST_END`]; larger indexes give the largest
    /// offset there is.
    #[inline]
    pub const fn cluster_start(&self, cluster: ClusterIndex) -> HostOffset {
        if cluster.0 > u64::MAX.wrapping_shr(self.cluster_bits()) {
            return HostOffset(u64::MAX);
        }
        HostOffset(cluster.0.wrapping_shl(self.cluster_bits()))
    }

    /// Whether a host offset is the start of a cluster.
    #[inline]
    pub const fn is_aligned(&self, offset: HostOffset) -> bool {
        low_bits(offset.0, self.cluster_bits()) == 0
    }

    /// Refcounts of a refcount block, as a power of two.
    #[inline]
    pub const fn refcount_block_bits(&self) -> u32 {
        self.cluster_bits()
            .wrapping_add(3)
            .wrapping_sub(self.refcount_order())
    }

    /// Refcounts of a refcount block.
    #[inline]
    pub const fn refcount_block_entries(&self) -> u64 {
        pow2(self.refcount_block_bits())
    }

    /// Index in the refcount table of the block that counts a cluster.
    #[inline]
    pub const fn refcount_table_index(&self, cluster: ClusterIndex) -> u64 {
        cluster.0.wrapping_shr(self.refcount_block_bits())
    }

    /// Index of a cluster's refcount in its block.
    #[inline]
    pub const fn refcount_block_index(&self, cluster: ClusterIndex) -> u64 {
        low_bits(cluster.0, self.refcount_block_bits())
    }

    /// Clusters that hold `bytes`, rounded up.
    #[inline]
    pub const fn clusters_for(&self, bytes: u64) -> u64 {
        shift_up_rounding(bytes, self.cluster_bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn all() -> Vec<Geometry> {
        let mut list = Vec::new();
        for version in [Version::V2, Version::V3] {
            for cluster_bits in 0..40 {
                for extended in [false, true] {
                    for order in 0..10 {
                        list.extend(Geometry::new(version, cluster_bits, extended, order));
                    }
                }
            }
        }
        list
    }

    #[test]
    fn geometry_accepts_exactly_the_legal_combinations() {
        let (standard_v3, extended_v3, v2) = (13 * 7, 8 * 7, 13);
        assert_eq!(all().len(), standard_v3 + extended_v3 + v2);
    }

    #[test]
    fn guest_offset_round_trips_through_indexes() {
        for geometry in all() {
            for offset in [0, 1, 511, 65535, 65536, (1 << 40) + 12345, (1 << 61) - 1] {
                let offset = GuestOffset(offset);
                let again = geometry.l1_index(offset) * geometry.guest_bytes_per_l2()
                    + geometry.l2_index(offset) * geometry.cluster_size()
                    + geometry.offset_in_cluster(offset);
                assert_eq!(again, offset.0, "{geometry:?}");
                assert!(geometry.l2_index(offset) < geometry.l2_entries());
                assert!(geometry.subcluster_index(offset) < geometry.subclusters());
                let start = u64::from(geometry.subcluster_index(offset));
                let start = start * geometry.subcluster_size();
                let inside = geometry.offset_in_cluster(offset) - start;
                assert!(inside < geometry.subcluster_size());
            }
        }
    }

    #[test]
    fn refcount_indexes_round_trip() {
        for geometry in all() {
            for cluster in [0, 1, 63, 64, 12345, 1 << 40] {
                let cluster = ClusterIndex(cluster);
                let again = geometry.refcount_table_index(cluster)
                    * geometry.refcount_block_entries()
                    + geometry.refcount_block_index(cluster);
                assert_eq!(again, cluster.0);
            }
            let bits = geometry.refcount_block_entries() * u64::from(geometry.refcount_bits());
            assert_eq!(bits, geometry.cluster_size() * 8, "a block fills a cluster");
        }
    }

    #[test]
    fn sizes_round_up_and_do_not_overflow() {
        for geometry in all() {
            let size = geometry.cluster_size();
            assert_eq!(geometry.clusters_for(0), 0);
            assert_eq!(geometry.clusters_for(1), 1);
            assert_eq!(geometry.clusters_for(size), 1);
            assert_eq!(geometry.clusters_for(size + 1), 2);
            assert_eq!(geometry.clusters_for(u64::MAX), u64::MAX / size + 1);
            assert_eq!(
                geometry.l1_entries_for(geometry.guest_bytes_per_l2() + 1),
                2
            );
            assert_eq!(
                geometry.cluster_start(ClusterIndex(u64::MAX)),
                HostOffset(u64::MAX)
            );
        }
        assert_eq!(Geometry::FALLBACK.refcount_max(), 65535);
        let one_bit = Geometry::new(Version::V3, 16, false, 0).unwrap();
        let widest = Geometry::new(Version::V3, 16, false, 6).unwrap();
        assert_eq!(
            (one_bit.refcount_max(), widest.refcount_max()),
            (1, u64::MAX)
        );
    }
}
