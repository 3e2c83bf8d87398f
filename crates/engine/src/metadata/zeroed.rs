//! Zeroed space: host clusters that hold zeros wherever no mapping says otherwise.
//!
//! Space that the file gained since it was opened reads as zeros until a request writes there. A
//! subcluster that has no data yet, in a zeroed cluster, need therefore not be filled around the bytes of
//! its first write. A cluster stops being zeroed as soon as bytes may be in it that no mapping shows: a
//! write into it failed or was dropped half-way, a subcluster with data was discarded or zeroed by its
//! mapping, or it was given back and could not be punched.
//!
//! Space below the end that the file had when it was opened is never zeroed: a crash or an earlier user
//! may have left anything there. A block device has no zeroed space.
//!
//! Sync only; locked last, and alone.

use super::cluster_set::ClusterSet;
use crate::range::ClusterRange;

/// Words of cleared clusters after which no space counts as zeroed any more: about 2 MiB.
const WORDS_MAX: usize = 1 << 16;

/// Zeroed clusters of one image. Numbers are those of host clusters.
#[derive(Debug)]
pub(crate) struct ZeroedSpace {
    /// First cluster behind the end that the file had when it was opened.
    from: u64,
    /// Clusters behind that which are not zeroed.
    cleared: ClusterSet,
}

impl ZeroedSpace {
    /// Everything from cluster `from` on is zeroed; `u64::MAX` for a file without zeroed space.
    pub(crate) fn new(from: u64) -> ZeroedSpace {
        ZeroedSpace {
            from,
            cleared: ClusterSet::default(),
        }
    }

    /// Whether `cluster` holds zeros wherever no mapping says that there is data.
    pub(crate) fn contains(&self, cluster: u64) -> bool {
        cluster >= self.from && !self.cleared.contains(cluster)
    }

    /// Some bytes of these clusters may be of no mapping and not zeros.
    pub(crate) fn clear(&mut self, clusters: ClusterRange) {
        let behind = ClusterRange::between(self.from, u64::MAX);
        self.cleared.insert(clusters.intersect(behind));
        if self.cleared.words() > WORDS_MAX {
            *self = ZeroedSpace::new(u64::MAX);
        }
    }

    /// These clusters are free and read as zeros again.
    pub(crate) fn set(&mut self, clusters: ClusterRange) {
        self.cleared.remove(clusters);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_zeroed_until_cleared_and_after_it_is_set_again() {
        let mut zeroed = ZeroedSpace::new(100);
        assert!(!zeroed.contains(99));
        assert!(zeroed.contains(100));
        zeroed.clear(ClusterRange::new(98, 4));
        assert!(!zeroed.contains(100));
        assert!(!zeroed.contains(101));
        assert!(zeroed.contains(102));
        zeroed.set(ClusterRange::new(90, 11));
        assert!(
            !zeroed.contains(99),
            "it was there before the file was opened"
        );
        assert!(zeroed.contains(100));
        assert!(!zeroed.contains(101));
    }

    #[test]
    fn too_many_cleared_clusters_end_all_zeroed_space_and_free_the_memory() {
        let mut zeroed = ZeroedSpace::new(0);
        for word in 0..=WORDS_MAX as u64 {
            assert!(zeroed.contains(u64::MAX - 1), "not before it is too much");
            zeroed.clear(ClusterRange::new(word * 64, 1));
        }
        assert!(!zeroed.contains(u64::MAX - 1));
        assert_eq!(zeroed.cleared.words(), 0);
        zeroed.clear(ClusterRange::new(5, 1));
        assert_eq!(zeroed.cleared.words(), 0);
    }
}
