//! A check of an image that is being written to: what cannot be told of clusters that change meanwhile.
//!
//! The caller begins it at a moment when it knows of every count that no table explains ([`Check::hold`]). From then on
//! it notes the clusters whose counts or references change, before the change can be read. About those nothing is
//! said. Of all others, counts and references are the same in whatever order they are read.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt::Debug;
use core::ops::Range as Clusters;

use crate::check::machine::Check;
use crate::check::reader::Range;
use crate::check::report::Report;
use crate::check::tally::Tally;

/// The clusters that have changed since the check began; it is asked while others go on changing.
pub trait Changes: Debug + Send + Sync {
    /// Whether the count of host cluster number `cluster`, or a reference to it, may have changed.
    fn has_changed(&self, cluster: u64) -> bool;
}

/// What a tally knows of changes.
#[derive(Clone, Debug)]
pub(super) struct Online {
    changes: Arc<dyn Changes>,
    /// Clusters of the file when the check began.
    clusters: u64,
    /// Clusters that may have one count more than references.
    spare: Vec<Clusters<u64>>,
    /// Only what is said about single clusters is news.
    again: bool,
}

impl Check {
    /// Makes it a check of an image that changes meanwhile. With `again` it says nothing that does not depend on
    /// those changes: an earlier check has said it.
    pub fn follow(&mut self, changes: Arc<dyn Changes>, again: bool) {
        self.tally.online = Some(Online {
            changes,
            clusters: self.tally.clusters,
            spare: Vec::new(),
            again,
        });
    }

    /// Counts a reference to `count` clusters from number `first` on that is in no table.
    pub fn hold(&mut self, first: u64, count: u64) {
        let geometry = self.tally.geometry;
        let [offset, len] =
            [first, count].map(|number| number.saturating_mul(geometry.cluster_size()));
        let range = Range::new(offset, len);
        self.tally
            .refer(range, 1, format_args!("reference in memory"));
    }

    /// These clusters may have a count for which there is no reference yet.
    pub fn hold_perhaps(&mut self, first: u64, count: u64) {
        if let Some(online) = &mut self.tally.online {
            online.spare.push(first..first.saturating_add(count));
        }
    }

    /// The file has got longer.
    pub fn file_is_now(&mut self, file_len: u64) {
        self.tally.file_len = self.tally.file_len.max(file_len);
    }

    /// L2 tables that are still to be read, while they are read.
    pub fn tables_left(&self) -> Option<usize> {
        match &self.stage {
            super::machine::Stage::L2(tables, current) => {
                Some(tables.len().saturating_add(usize::from(current.is_some())))
            }
            _ => None,
        }
    }
}

impl Tally {
    /// Whether something can be said about a cluster.
    pub(super) fn is_steady(&self, cluster: u64) -> bool {
        self.online
            .as_ref()
            .is_none_or(|online| cluster < online.clusters && !online.changes.has_changed(cluster))
    }

    /// Whether a cluster may have one count more than references.
    pub(super) fn has_spare_count(&self, cluster: u64) -> bool {
        let online = self.online.as_ref();
        online.is_some_and(|online| online.spare.iter().any(|range| range.contains(&cluster)))
    }

    /// Whether what does not depend on changes was said before.
    pub(super) fn is_again(&self) -> bool {
        self.online.as_ref().is_some_and(|online| online.again)
    }
}

impl Report {
    /// Adds what another check of the same image has found besides; the counts of clusters stay.
    pub fn add_findings(&mut self, more: Report) {
        self.join(Report {
            allocated_clusters: 0,
            fragmented_clusters: 0,
            compressed_clusters: 0,
            clusters_behind_end: 0,
            ..more
        });
    }
}
