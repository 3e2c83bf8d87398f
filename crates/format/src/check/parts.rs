//! The L2 tables in parts, for the threads of the caller.

use alloc::sync::Arc;
use alloc::vec::{self, Vec};

use crate::addr::ClusterIndex;
use crate::check::machine::{Check, Stage, padded};
use crate::check::mapping::{UseCounts, check_l2_table};
use crate::check::tally::Tally;

/// Some of the L2 tables of an image; it can be sent to another thread. It wants reads as [`Check`] does.
#[derive(Clone, Debug)]
pub struct TablePart {
    tally: Tally,
    tables: vec::IntoIter<(u64, UseCounts)>,
    current: Option<(u64, UseCounts)>,
}

impl TablePart {
    /// Offset and length of the next table; `None` when the part is through.
    #[expect(
        clippy::should_implement_trait,
        reason = "each table must be fed, no iterator"
    )]
    pub fn next(&mut self) -> Option<(u64, u64)> {
        if self.tally.stopped {
            return None;
        }
        if self.current.is_none() {
            self.current = self.tables.next();
        }
        let (offset, _) = self.current?;
        Some((offset, self.tally.geometry.cluster_size()))
    }

    /// Hands in the table; what is missing counts as zeros.
    pub fn feed(&mut self, bytes: &[u8]) {
        if let Some((offset, uses)) = self.current.take() {
            let bytes = padded(bytes, self.tally.geometry.cluster_size());
            check_l2_table(&mut self.tally, offset, uses, &bytes);
        }
    }

    /// Says that the table cannot be read.
    pub fn fail(&mut self) {
        if let Some((offset, _)) = self.current.take() {
            let len = self.tally.geometry.cluster_size();
            self.tally
                .error(format_args!("cannot read {len} bytes at {offset:#x}"));
        }
    }

    /// Tables that are left.
    pub fn left(&self) -> usize {
        self.tables.len()
    }
}

impl Check {
    /// While the next step is to read an L2 table: takes out those that are left, in up to `parts` parts.
    /// [`Check::join`] brings them back. At other times, and when there is but one, there are none.
    pub fn split(&mut self, parts: usize) -> Vec<TablePart> {
        let Stage::L2(tables, current) = &mut self.stage else {
            return Vec::new();
        };
        let parts = parts.min(tables.len().saturating_add(usize::from(current.is_some())));
        if parts < 2 {
            return Vec::new();
        }
        tables.extend(current.take());
        let tables: Vec<_> = core::mem::take(tables).into_iter().collect();
        let each = tables.len().div_ceil(parts).max(1);
        let make = |tables: &[(u64, UseCounts)]| TablePart {
            tally: self.tally.for_part(parts as u64),
            tables: Vec::from(tables).into_iter(),
            current: None,
        };
        let made = tables.chunks(each).map(make).collect();
        self.pending = None;
        made
    }

    /// Takes over what the parts have found, in the order in which they were handed out.
    pub fn join(&mut self, parts: Vec<TablePart>) {
        for part in parts {
            self.tally.join(part.tally);
        }
    }
}

impl Tally {
    /// An empty one for a part of `parts`, with the same refcounts.
    fn for_part(&self, parts: u64) -> Tally {
        let left = self.memory_max.saturating_sub(self.held_bytes());
        let mut tally = Tally {
            references: Default::default(),
            refcounts: Arc::clone(&self.refcounts),
            unread_blocks: self.unread_blocks.clone(),
            report: Default::default(),
            online: self.online.clone(),
            ..*self
        };
        tally.report.total_clusters = self.report.total_clusters;
        tally.stage_bytes = 0;
        // The refcounts count in each of them, and are held once.
        let shared = tally.held_bytes();
        tally.memory_max = shared.saturating_add(left.checked_div(parts).unwrap_or(0));
        tally
    }

    fn join(&mut self, part: Tally) {
        self.clusters = self.clusters.max(part.clusters);
        self.unfollowed |= part.unfollowed;
        self.outside_end = self.outside_end.max(part.outside_end);
        self.outside_far = self.outside_far.min(part.outside_far);
        self.stopped |= part.stopped;
        self.report.join(part.report);
        for cluster in self.references.join(&part.references) {
            let times = part.references.get(cluster);
            let what = format_args!("l2 tables");
            self.refer_to_cluster(ClusterIndex(cluster), times, what);
        }
        self.check_memory();
    }
}
