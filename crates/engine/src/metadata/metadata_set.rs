//! Overlap check: the host clusters that hold metadata, asked before every write in place.
//!
//! The question must cost next to nothing and take no lock, so a table of bits, by a hash of the
//! cluster's number, answers most of it: a bit that is not set means "no". Bits are never cleared.

use super::cluster_set::ClusterSet;
use crate::range::ClusterRange;
use crate::sync::RwLock;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The set.
#[derive(Debug)]
pub(crate) struct MetadataSet {
    hints: Box<[AtomicU64]>,
    exact: RwLock<ClusterSet>,
}

/// Fewest words of hints. In a model every word costs time.
const HINT_WORDS_MIN: usize = if cfg!(loom) { 2 } else { 512 };
/// Most of them.
const HINT_WORDS_MAX: usize = 1 << 15;

impl MetadataSet {
    /// A set of these clusters.
    pub(crate) fn new(exact: ClusterSet) -> MetadataSet {
        let words = exact.words().next_power_of_two();
        let words = words.clamp(HINT_WORDS_MIN, HINT_WORDS_MAX);
        let set = MetadataSet {
            hints: (0..words).map(|_| AtomicU64::new(0)).collect(),
            exact: RwLock::default(),
        };
        exact.each(|cluster| set.hint(cluster));
        *set.exact.write() = exact;
        set
    }

    /// The word and the bit that stand for a cluster.
    #[inline]
    fn place(&self, cluster: u64) -> (&AtomicU64, u64) {
        // Multiplying by an odd number mixes upwards; the high bits are the good ones.
        let mixed = cluster.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let word = (mixed >> 40) as usize & (self.hints.len() - 1);
        (&self.hints[word], 1 << (mixed >> 58))
    }

    fn hint(&self, cluster: u64) {
        let (word, bit) = self.place(cluster);
        word.fetch_or(bit, Ordering::Release);
    }

    /// Adds clusters.
    pub(crate) fn insert(&self, clusters: ClusterRange) {
        self.exact.write().insert(clusters);
        for cluster in clusters.numbers() {
            self.hint(cluster);
        }
    }

    /// Removes clusters.
    pub(crate) fn remove(&self, clusters: ClusterRange) {
        self.exact.write().remove(clusters);
    }

    /// Whether `cluster` is in the set.
    #[inline]
    pub(crate) fn contains(&self, cluster: u64) -> bool {
        let (word, bit) = self.place(cluster);
        word.load(Ordering::Acquire) & bit != 0 && self.exact.read().contains(cluster)
    }

    /// Whether any of these clusters is in the set.
    #[inline]
    pub(crate) fn touches(&self, clusters: ClusterRange) -> bool {
        clusters.numbers().any(|cluster| self.contains(cluster))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_never_hide_a_cluster() {
        let mut exact = ClusterSet::default();
        exact.insert(ClusterRange::new(0, 3));
        exact.insert(ClusterRange::new(1 << 40, 1));
        let set = MetadataSet::new(exact);
        for cluster in (0..200_000).step_by(7) {
            set.insert(ClusterRange::new(cluster, 1));
        }
        for cluster in 0..200_000 {
            let expected = cluster % 7 == 0 || cluster < 3;
            assert_eq!(set.contains(cluster), expected, "{cluster}");
        }
        assert!(set.touches(ClusterRange::new((1 << 40) - 5, 6)));
        set.remove(ClusterRange::new(1 << 40, 1));
        assert!(!set.contains(1 << 40));
    }
}

#[cfg(all(test, loom))]
mod loom_model;
