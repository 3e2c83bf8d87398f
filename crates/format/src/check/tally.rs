//! State that all check stages share: the two counts for each cluster, and the report.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::addr::{ClusterIndex, HostOffset};
use crate::check::counts::{Counts, PAGE};
use crate::check::online::Online;
use crate::check::reader::{Range, Reader};
use crate::check::report::{Report, Severity};
use crate::feature::Incompatible;
use crate::geometry::Geometry;
use crate::header::Header;
use crate::limit;

#[derive(Clone, Debug)]
pub(super) struct Tally {
    pub(super) geometry: Geometry,
    pub(super) file_len: u64,
    /// Clusters that are compared: those of the file, and one that begins before its end.
    pub(super) clusters: u64,
    /// From this cluster on they are what a repair is about to write behind the end of the file.
    pub(super) planned: u64,
    /// Size of the active disk in bytes.
    pub(super) disk_size: u64,
    /// Guest data lies in another file: L2 entries refer to that.
    pub(super) data_file: bool,
    /// References found.
    pub(super) references: Counts,
    /// Refcounts as the image has them.
    pub(super) refcounts: Arc<Counts>,
    /// Compressed clusters with a subcluster bitmap count as references, which QEMU's checker leaves out: what
    /// the data path reads is in use when refcounts are repaired.
    pub(super) count_unlisted: bool,
    /// There may be references that were not found, or more than a refcount can say.
    pub(super) unfollowed: bool,
    /// References that lie behind the end of the file, near to it: where their last ends. They read as zeros, and
    /// nothing new may be put there.
    pub(super) outside_end: u64,
    /// The first of those that are further away.
    pub(super) outside_far: u64,
    /// Refcount table or blocks cannot be used as they are.
    pub(super) refcounts_damaged: bool,
    /// Refcount blocks that could not be read, by their index in the table, ascending.
    pub(super) unread_blocks: Vec<u64>,
    /// Bytes of L1 and bitmap tables that may still be read. Tables of a sound image do not overlap,
    /// so all of them together are no longer than the file.
    pub(super) table_bytes_left: u64,
    /// Of an image that is written to meanwhile.
    pub(super) online: Option<Online>,
    /// Most memory, in bytes.
    pub(super) memory_max: u64,
    /// Memory of stages, in bytes.
    pub(super) stage_bytes: u64,
    /// Nothing more is checked.
    pub(super) stopped: bool,
    pub(super) report: Report,
}

impl Tally {
    pub(super) fn new(header: &Header, file_len: u64) -> Tally {
        let geometry = header.geometry();
        let whole_sectors = header.size_bytes & !511;
        Tally {
            geometry,
            file_len,
            clusters: geometry.clusters_for(file_len),
            planned: u64::MAX,
            disk_size: header.size_bytes,
            data_file: header.incompatible.has(Incompatible::DATA_FILE),
            references: Counts::default(),
            refcounts: Arc::default(),
            count_unlisted: false,
            unfollowed: false,
            outside_end: 0,
            outside_far: u64::MAX,
            refcounts_damaged: false,
            unread_blocks: Vec::new(),
            table_bytes_left: file_len,
            online: None,
            memory_max: limit::CHECK_MEMORY_BYTES_MAX,
            stage_bytes: 0,
            stopped: false,
            report: Report {
                total_clusters: geometry.clusters_for(whole_sectors),
                ..Report::default()
            },
        }
    }

    /// Counts a corruption; `message` says what and where.
    pub(super) fn corrupt(&mut self, times: u64, message: core::fmt::Arguments<'_>) {
        if !self.is_again() {
            self.report
                .add(Severity::Corruption, times, || alloc::format!("{message}"));
        }
    }

    /// The same of a cluster, if something can be said about it.
    pub(super) fn corrupt_cluster(
        &mut self,
        cluster: ClusterIndex,
        times: u64,
        message: core::fmt::Arguments<'_>,
    ) {
        if self.is_steady(cluster.0) {
            self.report
                .add(Severity::Corruption, times, || alloc::format!("{message}"));
        }
    }

    /// Counts something that could not be checked.
    pub(super) fn error(&mut self, message: core::fmt::Arguments<'_>) {
        if !self.is_again() {
            self.report
                .add(Severity::Error, 1, || alloc::format!("{message}"));
        }
    }

    /// Ends the check with an error.
    pub(super) fn stop(&mut self, message: core::fmt::Arguments<'_>) {
        self.error(message);
        self.stopped = true;
    }

    /// Memory held, in bytes.
    pub(super) fn held_bytes(&self) -> u64 {
        self.references
            .memory_bytes()
            .saturating_add(self.refcounts.memory_bytes())
            .saturating_add(self.stage_bytes)
    }

    /// Stops when more memory is held than the limit allows.
    pub(super) fn check_memory(&mut self) {
        if self.held_bytes() > self.memory_max && !self.stopped {
            self.stop(format_args!(
                "check needs more than {} bytes of memory",
                limit::CHECK_MEMORY_BYTES_MAX
            ));
        }
    }

    /// Counts the reference to an L1 or bitmap table, and returns its reader; an empty one if the table
    /// overlaps others.
    pub(super) fn open_table(
        &mut self,
        offset: u64,
        entries: u32,
        table: core::fmt::Arguments<'_>,
    ) -> Reader {
        let len = u64::from(entries).saturating_mul(8);
        self.refer(Range { offset, len }, 1, table);
        let reader = Reader::new(offset, len, self.file_len);
        match self.table_bytes_left.checked_sub(reader.left()) {
            Some(left) => {
                self.table_bytes_left = left;
                reader
            }
            None => {
                self.unfollowed = true;
                self.corrupt(1, format_args!("{table} overlaps others"));
                Reader::default()
            }
        }
    }

    /// Every reference is known, so that what has none is free.
    pub(super) fn all_followed(&self) -> bool {
        !self.stopped && !self.unfollowed && self.report.check_errors == 0
    }

    pub(super) fn references_to(&self, cluster: ClusterIndex) -> u64 {
        self.references.get(cluster.0)
    }

    /// The refcount the image has for a cluster; `None` when its block could not be read.
    pub(super) fn refcount_of(&self, cluster: ClusterIndex) -> Option<u64> {
        if !self.unread_blocks.is_empty() {
            let block = self.geometry.refcount_table_index(cluster);
            if self.unread_blocks.binary_search(&block).is_ok() {
                return None;
            }
        }
        Some(self.refcounts.get(cluster.0))
    }

    /// Counts `times` references to every cluster of a range; `what` names the range's owner.
    pub(super) fn refer(&mut self, range: Range, times: u64, what: core::fmt::Arguments<'_>) {
        if range.len == 0 {
            return;
        }
        let end = range.offset.saturating_add(range.len);
        // The last cluster of a file may be cut off, so a range may end less than one after it.
        if end.saturating_sub(self.file_len) >= self.geometry.cluster_size() {
            self.note_outside(range.offset, end);
            return self.corrupt(
                times,
                format_args!(
                    "{what} at {:#x}, {} bytes, lies outside of the file",
                    range.offset, range.len
                ),
            );
        }
        let first = self.geometry.cluster_of(HostOffset(range.offset));
        let last = self.geometry.cluster_of(HostOffset(end.saturating_sub(1)));
        self.clusters = self.clusters.max(last.0.saturating_add(1));
        let most = self.geometry.refcount_max();
        let mut at = first.0;
        while at <= last.0 {
            let count = last.0.saturating_sub(at).saturating_add(1);
            let (count, done) = self.references.add(at, count, times, most);
            let end = at.saturating_add(count);
            if !done {
                for cluster in at..end {
                    self.refer_to_cluster(ClusterIndex(cluster), times, what);
                }
            }
            at = end;
        }
    }

    /// Counts one reference to each cluster that a repair is about to write behind the end of the file.
    pub(super) fn plan(&mut self, first: u64, count: u64) {
        let end = first.saturating_add(count);
        for cluster in first..end {
            self.references.set(cluster, 1);
        }
        self.clusters = self.clusters.max(end);
        self.planned = self.planned.min(first);
    }

    fn note_outside(&mut self, start: u64, end: u64) {
        // As much as new refcount structures for the whole file take, and some.
        let counts = self
            .clusters
            .saturating_mul(u64::from(self.geometry.refcount_bits()));
        let room = self
            .geometry
            .cluster_size()
            .saturating_mul(16)
            .saturating_add(counts / 2);
        if start <= self.file_len.saturating_add(room) {
            self.outside_end = self.outside_end.max(end);
        } else {
            self.outside_far = self.outside_far.min(start);
        }
    }

    pub(super) fn refer_to_cluster(
        &mut self,
        cluster: ClusterIndex,
        times: u64,
        what: core::fmt::Arguments<'_>,
    ) {
        let sum = self.references.get(cluster.0).saturating_add(times);
        let most = self.geometry.refcount_max();
        if sum > most {
            self.unfollowed = true;
            let offset = self.geometry.cluster_start(cluster);
            self.corrupt_cluster(
                cluster,
                sum.saturating_sub(most),
                format_args!(
                    "{what}: cluster at {offset:#x} has more references than the {} bits of a \
                     refcount can count",
                    self.geometry.refcount_bits()
                ),
            );
        }
        self.references.set(cluster.0, sum.min(most));
    }

    /// Where the page of `cluster` ends, if all refcounts in it are known and as its references.
    pub(super) fn same_page(&self, cluster: u64) -> Option<u64> {
        let end = (cluster | (PAGE - 1)).saturating_add(1);
        let known = self.unread_blocks.is_empty() && end <= self.clusters;
        (known && self.references.same_page(&self.refcounts, cluster)).then_some(end)
    }

    /// The first cluster from `cluster` on that may have a count of either kind.
    pub(super) fn next_used(&self, cluster: u64) -> Option<u64> {
        let references = self.references.next_used(cluster);
        let refcounts = self.refcounts.next_used(cluster);
        match (references, refcounts) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}
