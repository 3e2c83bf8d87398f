//! Compressed cluster descriptors.
//!
//! With `x = 62 - (cluster_bits - 8)`, bits 0 to x-1 of the L2 entry are the host offset in bytes
//! (unaligned), bits x to 61 the number of 512-byte sectors *after* the one that offset lies in. The
//! data may start and end anywhere and lie in two host clusters; several descriptors share a host
//! cluster, whose refcount is then their number.

use crate::addr::{ClusterIndex, HostOffset};
use crate::error::{Corruption, CorruptionKind};
use crate::geometry::Geometry;
use crate::limit;

const SECTOR: u64 = 512;

/// Where the bytes of a compressed cluster are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CompressedDescriptor {
    /// First byte in the image file, below 2^56.
    pub offset: u64,
    /// Sectors of 512 bytes after the one `offset` lies in.
    pub sectors: u64,
}

/// Bits of the offset in a descriptor: 49 to 61.
#[inline]
const fn offset_bits(geometry: &Geometry) -> u32 {
    70u32.wrapping_sub(geometry.cluster_bits())
}

#[inline]
const fn mask(bits: u32) -> u64 {
    1u64.wrapping_shl(bits).wrapping_sub(1)
}

impl CompressedDescriptor {
    /// The descriptor in an L2 entry whose compressed flag is set; the flags are ignored.
    #[inline]
    pub fn decode(raw: u64, geometry: &Geometry) -> Result<CompressedDescriptor, Corruption> {
        let bits = offset_bits(geometry);
        let offset = raw & mask(bits);
        let sectors = raw.wrapping_shr(bits) & mask(62u32.wrapping_sub(bits));
        let found = CompressedDescriptor { offset, sectors };
        if offset >= limit::HOST_END || found.end() > limit::HOST_END {
            return Err(Corruption::new(CorruptionKind::CompressedOutside, raw));
        }
        Ok(found)
    }

    /// The bits of the L2 entry without the flags. An offset or count that does not fit in its
    /// field is a mistake of the caller, see [`CompressedDescriptor::max_offset`].
    #[inline]
    pub fn encode(self, geometry: &Geometry) -> u64 {
        let bits = offset_bits(geometry);
        debug_assert!(
            self.offset <= mask(bits),
            "compressed data lies where a descriptor reaches"
        );
        debug_assert!(
            self.sectors < geometry.cluster_size() / 256,
            "the sector count fits"
        );
        (self.offset & mask(bits))
            | (self.sectors & mask(62u32.wrapping_sub(bits))).wrapping_shl(bits)
    }

    /// The descriptor for `len_bytes` (1 or more) at `offset`; `None` when they are out of reach.
    #[inline]
    pub fn covering(offset: HostOffset, len_bytes: u64, geometry: &Geometry) -> Option<Self> {
        let last = offset.0.checked_add(len_bytes.checked_sub(1)?)?;
        let sectors = (last / SECTOR).wrapping_sub(offset.0 / SECTOR);
        let fits = offset.0 <= CompressedDescriptor::max_offset(geometry).0
            && last < limit::HOST_END
            && sectors <= mask(geometry.cluster_bits().wrapping_sub(8));
        fits.then_some(CompressedDescriptor {
            offset: offset.0,
            sectors,
        })
    }

    /// The highest byte a descriptor can point to: 2^49 - 1 with 2 MiB clusters, 2^54 - 1 with
    /// 64 KiB, never 2^56 or more.
    #[inline]
    pub fn max_offset(geometry: &Geometry) -> HostOffset {
        HostOffset(mask(offset_bits(geometry)) & limit::HOST_END.wrapping_sub(1))
    }

    /// Bytes from the offset to the end of the last sector. The compressed stream ends somewhere
    /// in the last sector.
    #[inline]
    pub fn byte_len(&self) -> u64 {
        self.end().wrapping_sub(self.offset)
    }

    #[inline]
    fn end(&self) -> u64 {
        (self.offset / SECTOR)
            .wrapping_add(self.sectors)
            .wrapping_add(1)
            .wrapping_mul(SECTOR)
    }

    /// The host clusters the data lies in: the first, and how many. Every one of them counts this
    /// descriptor as one reference.
    #[inline]
    pub fn clusters(&self, geometry: &Geometry) -> (ClusterIndex, u64) {
        let first = geometry.cluster_of(HostOffset(self.offset));
        let last = geometry.cluster_of(HostOffset(self.end().wrapping_sub(1)));
        (first, last.0.wrapping_sub(first.0).wrapping_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Version;

    fn geometry(cluster_bits: u32) -> Geometry {
        Geometry::new(Version::V3, cluster_bits, false, 4).unwrap()
    }

    #[test]
    fn compressed_descriptor_covers_whole_sectors() {
        let geometry = geometry(16);
        let cases = [
            (0x50000, 1, 0, 512, (5, 1)),
            (0x50001, 511, 0, 511, (5, 1)),
            (0x50001, 512, 1, 1023, (5, 1)),
            (0x5fff0, 16, 0, 16, (5, 1)),
            (0x5fff0, 17, 1, 528, (5, 2)),
        ];
        for (offset, len, sectors, byte_len, (first, count)) in cases {
            let found = CompressedDescriptor::covering(HostOffset(offset), len, &geometry).unwrap();
            assert_eq!(found, CompressedDescriptor { offset, sectors });
            assert_eq!(found.byte_len(), byte_len);
            assert_eq!(found.clusters(&geometry), (ClusterIndex(first), count));
            let raw = found.encode(&geometry);
            assert_eq!(CompressedDescriptor::decode(raw, &geometry), Ok(found));
        }
    }

    #[test]
    fn compressed_offset_out_of_range_is_refused() {
        let wide = geometry(21);
        let reach = CompressedDescriptor::max_offset(&wide);
        assert_eq!(reach.0, (1 << 49) - 1);
        assert!(CompressedDescriptor::covering(reach, 1, &wide).is_some());
        assert!(CompressedDescriptor::covering(HostOffset(reach.0 + 1), 1, &wide).is_none());
        assert!(CompressedDescriptor::covering(HostOffset(0), 0, &wide).is_none());
        let all = wide.cluster_size() * 2;
        assert!(CompressedDescriptor::covering(HostOffset(0), all, &wide).is_some());
        assert!(CompressedDescriptor::covering(HostOffset(0), all + 1, &wide).is_none());
    }

    #[test]
    fn compressed_offset_above_2_to_the_56_is_corruption() {
        let small = geometry(9);
        for raw in [
            1 << 56,
            (1 << 61) - 1,
            (1 << 62) - 1,
            limit::HOST_END - 1 + (1 << 61),
        ] {
            let found = CompressedDescriptor::decode(raw, &small).unwrap_err();
            assert_eq!(found.kind, CorruptionKind::CompressedOutside, "{raw:#x}");
        }
    }
}
