//! Clusters that a switch of the whole image has freed, until their space has been given back.
//!
//! There may be very many of them, so there is a bit for each, a block of bits for each refcount block.
//! They are free by their counts already; no allocation finds them before they were punched.

use std::collections::BTreeMap;

use super::alloc::Run;

/// Bits of free clusters by refcount block.
#[derive(Debug, Default)]
pub(crate) struct FreedBlocks {
    /// Clusters that one refcount block counts.
    per_block: u64,
    blocks: BTreeMap<u64, Box<[u64]>>,
}

impl FreedBlocks {
    /// None yet; a refcount block counts `per_block` clusters.
    pub(crate) fn new(per_block: u64) -> FreedBlocks {
        FreedBlocks {
            per_block,
            blocks: BTreeMap::new(),
        }
    }

    /// What block `index` frees, by the number of each cluster in the block; replaces what was said
    /// of it before.
    pub(crate) fn set_block(&mut self, index: u64, freed: impl Iterator<Item = u64>) {
        let mut bits: Option<Box<[u64]>> = None;
        for within in freed {
            let words = self.per_block.div_ceil(64) as usize;
            let bits = bits.get_or_insert_with(|| vec![0; words].into_boxed_slice());
            if let Some(word) = bits.get_mut((within / 64) as usize) {
                *word |= 1 << (within % 64);
            }
        }
        match bits {
            Some(bits) => self.blocks.insert(index, bits),
            None => self.blocks.remove(&index),
        };
    }

    /// Adds another set, of blocks that are not in this one, or whose clusters are not.
    pub(crate) fn append(&mut self, other: FreedBlocks) {
        self.per_block = other.per_block;
        for (index, bits) in other.blocks {
            match self.blocks.get_mut(&index) {
                None => {
                    self.blocks.insert(index, bits);
                }
                Some(own) => {
                    for (own, more) in own.iter_mut().zip(bits) {
                        *own |= more;
                    }
                }
            }
        }
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether `cluster` waits.
    pub(crate) fn contains(&self, cluster: u64) -> bool {
        if self.blocks.is_empty() {
            return false;
        }
        let within = cluster % self.per_block;
        let bits = self.blocks.get(&(cluster / self.per_block));
        bits.and_then(|bits| bits.get((within / 64) as usize))
            .is_some_and(|word| word & (1 << (within % 64)) != 0)
    }

    /// The first run of clusters that waits and begins at `from` or later.
    pub(crate) fn run_from(&self, from: u64) -> Option<Run> {
        if self.blocks.is_empty() {
            return None;
        }
        let first_block = from / self.per_block;
        for (index, bits) in self.blocks.range(first_block..) {
            let base = index * self.per_block;
            let mut within = from.saturating_sub(base);
            while within < self.per_block {
                let word = bits.get((within / 64) as usize).copied().unwrap_or(0);
                let rest = word >> (within % 64);
                if rest == 0 {
                    within = (within / 64 + 1) * 64;
                    continue;
                }
                let start = base + within + u64::from(rest.trailing_zeros());
                let end = base + self.per_block;
                let len = (start..end)
                    .take_while(|cluster| self.contains(*cluster))
                    .count();
                return Some(Run {
                    start,
                    len: len as u64,
                    ..Run::EMPTY
                });
            }
        }
        None
    }

    /// The clusters of `run`, all of one refcount block, wait no more.
    pub(crate) fn remove(&mut self, run: Run) {
        let index = run.start / self.per_block;
        let Some(bits) = self.blocks.get_mut(&index) else {
            return;
        };
        for cluster in run.start..run.start + run.len {
            let within = cluster % self.per_block;
            if let Some(word) = bits.get_mut((within / 64) as usize) {
                *word &= !(1 << (within % 64));
            }
        }
        if bits.iter().all(|word| *word == 0) {
            self.blocks.remove(&index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_come_in_order_and_end_with_their_block() {
        let mut freed = FreedBlocks::new(256);
        freed.set_block(1, (60..70).chain(250..256));
        freed.set_block(2, 0..2);
        freed.set_block(3, std::iter::empty());
        let mut found = Vec::new();
        while let Some(run) = freed.run_from(0) {
            assert!(freed.contains(run.start));
            found.push((run.start, run.len));
            freed.remove(run);
            assert!(!freed.contains(run.start));
        }
        assert_eq!(found, [(316, 10), (506, 6), (512, 2)]);
        assert!(freed.is_empty());
    }
}
