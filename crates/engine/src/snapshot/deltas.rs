//! Refcount deltas: how much the count of each host cluster is to change, a number for every cluster of each refcount
//! block that has one to change.

use std::collections::BTreeSet;

use crate::range::ClusterRange;

/// Changes of refcounts.
#[derive(Debug)]
pub(crate) struct Deltas {
    /// Clusters that one refcount block counts.
    per_block: u64,
    blocks: Vec<Option<Box<[i16]>>>,
    /// Blocks whose changes are others since the last look.
    changed: BTreeSet<u64>,
}

/// Why a change cannot be noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DeltaError {
    /// No refcount block counts this cluster.
    #[error("no refcount block counts cluster {0}")]
    Uncounted(u64),
    /// More references to this cluster than any width but the largest could count.
    #[error("cluster {0} has too many references")]
    TooMany(u64),
    /// This cluster has more references than it counts.
    #[error("the refcount of cluster {0} is too low")]
    Negative(u64),
}

impl Deltas {
    /// No changes yet.
    pub(crate) fn new(per_block: u64) -> Deltas {
        Deltas {
            per_block,
            blocks: Vec::new(),
            changed: BTreeSet::new(),
        }
    }

    /// There are refcount blocks with an index below `count`.
    pub(crate) fn cover(&mut self, count: usize) {
        if count > self.blocks.len() {
            self.blocks.resize_with(count, || None);
        }
    }

    /// Changes the counts of these clusters by `by`.
    pub(crate) fn add(&mut self, clusters: ClusterRange, by: i16) -> Result<(), DeltaError> {
        let (mut at, end) = (clusters.start, clusters.end());
        while at < end {
            let (index, within) = (at / self.per_block, at % self.per_block);
            let count = (self.per_block - within).min(end - at);
            let slot = self.blocks.get_mut(index as usize);
            let block = slot
                .ok_or(DeltaError::Uncounted(at))?
                .get_or_insert_with(|| {
                    let zeros = vec![0; self.per_block as usize];
                    zeros.into_boxed_slice()
                });
            self.changed.insert(index);
            let part = &mut block[within as usize..(within + count) as usize];
            for delta in &mut *part {
                *delta = delta.saturating_add(by);
            }
            // Once it has reached the end it cannot be trusted any more.
            let bad = part.iter().position(|delta| delta.unsigned_abs() >= 0x7fff);
            if let Some(bad) = bad {
                return Err(DeltaError::TooMany(at + bad as u64));
            }
            at += count;
        }
        Ok(())
    }

    /// The change of one cluster.
    pub(crate) fn get(&self, cluster: u64) -> i16 {
        self.block(cluster / self.per_block)
            .map_or(0, |block| block[(cluster % self.per_block) as usize])
    }

    /// The changes of the clusters that refcount block `index` counts, if there are any.
    pub(crate) fn block(&self, index: u64) -> Option<&[i16]> {
        self.blocks.get(index as usize)?.as_deref()
    }

    /// Indexes of the blocks that were told of changes since the last call.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.changed)
    }

    /// Indexes of the refcount blocks with changes.
    pub(crate) fn touched(&self) -> impl Iterator<Item = u64> + '_ {
        let blocks = self.blocks.iter().enumerate();
        blocks.filter_map(|(index, block)| block.as_ref().map(|_| index as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deltas_cross_blocks_and_uncounted_clusters_are_an_error() {
        let mut deltas = Deltas::new(8);
        deltas.cover(3);
        deltas.add(ClusterRange::new(6, 12), 1).unwrap();
        deltas.add(ClusterRange::new(7, 1), -2).unwrap();
        let all: Vec<i16> = (5..19).map(|cluster| deltas.get(cluster)).collect();
        assert_eq!(all, [0, 1, -1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]);
        assert_eq!(deltas.touched().collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(
            deltas.add(ClusterRange::new(23, 2), 1),
            Err(DeltaError::Uncounted(24))
        );
        for _ in 0..0x7ffe {
            deltas.add(ClusterRange::new(20, 1), 1).unwrap();
        }
        assert_eq!(
            deltas.add(ClusterRange::new(20, 1), 1),
            Err(DeltaError::TooMany(20))
        );
    }
}
