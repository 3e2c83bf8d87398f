//! Allocation policy: a header extension of Gaur's own, and the space inside a cluster that the policy
//! *compact* gives back.
//!
//! | byte | length | field |
//! |---|---|---|
//! | 0 | 1 | version of the extension, 1 |
//! | 1 | 1 | policy: 1 compact, 2 contiguous |
//! | 2 | 6 | zeros; ignored when read |
//!
//! It is advice, so nothing about it is an error: another version, another length and an unknown
//! policy all mean that the image says nothing. QEMU does not know the extension and preserves it.

use alloc::vec::Vec;

use crate::bytes;
use crate::extension::{self, Extension};
use crate::geometry::Geometry;

/// Length of the data in bytes.
const LEN_BYTES: usize = 8;
/// The version of the extension that this crate writes and understands.
const VERSION: u8 = 1;

/// What is done with the host's space of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AllocationPolicy {
    /// As little of it as possible: nothing is allocated ahead, and what is discarded goes back to
    /// the host, subcluster by subcluster.
    #[default]
    Compact = 1,
    /// A cluster's space is allocated as a whole and stays together: discards give back whole
    /// clusters only.
    Contiguous = 2,
}

impl AllocationPolicy {
    /// The name used for it on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            AllocationPolicy::Compact => "compact",
            AllocationPolicy::Contiguous => "contiguous",
        }
    }

    /// The policy with this name.
    pub fn from_name(name: &str) -> Option<AllocationPolicy> {
        match name {
            "compact" => Some(AllocationPolicy::Compact),
            "contiguous" => Some(AllocationPolicy::Contiguous),
            _ => None,
        }
    }

    /// What the data of an [`extension::ALLOCATION`] says, if it says something known.
    pub fn parse(data: &[u8]) -> Option<AllocationPolicy> {
        let known = data.len() == LEN_BYTES && data.first() == Some(&VERSION);
        match data.get(1).filter(|_| known)? {
            1 => Some(AllocationPolicy::Compact),
            2 => Some(AllocationPolicy::Contiguous),
            _ => None,
        }
    }

    /// The extension.
    pub fn encode(self) -> Extension {
        let mut data: Vec<u8> = alloc::vec![0; LEN_BYTES];
        bytes::put(&mut data, 0, &[VERSION, self as u8]);
        Extension {
            kind: extension::ALLOCATION,
            data,
        }
    }
}

/// Space is given back in blocks of at least this many bytes: file systems have such blocks, and a
/// hole in a part of one is made by writing zeros.
const BLOCK_BYTES_MIN: u64 = 4096;

/// The first run of blocks that touch bytes `from..end` of a cluster and in which no subcluster has
/// data; `alloc` are those that do. Offsets count from the start of the cluster.
pub fn empty_blocks(alloc: u32, from: u64, end: u64, geometry: &Geometry) -> Option<(u64, u64)> {
    let sub = geometry.subcluster_size();
    let block = sub.max(BLOCK_BYTES_MIN).min(geometry.cluster_size());
    // All of these are powers of two.
    let sub_bits = sub.trailing_zeros();
    let per_block = block.wrapping_shr(sub_bits) as u32;
    let ones = u32::MAX.wrapping_shr(32_u32.saturating_sub(per_block));
    let is_empty = |start: u64| {
        let first = start.wrapping_shr(sub_bits) as u32;
        alloc & ones.wrapping_shl(first) == 0
    };
    let end = end.min(geometry.cluster_size());
    let mut start = from & !block.saturating_sub(1);
    while start < end && !is_empty(start) {
        start = start.saturating_add(block);
    }
    let mut upto = start;
    while upto < end && is_empty(upto) {
        upto = upto.saturating_add(block);
    }
    (start < upto).then_some((start, upto))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Version;

    const KIB: u64 = 1024;

    fn geometry(cluster_bits: u32, extended: bool) -> Geometry {
        Geometry::new(Version::V3, cluster_bits, extended, 4).unwrap()
    }

    #[test]
    fn small_subclusters_are_given_back_together_with_their_neighbours() {
        // Subclusters of 2 KiB, two to a block.
        let geometry = geometry(16, true);
        let blocks = |alloc, from, end| empty_blocks(alloc, from * KIB, end * KIB, &geometry);
        assert_eq!(blocks(0b0010, 0, 2), None, "the other half has data");
        assert_eq!(blocks(0, 0, 2), Some((0, 4 * KIB)));
        assert_eq!(blocks(0b0001, 2, 8), Some((4 * KIB, 8 * KIB)));
        assert_eq!(blocks(0b1000_0000, 2, 14), Some((0, 12 * KIB)));
        assert_eq!(blocks(0, 62, 64), Some((60 * KIB, 64 * KIB)));
        // What was written again in the middle splits a hole.
        assert_eq!(blocks(0b1_0000, 0, 16), Some((0, 8 * KIB)));
        assert_eq!(blocks(0b1_0000, 8, 16), Some((12 * KIB, 16 * KIB)));
        assert_eq!(blocks(u32::MAX, 0, 64), None);
    }

    #[test]
    fn large_subclusters_are_blocks() {
        // Subclusters of 64 KiB.
        let geometry = geometry(21, true);
        let blocks = |alloc, from, end| empty_blocks(alloc, from * KIB, end * KIB, &geometry);
        assert_eq!(blocks(0b101, 64, 128), Some((64 * KIB, 128 * KIB)));
        assert_eq!(blocks(0b101, 0, 64), None);
        assert_eq!(blocks(0, 1984, 2048), Some((1984 * KIB, 2048 * KIB)));
    }

    #[test]
    fn a_cluster_without_subclusters_is_one_block() {
        for cluster_bits in [9, 12, 16, 21] {
            let (size, geometry) = (1 << cluster_bits, geometry(cluster_bits, false));
            assert_eq!(empty_blocks(1, 0, size, &geometry), None);
            assert_eq!(empty_blocks(0, 0, size, &geometry), Some((0, size)));
        }
    }

    const BOTH: [AllocationPolicy; 2] = [AllocationPolicy::Compact, AllocationPolicy::Contiguous];

    #[test]
    fn policies_survive_their_extension_and_their_name() {
        for policy in BOTH {
            let extension = policy.encode();
            assert_eq!(extension.kind, extension::ALLOCATION);
            assert_eq!(AllocationPolicy::parse(&extension.data), Some(policy));
            assert_eq!(AllocationPolicy::from_name(policy.name()), Some(policy));
        }
        assert_eq!(
            AllocationPolicy::Contiguous.encode().data,
            [1, 2, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(AllocationPolicy::from_name("Compact"), None);
    }

    #[test]
    fn unknown_allocation_policy_is_ignored() {
        for data in [
            &[][..],
            &[1, 1],
            &[1, 1, 0, 0, 0, 0, 0],
            &[1, 1, 0, 0, 0, 0, 0, 0, 0],
            &[2, 1, 0, 0, 0, 0, 0, 0],
            &[1, 0, 0, 0, 0, 0, 0, 0],
            &[1, 3, 0, 0, 0, 0, 0, 0],
        ] {
            assert_eq!(AllocationPolicy::parse(data), None, "{data:?}");
        }
        let later = [1, 2, 0, 0, 0xff, 0, 0, 1];
        assert_eq!(
            AllocationPolicy::parse(&later),
            Some(AllocationPolicy::Contiguous)
        );
    }
}
