//! Which host clusters hold zeros wherever no mapping says otherwise.
//!
//! Space that the file gained since it was opened reads as zeros until somebody writes there. A
//! subcluster that has no data yet, in a cluster of such space, need therefore not be filled around
//! the bytes of its first write. That ends for a cluster, which is *soiled* then, as soon as bytes
//! may be in it that no mapping shows: a write into it failed or was dropped half-way, a subcluster
//! with data was discarded or zeroed by its mapping, or it was given back and could not be punched.
//!
//! Nothing is known of space below the end that the file had when it was opened: what a crash or an
//! earlier user left there may be anything. A block device has no fresh space.
//!
//! Sync only; locked last, and alone.

use super::cluster_set::ClusterSet;

/// Words of soiled clusters after which no space counts as fresh any more: about 2 MiB.
const WORDS_MAX: usize = 1 << 16;

/// Fresh clusters of one image. Numbers are those of host clusters.
#[derive(Debug)]
pub(crate) struct FreshSpace {
    /// First cluster behind the end that the file had when it was opened.
    from: u64,
    soiled: ClusterSet,
}

impl FreshSpace {
    /// Everything from cluster `from` on is fresh; `u64::MAX` for a file without fresh space.
    pub(crate) fn new(from: u64) -> FreshSpace {
        FreshSpace {
            from,
            soiled: ClusterSet::default(),
        }
    }

    /// Whether `cluster` holds zeros wherever no mapping says that there is data.
    pub(crate) fn contains(&self, cluster: u64) -> bool {
        cluster >= self.from && !self.soiled.contains(cluster)
    }

    /// Some bytes of these clusters may be of no mapping and not zeros.
    pub(crate) fn soil(&mut self, first: u64, count: u64) {
        let end = first.saturating_add(count);
        let first = first.max(self.from);
        self.soiled.insert(first, end.saturating_sub(first));
        if self.soiled.words() > WORDS_MAX {
            *self = FreshSpace::new(u64::MAX);
        }
    }

    /// These clusters are free and read as zeros again.
    pub(crate) fn clean(&mut self, first: u64, count: u64) {
        self.soiled.remove(first, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_fresh_until_it_is_soiled_and_after_it_was_cleaned() {
        let mut fresh = FreshSpace::new(100);
        assert!(!fresh.contains(99));
        assert!(fresh.contains(100));
        fresh.soil(98, 4);
        assert!(!fresh.contains(100));
        assert!(!fresh.contains(101));
        assert!(fresh.contains(102));
        fresh.clean(90, 11);
        assert!(
            !fresh.contains(99),
            "it was there before the file was opened"
        );
        assert!(fresh.contains(100));
        assert!(!fresh.contains(101));
    }

    #[test]
    fn too_much_soiled_space_ends_freshness_and_frees_the_memory() {
        let mut fresh = FreshSpace::new(0);
        for word in 0..=WORDS_MAX as u64 {
            assert!(fresh.contains(u64::MAX - 1), "not before it is too much");
            fresh.soil(word * 64, 1);
        }
        assert!(!fresh.contains(u64::MAX - 1));
        assert_eq!(fresh.soiled.words(), 0);
        fresh.soil(5, 1);
        assert_eq!(fresh.soiled.words(), 0);
    }
}
