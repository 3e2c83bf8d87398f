//! Repair of refcounts in the blocks where they are: all of them up, or all of them down.
//!
//! Within a pass counts change in one direction only, so any subset of the sectors written may survive a
//! power cut.

use alloc::sync::Arc;

use crate::addr::ClusterIndex;
use crate::check::machine::Check;
use crate::check::reader::Range;
use crate::check::repair::{Action, Repaired};
use crate::check::report::Miscount;
use crate::refcount;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Raise,
    Lower,
}

/// Goes through the refcount blocks that have counts to change.
#[derive(Clone, Debug)]
pub(super) struct CountsPass {
    direction: Direction,
    /// The next cluster to look at.
    cluster: u64,
    /// The block that is being read.
    block: u64,
}

impl CountsPass {
    pub(super) fn raise() -> CountsPass {
        CountsPass {
            direction: Direction::Raise,
            cluster: 0,
            block: 0,
        }
    }

    pub(super) fn lower() -> CountsPass {
        CountsPass {
            direction: Direction::Lower,
            ..CountsPass::raise()
        }
    }

    /// A pass that has come to its end.
    pub(super) fn nothing() -> CountsPass {
        CountsPass {
            cluster: u64::MAX,
            ..CountsPass::raise()
        }
    }

    fn changes(&self, refcount: u64, references: u64) -> bool {
        match self.direction {
            Direction::Raise => refcount < references,
            Direction::Lower => refcount > references,
        }
    }

    pub(super) fn wanted(&mut self, check: &Check) -> Option<Range> {
        let (tally, geometry) = (&check.tally, check.tally.geometry);
        loop {
            let used = tally.next_used(self.cluster)?;
            if used >= tally.clusters {
                return None;
            }
            if let Some(end) = tally.same_page(used) {
                self.cluster = end;
                continue;
            }
            self.cluster = used.saturating_add(1);
            let cluster = ClusterIndex(used);
            let refcount = tally.refcount_of(cluster);
            if !refcount.is_some_and(|count| self.changes(count, tally.references_to(cluster))) {
                continue;
            }
            self.block = geometry.refcount_table_index(cluster);
            let next = self.block.saturating_add(1);
            self.cluster = next.saturating_mul(geometry.refcount_block_entries());
            if let Some(offset) = check.refcounts.block(tally, self.block) {
                return Some(Range::new(offset.0, geometry.cluster_size()));
            }
        }
    }

    pub(super) fn feed(&self, check: &mut Check, block: &mut [u8], result: &mut Repaired) {
        let tally = &mut check.tally;
        let geometry = tally.geometry;
        let entries = geometry.refcount_block_entries();
        let first = self.block.saturating_mul(entries);
        for index in 0..entries {
            let cluster = ClusterIndex(first.saturating_add(index));
            if cluster.0 >= tally.clusters {
                break;
            }
            let old = refcount::get(block, geometry.refcount_order(), index);
            let new = tally.references_to(cluster);
            if !self.changes(old, new) {
                continue;
            }
            if refcount::set(block, geometry.refcount_order(), index, new).is_err() {
                continue;
            }
            Arc::make_mut(&mut tally.refcounts).set(cluster.0, new);
            let at = geometry.cluster_start(cluster);
            let cluster = cluster.0;
            let action = || Action {
                text: alloc::format!("cluster {cluster} at {at:#x}: refcount {old} becomes {new}"),
                miscount: Some(Miscount {
                    cluster,
                    refcount: old,
                    references: new,
                }),
            };
            match self.direction {
                Direction::Raise if cluster >= tally.planned => {}
                Direction::Raise => result.corruption(action),
                Direction::Lower => result.leak(action),
            }
        }
    }
}
