//! Planning a contiguous allocation (an *area*): where it goes, and which refcount blocks it brings along. For L1
//! tables, refcount tables and tables of snapshots.
//!
//! An area brings along what counts it. The refcount blocks that are missing lie before it, and a longer
//! refcount table where the blocks need one:
//!
//! ```text
//! | new refcount blocks | new refcount table | area |
//! ```
//!
//! All of it is planned at once, because the blocks and the table are to be counted too. Sync only.

use gaur_block::Errno;
use gaur_format::{limit, refcount};

use super::alloc::{Alloc, AllocError, Run};
use crate::range::ClusterRange;

/// Entries of a refcount table in one sector: so many new ones become visible at once.
pub(crate) const SECTOR_ENTRIES: u64 = 512 / 8;
/// Free runs in memory at which a block device is searched no further for one that is long enough.
const FREE_RUNS_MAX: usize = 1 << 20;

/// Clusters in a row, in the order of the module's picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AreaPlan {
    /// First cluster.
    pub(crate) start: u64,
    /// Indexes of the refcount blocks that are missing.
    pub(crate) blocks: Vec<u64>,
    /// Clusters of a new refcount table; 0 where the present one does.
    pub(crate) table_clusters: u64,
    /// Clusters of the area itself.
    pub(crate) clusters: u64,
}

impl AreaPlan {
    /// First cluster of the new refcount table.
    pub(crate) fn table_start(&self) -> u64 {
        self.start + self.blocks.len() as u64
    }

    /// First cluster of the area itself.
    pub(crate) fn area_start(&self) -> u64 {
        self.table_start() + self.table_clusters
    }

    /// First cluster behind it all.
    pub(crate) fn end(&self) -> u64 {
        self.area_start() + self.clusters
    }

    /// The clusters of it all.
    pub(crate) fn all(&self) -> ClusterRange {
        ClusterRange::between(self.start, self.end())
    }

    /// The new refcount blocks.
    pub(crate) fn block_clusters(&self) -> ClusterRange {
        ClusterRange::between(self.start, self.table_start())
    }

    /// The new refcount table; empty where the present one does.
    pub(crate) fn table(&self) -> ClusterRange {
        ClusterRange::new(self.table_start(), self.table_clusters)
    }

    /// The new refcount blocks and the new refcount table.
    pub(crate) fn tables(&self) -> ClusterRange {
        ClusterRange::between(self.start, self.area_start())
    }
}

/// Why the clusters of an area cannot be counted yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Uncounted {
    /// The slice of a refcount block at this host offset has to be loaded first.
    Slice(u64),
    /// This cluster is in use after all: space beyond the end of a short file.
    Used(u64),
}

impl Alloc {
    /// Finds room for `clusters` clusters in a row and takes it, with what has to be made to count it.
    /// Nothing is counted yet.
    pub(crate) fn find_area(&mut self, clusters: u64) -> Result<AreaPlan, AllocError> {
        if let Some(plan) = self.find_free_area(0, clusters)? {
            return Ok(plan);
        }
        // A file grows; only a device is worth a search.
        while self.capacity.is_some()
            && self.scan < self.scan_end
            && self.free.len() < FREE_RUNS_MAX
        {
            let known = self.free.len();
            self.scan_step()?;
            self.join_free(known);
            if let Some(plan) = self.find_free_area(known.saturating_sub(1), clusters)? {
                return Ok(plan);
            }
        }
        self.end_area(self.bump, clusters, None)
    }

    /// The same for what the refcount block with index `block` needs, which the refcount table is too short
    /// for, behind all that the table reaches.
    pub(crate) fn find_table(&mut self, block: u64) -> Result<AreaPlan, AllocError> {
        let covered = self.table.len() as u64 * self.geometry.refcount_block_entries();
        self.end_area(self.bump.max(covered), 0, Some(block))
    }

    /// Takes room from cluster `start` on, behind everything used so far.
    fn end_area(
        &mut self,
        start: u64,
        clusters: u64,
        also: Option<u64>,
    ) -> Result<AreaPlan, AllocError> {
        let plan = self.plan_area(start, clusters, also);
        let plan = plan.map_err(AllocError::Failed)?;
        if self.capacity.is_some_and(|capacity| plan.end() > capacity) {
            return Err(AllocError::Failed(Errno::ENOSPC));
        }
        self.bump = plan.end();
        Ok(plan)
    }

    /// Takes room from the free runs from number `first` on, the first that does.
    fn find_free_area(
        &mut self,
        first: usize,
        clusters: u64,
    ) -> Result<Option<AreaPlan>, AllocError> {
        for at in first..self.free.len() {
            let Some(run) = self.free.get(at).copied() else {
                break;
            };
            if run.len < clusters {
                continue;
            }
            let plan = self.plan_area(run.start, clusters, None);
            let plan = plan.map_err(AllocError::Failed)?;
            if plan.all().len > run.len {
                continue;
            }
            let rest = Run {
                start: plan.end(),
                len: run.len - plan.all().len,
                ..run
            };
            if rest.len == 0 {
                self.free.remove(at);
            } else if let Some(slot) = self.free.get_mut(at) {
                *slot = rest;
            }
            return Ok(Some(plan));
        }
        Ok(None)
    }

    /// Joins the free runs from number `first` on with their neighbours, the run before them included.
    fn join_free(&mut self, first: usize) {
        let from = first.saturating_sub(1);
        let mut found = self.free.split_off(from.min(self.free.len())).into_iter();
        let Some(mut last) = found.next() else { return };
        for run in found {
            if last.start + last.len == run.start
                && (last.zeroed, last.backed) == (run.zeroed, run.backed)
            {
                last.len += run.len;
            } else {
                self.free.push(std::mem::replace(&mut last, run));
            }
        }
        self.free.push(last);
    }

    /// What lies where if an area begins at `start`; block `also` is made too if there is none.
    fn plan_area(&self, start: u64, clusters: u64, also: Option<u64>) -> Result<AreaPlan, Errno> {
        let per_block = self.geometry.refcount_block_entries();
        let mut plan = AreaPlan {
            start,
            blocks: Vec::new(),
            table_clusters: 0,
            clusters,
        };
        // What is added has to be counted too. That ends soon: a block counts 64 clusters at least.
        loop {
            let counted = start / per_block..plan.end().div_ceil(per_block);
            let also = also.filter(|index| !counted.contains(index));
            let missing = counted.chain(also).filter(|index| !self.has_block(*index));
            let blocks: Vec<u64> = missing.collect();
            let table_clusters = self.table_clusters_for(&blocks)?;
            if (blocks.len(), table_clusters) == (plan.blocks.len(), plan.table_clusters) {
                return Ok(plan);
            }
            (plan.blocks, plan.table_clusters) = (blocks, table_clusters);
        }
    }

    fn has_block(&self, index: u64) -> bool {
        self.table
            .get(index as usize)
            .is_some_and(|offset| *offset != 0)
    }

    /// Clusters of the refcount table that takes the place of the present one when `blocks` are new; 0 if
    /// it can stay. It is replaced when it is too short, and when the new entries lie in several sectors:
    /// they may count each other's clusters, so they have to become visible together.
    fn table_clusters_for(&self, blocks: &[u64]) -> Result<u64, Errno> {
        let (Some(first), Some(last)) = (blocks.iter().min(), blocks.iter().max()) else {
            return Ok(0);
        };
        let present = self.table.len() as u64;
        if *last < present && first / SECTOR_ENTRIES == last / SECTOR_ENTRIES {
            return Ok(0);
        }
        let most = limit::REFCOUNT_TABLE_BYTES_MAX / 8;
        if *last >= most {
            return Err(Errno::EFBIG);
        }
        // Half as much again, so that growing stays rare.
        let roomy = if *last < present {
            present
        } else {
            present * 3 / 2
        };
        let entries = (last + 1).max(roomy.min(most));
        Ok(entries.div_ceil(self.geometry.cluster_size() / 8))
    }

    /// Looks whether the clusters of `rest` are free, as far as refcount blocks in force count them and are
    /// cached, and with `count` counts each of those once. What is left to do stays in `rest`.
    pub(crate) fn visit_area(
        &mut self,
        rest: &mut ClusterRange,
        count: bool,
    ) -> Result<(), Uncounted> {
        let order = self.geometry.refcount_order();
        while rest.len > 0 {
            let len = match self.slice_of(rest.start) {
                None => rest.len.min(self.to_next_block(rest.start)),
                Some((slice, within)) => {
                    let len = rest.len.min(self.per_slice() - within);
                    let mut counts = within..within + len;
                    let Some(bytes) = self.blocks.get(slice) else {
                        return Err(Uncounted::Slice(slice));
                    };
                    if let Some(used) = counts.find(|at| refcount::get(bytes, order, *at) != 0) {
                        return Err(Uncounted::Used(rest.start + used - within));
                    }
                    if count {
                        self.watch.note(rest.first(len));
                    }
                    if count && let Some(bytes) = self.blocks.get_dirty(slice) {
                        for at in within..within + len {
                            let set = refcount::set(bytes, order, at, 1);
                            debug_assert!(set.is_ok(), "every width holds a count of 1");
                        }
                    }
                    len
                }
            };
            rest.start += len;
            rest.len -= len;
        }
        Ok(())
    }

    /// Whether refcount blocks in force count any of the plan's clusters.
    pub(crate) fn counts_some_of(&self, plan: &AreaPlan) -> bool {
        let per_block = self.geometry.refcount_block_entries();
        (plan.start / per_block..plan.end().div_ceil(per_block)).any(|index| self.has_block(index))
    }

    /// Clusters from `cluster` on that the same refcount block counts.
    fn to_next_block(&self, cluster: u64) -> u64 {
        let per_block = self.geometry.refcount_block_entries();
        per_block - cluster % per_block
    }

    /// Gives up a plan none of whose clusters is counted. Those before `from` are in use after all.
    pub(crate) fn abandon_area(&mut self, plan: &AreaPlan, from: u64) {
        if self.bump == plan.end() {
            // The file may not have them yet.
            self.bump = from;
        } else {
            self.give_back(Run {
                start: from,
                len: plan.end() - from,
                ..Run::EMPTY
            });
        }
    }

    /// Gives up a plan whose clusters before `counted` are counted where blocks in force count them. The
    /// file has all of them.
    pub(crate) fn undo_area(&mut self, plan: &AreaPlan, counted: u64) {
        let mut at = plan.start;
        while at < plan.end() {
            let upto = plan.end().min(at + self.to_next_block(at));
            let counted = match self.slice_of(at) {
                Some(_) => counted.clamp(at, upto),
                None => at,
            };
            if counted > at {
                self.releasable.push(ClusterRange::new(at, counted - at));
            }
            self.give_back(Run {
                start: counted,
                len: upto - counted,
                ..Run::EMPTY
            });
            at = upto;
        }
    }
}

#[cfg(test)]
mod tests {
    use gaur_format::Version;
    use gaur_format::geometry::Geometry;

    use super::*;

    /// An allocator whose file ends at cluster `end`, with refcount blocks as far as these counts go.
    fn alloc(cluster_bits: u32, order: u32, end: u64) -> Alloc {
        let geometry = Geometry::new(Version::V3, cluster_bits, false, order).unwrap();
        let per_block = geometry.refcount_block_entries();
        let size = geometry.cluster_size();
        let blocks = end.div_ceil(per_block);
        let clusters = (blocks * 8).div_ceil(size);
        let mut table: Vec<u64> = (1..=blocks).map(|block| block * size).collect();
        table.resize((clusters * size / 8) as usize, 0);
        Alloc::new(geometry, table, (size, clusters), 1 << 20, end * size, true)
    }

    /// Whatever the clusters and counts: all that a plan takes is counted by a block that is there or by one
    /// of its own, the table reaches them all, and little is taken beside what was asked for.
    #[test]
    fn a_plan_counts_itself_and_takes_little_more_than_its_area() {
        for cluster_bits in [9, 10, 12, 16, 21] {
            for order in 0..=6 {
                for (end, clusters) in [
                    (3, 2),
                    (63, 64),
                    (64, 65),
                    (255, 1000),
                    (300, 4095),
                    (1000, 70_000),
                    (5000, 131_072),
                ] {
                    let mut alloc = alloc(cluster_bits, order, end);
                    let per_block = alloc.geometry.refcount_block_entries();
                    let plan = alloc.find_area(clusters).unwrap();
                    assert_eq!(plan.start, end);
                    assert_eq!(alloc.bump, plan.end());
                    for index in plan.start / per_block..plan.end().div_ceil(per_block) {
                        let made = plan.blocks.contains(&index);
                        assert!(made != alloc.has_block(index), "block {index}");
                    }
                    let per_table = alloc.geometry.cluster_size() / 8;
                    let entries = match plan.table_clusters {
                        0 => alloc.table.len() as u64,
                        longer => longer * per_table,
                    };
                    assert!(plan.blocks.iter().all(|index| *index < entries));
                    let extra = plan.all().len - clusters;
                    let table = (plan.end() / per_block + 1) * 2 / per_table + 1;
                    let blocks = plan.all().len / per_block + 2;
                    assert!(extra <= blocks + table, "{extra} beside {clusters}");
                }
            }
        }
    }

    /// New entries in two sectors of the table would become visible one after the other.
    #[test]
    fn blocks_in_two_sectors_of_the_table_get_a_new_table() {
        let mut alloc = alloc(9, 6, 64 * 63);
        let table = alloc.table.len() as u64;
        assert!(table >= 63);
        alloc.table.resize(1000, 0);
        let plan = alloc.find_area(3 * 64).unwrap();
        assert!(plan.blocks.len() >= 3 && plan.table_clusters > 0);
        let again = alloc.find_area(2).unwrap();
        assert_eq!(again.table_clusters, 0);
    }

    /// What a table of the longest kind cannot reach is refused, not looked for.
    #[test]
    fn an_area_beyond_the_longest_refcount_table_is_refused() {
        let mut alloc = alloc(9, 6, 10);
        let reach = limit::REFCOUNT_TABLE_BYTES_MAX / 8 * 64;
        let refused = alloc.find_area(reach);
        assert_eq!(refused, Err(AllocError::Failed(Errno::EFBIG)));
        assert_eq!(alloc.bump, 10, "nothing was taken");
    }

    #[test]
    fn free_runs_are_used_before_the_file_grows() {
        let mut alloc = alloc(16, 4, 100);
        for (start, len) in [(10, 3), (20, 8), (40, 8)] {
            alloc.free.push(Run {
                start,
                len,
                ..Run::EMPTY
            });
        }
        let plan = alloc.find_area(5).unwrap();
        assert_eq!((plan.start, plan.all().len), (20, 5));
        let plan = alloc.find_area(8).unwrap();
        assert_eq!(plan.start, 40);
        let plan = alloc.find_area(4).unwrap();
        assert_eq!((plan.start, alloc.bump), (100, 104));
        alloc.abandon_area(&plan, plan.start);
        assert_eq!(alloc.bump, 100);
    }
}
