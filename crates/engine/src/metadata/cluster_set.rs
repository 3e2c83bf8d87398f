//! Sparse bitmap of host clusters, for instance those that hold metadata, so that guest data never lands on them.
//!
//! A hostile or damaged image may map guest data onto its own tables. Writing there would destroy
//! what is left, so the write path asks this set first.

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::range::ClusterRange;

/// A sparse set of host cluster numbers, 64 to a word.
#[derive(Debug, Default)]
pub(crate) struct ClusterSet {
    words: HashMap<u64, u64, FxBuildHasher>,
}

impl ClusterSet {
    /// Adds clusters; returns whether none of them was there before.
    pub(crate) fn insert(&mut self, clusters: ClusterRange) -> bool {
        let mut all_new = true;
        for cluster in clusters.numbers() {
            let word = self.words.entry(cluster / 64).or_default();
            let bit = 1 << (cluster % 64);
            all_new &= *word & bit == 0;
            *word |= bit;
        }
        all_new
    }

    /// Removes clusters.
    pub(crate) fn remove(&mut self, clusters: ClusterRange) {
        for cluster in clusters.numbers() {
            if let Some(word) = self.words.get_mut(&(cluster / 64)) {
                *word &= !(1 << (cluster % 64));
                if *word == 0 {
                    self.words.remove(&(cluster / 64));
                }
            }
        }
    }

    /// Memory in use, in words of 64 clusters.
    pub(crate) fn words(&self) -> usize {
        self.words.len()
    }

    /// Calls `visit` with every cluster of the set.
    pub(crate) fn each(&self, mut visit: impl FnMut(u64)) {
        for (word, bits) in &self.words {
            (0..64)
                .filter(|bit| bits & (1 << bit) != 0)
                .for_each(|bit| visit(word * 64 + bit));
        }
    }

    /// Whether `cluster` is in the set.
    pub(crate) fn contains(&self, cluster: u64) -> bool {
        self.words
            .get(&(cluster / 64))
            .is_some_and(|word| word & (1 << (cluster % 64)) != 0)
    }
}
