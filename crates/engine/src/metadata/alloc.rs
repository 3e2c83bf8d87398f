//! Allocator of host clusters: reference counts, free space, reservations of the queues.
//!
//! Reference counts in memory may be ahead of the disk in one direction only: a count goes up when
//! a cluster is taken, before anything refers to it, and goes down when the last durable reference
//! is durably gone. So any copy of a refcount block may be written at any time (O1, O3).
//!
//! Free space comes from three places, in this order: runs known to be free, a scan of the refcount
//! blocks below the end the file had when it was opened, and the space beyond. Every queue takes
//! from a run of its own, so what one queue writes stays together.
//!
//! Units: clusters are host cluster numbers, offsets are bytes. Sync only; lock order: last but
//! for `MetadataSet`, `Epochs` and the queue's pool, which are taken below it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use gaur_block::Errno;
use gaur_format::addr::ClusterIndex;
use gaur_format::geometry::Geometry;
use gaur_format::refcount;

use super::cache::SliceCache;
use super::changed::ChangeWatch;
use super::cluster_set::ClusterSet;
use super::epochs::Epochs;
use super::freed::FreedBlocks;
use super::holes::{Hole, Holes};
use crate::corruption::{Fault, Finding, Structure};
use crate::range::{ClusterRange, HostRange};

/// A run of clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// First cluster.
    pub(crate) start: u64,
    /// Number of clusters.
    pub(crate) len: u64,
    /// Every byte reads as zero and nothing was ever written there.
    pub(crate) zeroed: bool,
    /// The host's space was taken ahead.
    pub(crate) backed: bool,
}

/// Clusters that a queue was handed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Handed {
    /// Counted ahead.
    pub(crate) local: ClusterRange,
    /// To be filled with compressed clusters.
    pub(crate) tail: ClusterRange,
}

/// What has to be done before an allocation can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllocNeed {
    /// Load the refcount slice at this host offset.
    Slice(u64),
    /// Make the refcount block with this index, in clusters of the queue's reservation.
    Block(u64),
    /// Make the file this many bytes long.
    Grow(u64),
}

/// Why an allocation did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllocError {
    /// Something has to be done first.
    Need(AllocNeed),
    /// It cannot succeed.
    Failed(Errno),
    /// The refcounts cannot be right.
    Corrupt(Fault),
}

/// Reference counts and free space of the top layer.
#[derive(Debug)]
pub(crate) struct Alloc {
    pub(crate) geometry: Geometry,
    /// Host offsets of the refcount blocks; 0 for none.
    pub(crate) table: Vec<u64>,
    pub(crate) table_offset: u64,
    pub(crate) table_clusters: u64,
    pub(crate) blocks: SliceCache,
    pub(crate) free: Vec<Run>,
    pub(crate) reserved: Vec<Run>,
    /// First cluster beyond everything that was ever used.
    pub(crate) bump: u64,
    /// Where the scan for free clusters below `scan_end` goes on.
    pub(super) scan: u64,
    pub(super) scan_end: u64,
    /// Length of the file in bytes, as far as this engine made it.
    pub(crate) physical_end: u64,
    /// Length of the file when it was opened.
    pub(crate) opened_end: u64,
    /// Of what the file gained since, the host's space up to here was taken ahead.
    pub(crate) backed_end: u64,
    /// Number of clusters there can be at most (a block device).
    pub(crate) capacity: Option<u64>,
    /// References removed in memory since the last writeback pass began.
    pub(crate) unmapped: Vec<ClusterRange>,
    /// References durably gone, whose clusters some request may still be using.
    pub(crate) durable: Vec<ClusterRange>,
    /// Of those, the ones that wait for `draining_epoch` to drain.
    pub(crate) draining: Vec<ClusterRange>,
    pub(crate) draining_epoch: u64,
    /// Free clusters whose space is being punched.
    punching: Vec<Run>,
    /// Clusters that requests have freed and that are not counted down yet, where it matters what has freed them.
    pub(crate) requested: ClusterSet,
    /// Clusters that a switch of the whole image has freed and that wait to be punched.
    pub(crate) freed: FreedBlocks,
    /// References that no request uses any more and that are to be counted down.
    pub(crate) releasable: Vec<ClusterRange>,
    /// Discarded space inside clusters that stay; it drains along with the references.
    pub(crate) holes: Holes,
    /// What queues were handed last, by queue: clusters counted ahead, and those of the tail of compressed clusters. Some
    /// of them have references by now.
    pub(crate) handed: BTreeMap<usize, Handed>,
    /// Where changes are noted for a check that runs.
    pub(crate) watch: Arc<ChangeWatch>,
}

/// A queue without space of its own reserves this many bytes at once.
const RESERVATION_BYTES: u64 = 1 << 20;
/// Most clusters reserved at once.
const RESERVATION_CLUSTERS_MAX: u64 = 512;
/// Runs of clusters waiting to be freed that make a pass due.
const UNMAPPED_MAX: usize = 1 << 16;
/// Refcount blocks are loaded and written in slices of this many bytes at most.
const SLICE_BYTES: u64 = 4096;
/// The file grows by at least this many bytes.
const GROWTH_BYTES_MIN: u64 = 32 << 20;
/// The file grows by at most this many bytes beyond what is needed.
const GROWTH_BYTES_MAX: u64 = 1 << 30;
/// The file grows by this share of its length.
const GROWTH_SHARE: u64 = 16;

/// How long a file of `now` bytes is made when `need` bytes are needed: growth is rare, and what is
/// grown too far is cut off when the image is closed.
pub(crate) fn grown_len(now: u64, need: u64) -> u64 {
    let step = (now / GROWTH_SHARE).clamp(GROWTH_BYTES_MIN, GROWTH_BYTES_MAX);
    let further = now.saturating_add(step) / GROWTH_BYTES_MIN * GROWTH_BYTES_MIN;
    let least = need.checked_next_multiple_of(GROWTH_BYTES_MIN);
    further.max(least.unwrap_or(need))
}

impl Alloc {
    /// State of an image just opened whose file is `file_len` bytes long.
    pub(crate) fn new(
        geometry: Geometry,
        table: Vec<u64>,
        table_place: (u64, u64),
        cache_bytes: u64,
        file_len: u64,
        resizable: bool,
    ) -> Alloc {
        let clusters = geometry.clusters_for(file_len);
        let covered = table
            .iter()
            .rposition(|offset| *offset != 0)
            .map_or(0, |last| last as u64 + 1)
            * geometry.refcount_block_entries();
        // The last block may count clusters that lie beyond the end of a device.
        let capacity = (!resizable).then(|| file_len / geometry.cluster_size());
        let bump = capacity.map_or(clusters, |capacity| covered.min(capacity));
        let (table_offset, table_clusters) = table_place;
        Alloc {
            geometry,
            table,
            table_offset,
            table_clusters,
            blocks: SliceCache::new(geometry.cluster_size().min(SLICE_BYTES), cache_bytes),
            free: Vec::new(),
            reserved: Vec::new(),
            bump,
            scan: 0,
            scan_end: bump,
            physical_end: file_len,
            opened_end: file_len,
            backed_end: 0,
            capacity,
            unmapped: Vec::new(),
            durable: Vec::new(),
            draining: Vec::new(),
            draining_epoch: 0,
            punching: Vec::new(),
            requested: ClusterSet::default(),
            freed: FreedBlocks::default(),
            releasable: Vec::new(),
            holes: Holes::default(),
            handed: BTreeMap::new(),
            watch: Arc::default(),
        }
    }

    /// Host offset of the slice that counts `cluster`, and the cluster's index within the slice;
    /// `None` if no refcount block covers it.
    pub(crate) fn slice_of(&self, cluster: u64) -> Option<(u64, u64)> {
        let index = ClusterIndex(cluster);
        let block = *self
            .table
            .get(self.geometry.refcount_table_index(index) as usize)?;
        if block == 0 {
            return None;
        }
        let per_slice = self.per_slice();
        let within = self.geometry.refcount_block_index(index);
        Some((
            block + within / per_slice * self.blocks.slice_bytes(),
            within % per_slice,
        ))
    }

    /// Counts in one slice.
    pub(super) fn per_slice(&self) -> u64 {
        (self.blocks.slice_bytes() * 8) >> self.geometry.refcount_order()
    }

    /// Takes up to `want` clusters in a row for `queue`; each has a count of 1 afterwards.
    pub(crate) fn take(
        &mut self,
        queue: usize,
        want: u64,
        is_metadata: impl Fn(u64) -> bool,
    ) -> Result<Run, AllocError> {
        loop {
            let reserved = self.reserved.get(queue).copied().unwrap_or(Run::EMPTY);
            if reserved.len == 0 {
                self.refill(queue, want)?;
                continue;
            }
            let index = self
                .geometry
                .refcount_table_index(ClusterIndex(reserved.start));
            let Some((slice, within)) = self.slice_of(reserved.start) else {
                return Err(AllocError::Need(AllocNeed::Block(index)));
            };
            let count = want.min(reserved.len).min(self.per_slice() - within);
            let order = self.geometry.refcount_order();
            let Some(bytes) = self.blocks.get(slice) else {
                return Err(AllocError::Need(AllocNeed::Slice(slice)));
            };
            let unused = (within..within + count)
                .take_while(|at| refcount::get(bytes, order, *at) == 0)
                .count() as u64;
            if unused == 0 {
                // In use after all: space beyond the end of a short file.
                let used = used_from(bytes, order, within..within + count);
                self.consume(queue, used);
                continue;
            }
            let taken = Run {
                len: unused,
                ..reserved
            };
            if let Some(bad) = (taken.start..taken.start + unused).find(|at| is_metadata(*at)) {
                self.consume(queue, bad + 1 - taken.start);
                return Err(AllocError::Corrupt(self.metadata_is_free(bad)));
            }
            self.watch.note(taken.range());
            if let Some(bytes) = self.blocks.get_dirty(slice) {
                for at in within..within + unused {
                    let set = refcount::set(bytes, order, at, 1);
                    debug_assert!(set.is_ok(), "every width holds a count of 1");
                }
            }
            self.consume(queue, unused);
            return Ok(taken);
        }
    }

    /// The count of a cluster that was used before.
    pub(crate) fn count_of(&self, cluster: u64) -> Result<u64, AllocError> {
        let (slice, within) = self.counted_at(cluster)?;
        match self.blocks.get(slice) {
            Some(bytes) => Ok(refcount::get(bytes, self.geometry.refcount_order(), within)),
            None => Err(AllocError::Need(AllocNeed::Slice(slice))),
        }
    }

    fn counted_at(&self, cluster: u64) -> Result<(u64, u64), AllocError> {
        let place = self.slice_of(cluster).filter(|_| cluster < self.bump);
        place.ok_or_else(|| AllocError::Corrupt(self.fault(cluster, Finding::Uncounted)))
    }

    /// A cluster that holds metadata has a count of zero.
    pub(crate) fn metadata_is_free(&self, cluster: u64) -> Fault {
        self.fault(cluster, Finding::MetadataIsFree)
    }

    /// A fault of the count of `cluster`, or of the table that lacks a block for it.
    fn fault(&self, cluster: u64, finding: impl FnOnce(u64) -> Finding) -> Fault {
        let (structure, host) = match self.slice_of(cluster) {
            Some((slice, within)) => {
                let bits = within << self.geometry.refcount_order();
                (Structure::RefcountBlock, slice + bits / 8)
            }
            None => {
                let index = self.geometry.refcount_table_index(ClusterIndex(cluster));
                (Structure::RefcountTable, self.table_offset + index * 8)
            }
        };
        Fault {
            structure,
            host,
            finding: finding(cluster * self.geometry.cluster_size()),
        }
    }

    /// Counts one more reference to a cluster that is taken; `false` where the count cannot be higher.
    pub(crate) fn share(&mut self, cluster: u64) -> Result<bool, AllocError> {
        let (slice, within) = self.counted_at(cluster)?;
        let (now, order) = (self.count_of(cluster)?, self.geometry.refcount_order());
        self.watch.note(ClusterRange::new(cluster, 1));
        let bytes = self.blocks.get_dirty(slice);
        let bytes = bytes.ok_or(AllocError::Need(AllocNeed::Slice(slice)))?;
        Ok(refcount::set(bytes, order, within, now.saturating_add(1)).is_ok())
    }

    /// Sees to it that a cluster taken by a process that is gone has a count.
    pub(crate) fn adopt(&mut self, cluster: u64) -> Result<(), AllocError> {
        let (slice, within) = self.counted_at(cluster)?;
        let order = self.geometry.refcount_order();
        if self.count_of(cluster)? == 0
            && let Some(bytes) = self.blocks.get_dirty(slice)
        {
            let set = refcount::set(bytes, order, within, 1);
            debug_assert!(set.is_ok(), "every width holds a count of 1");
        }
        Ok(())
    }

    /// Shortens the reservation of `queue` by `count` clusters at its start.
    pub(crate) fn consume(&mut self, queue: usize, count: u64) {
        if let Some(run) = self.reserved.get_mut(queue) {
            let count = count.min(run.len);
            run.start += count;
            run.len -= count;
        }
    }

    /// Gives the empty reservation of `queue` a new run.
    fn refill(&mut self, queue: usize, want: u64) -> Result<(), AllocError> {
        let want = want.max(self.batch());
        if !self.free.is_empty() {
            return self.refill_from_free(queue, want);
        }
        if self.scan < self.scan_end && self.scan_step()? {
            return self.refill_from_free(queue, want);
        }
        if let Some(capacity) = self.capacity
            && self.bump >= capacity
        {
            while self.scan < self.scan_end {
                if self.scan_step()? {
                    return self.refill_from_free(queue, want);
                }
            }
            return Err(AllocError::Failed(Errno::ENOSPC));
        }
        self.reserve_at_end(queue, want)
    }

    fn refill_from_free(&mut self, queue: usize, want: u64) -> Result<(), AllocError> {
        match self.free.pop() {
            Some(run) => {
                let len = run.len.min(want);
                if len < run.len {
                    self.free.push(Run {
                        start: run.start + len,
                        len: run.len - len,
                        ..run
                    });
                }
                self.reserve(queue, Run { len, ..run })
            }
            None => self.reserve_at_end(queue, want),
        }
    }

    /// Reserves space beyond everything used so far.
    fn reserve_at_end(&mut self, queue: usize, want: u64) -> Result<(), AllocError> {
        self.skip_used()?;
        let mut run = Run {
            start: self.bump,
            len: want,
            zeroed: self.capacity.is_none(),
            backed: false,
        };
        // One refcount block at a time: the run then lies where one block counts it.
        let entries = self.geometry.refcount_block_entries();
        run.len = run.len.min(entries - run.start % entries);
        if let Some(capacity) = self.capacity {
            run.len = run.len.min(capacity.saturating_sub(run.start));
        } else {
            let end = (run.start + run.len) * self.geometry.cluster_size();
            if end > self.physical_end {
                return Err(AllocError::Need(AllocNeed::Grow(end)));
            }
        }
        if run.len == 0 {
            return Err(AllocError::Failed(Errno::ENOSPC));
        }
        self.bump = run.start + run.len;
        run.backed = self.is_backed(self.bump);
        self.reserve(queue, run)
    }

    /// Moves the end of used space over clusters behind it that are in use after all: those of a file
    /// that is shorter than what its refcounts say. The file grows only for clusters that are free.
    fn skip_used(&mut self) -> Result<(), AllocError> {
        while let Some((slice, within)) = self.slice_of(self.bump) {
            let order = self.geometry.refcount_order();
            let per_slice = self.per_slice();
            let Some(bytes) = self.blocks.get(slice) else {
                return Err(AllocError::Need(AllocNeed::Slice(slice)));
            };
            let used = used_from(bytes, order, within..per_slice);
            self.bump += used;
            if within + used < per_slice {
                break;
            }
        }
        Ok(())
    }

    /// Whether the host's space for clusters below `end` was taken ahead.
    fn is_backed(&self, end: u64) -> bool {
        end * self.geometry.cluster_size() <= self.backed_end
    }

    fn reserve(&mut self, queue: usize, run: Run) -> Result<(), AllocError> {
        while self.reserved.len() <= queue {
            self.reserved.push(Run::EMPTY);
        }
        if let Some(slot) = self.reserved.get_mut(queue) {
            *slot = run;
        }
        Ok(())
    }

    /// Looks at the counts of one more slice and adds what is free there to the free runs; whether
    /// it found any.
    pub(super) fn scan_step(&mut self) -> Result<bool, AllocError> {
        let start = self.scan;
        let Some((slice, within)) = self.slice_of(start) else {
            // No refcount block: every count in its range is zero.
            let entries = self.geometry.refcount_block_entries();
            let end = ((start / entries + 1) * entries).min(self.scan_end);
            self.scan = end;
            self.free.push(Run {
                start,
                len: end - start,
                ..Run::EMPTY
            });
            return Ok(true);
        };
        let end = (start + self.per_slice() - within).min(self.scan_end);
        let order = self.geometry.refcount_order();
        let Some(bytes) = self.blocks.get(slice) else {
            return Err(AllocError::Need(AllocNeed::Slice(slice)));
        };
        let mut found = false;
        let mut cluster = start;
        while cluster < end {
            let at = within + (cluster - start);
            let left = end - cluster;
            let unused = (at..at + left)
                .take_while(|at| refcount::get(bytes, order, *at) == 0)
                .take_while(|at| !punching(&self.punching, start + at - within))
                .take_while(|at| !self.freed.contains(start + at - within))
                .count() as u64;
            if unused > 0 {
                self.free.push(Run {
                    start: cluster,
                    len: unused,
                    ..Run::EMPTY
                });
                found = true;
            }
            cluster += unused + 1;
        }
        self.scan = end;
        Ok(found)
    }

    /// Moves references on from "durably gone" to "no request uses them", as far as the requests that
    /// may use them have ended.
    pub(crate) fn drain(&mut self, epochs: &Epochs) {
        let holes = &mut self.holes;
        let nothing = |free: &[ClusterRange], holes: &[Hole]| free.is_empty() && holes.is_empty();
        if !nothing(&self.draining, &holes.draining) && epochs.drained(self.draining_epoch) {
            self.releasable.append(&mut self.draining);
            holes.ready.append(&mut holes.draining);
        }
        if !nothing(&self.draining, &holes.draining) || nothing(&self.durable, &holes.durable) {
            return;
        }
        let Some(epoch) = epochs.advance() else {
            return;
        };
        if epochs.drained(epoch) {
            self.releasable.append(&mut self.durable);
            holes.ready.append(&mut holes.durable);
        } else {
            self.draining_epoch = epoch;
            self.draining.append(&mut self.durable);
            holes.draining.append(&mut holes.durable);
        }
    }

    /// Where the refcount table is.
    pub(crate) fn table_range(&self) -> HostRange {
        let len = self.table_clusters * self.geometry.cluster_size();
        HostRange::new(self.table_offset, len)
    }

    /// Whether references wait to be given back.
    pub(crate) fn has_pending(&self) -> bool {
        let lists = [
            &self.unmapped,
            &self.durable,
            &self.draining,
            &self.releasable,
        ];
        let pending = lists.iter().any(|list| !list.is_empty());
        pending || !self.holes.is_empty() || !self.freed.is_empty()
    }

    /// Takes one reference from each cluster of `free`, as far as the counts are cached, and adds
    /// those that reach zero to `zeroed`. What is left to do stays in `free`.
    pub(crate) fn count_down(
        &mut self,
        free: &mut ClusterRange,
        zeroed: &mut Vec<Run>,
    ) -> Result<(), AllocNeed> {
        while free.len > 0 {
            let Some((slice, within)) = self.slice_of(free.start) else {
                // Nothing counts it: the image was damaged before. Nothing to give back.
                free.start += 1;
                free.len -= 1;
                continue;
            };
            let order = self.geometry.refcount_order();
            let count = free.len.min(self.per_slice() - within);
            if self.blocks.get(slice).is_none() {
                return Err(AllocNeed::Slice(slice));
            }
            self.watch.note(free.first(count));
            let Some(bytes) = self.blocks.get_dirty(slice) else {
                return Err(AllocNeed::Slice(slice));
            };
            for step in 0..count {
                let now = refcount::get(bytes, order, within + step);
                if now > 0 {
                    let set = refcount::set(bytes, order, within + step, now - 1);
                    debug_assert!(set.is_ok(), "a smaller count fits");
                }
                if now == 1 {
                    // Free from now on, but its space is about to be punched: no scan may find it by
                    // its count before that is over.
                    join(&mut self.punching, free.start + step);
                    join(zeroed, free.start + step);
                }
            }
            free.start += count;
            free.len -= count;
        }
        Ok(())
    }

    /// Clusters that a queue reserves and counts at once.
    pub(crate) fn batch(&self) -> u64 {
        let usual = RESERVATION_BYTES / self.geometry.cluster_size();
        usual.clamp(1, RESERVATION_CLUSTERS_MAX)
    }

    /// Whether writing back is due.
    pub(crate) fn pressed(&self) -> bool {
        let given_up = self.unmapped.len() > UNMAPPED_MAX || self.holes.pressure();
        self.blocks.pressure() || given_up
    }

    /// Takes back clusters that were taken and never used: nothing ever referred to them, so they
    /// are free at once.
    pub(crate) fn take_back(&mut self, run: Run) {
        let order = self.geometry.refcount_order();
        self.watch.note(run.range());
        for cluster in run.start..run.start + run.len {
            let cached = match self.slice_of(cluster) {
                Some((slice, within)) => self.blocks.get_dirty(slice).map(|bytes| (bytes, within)),
                None => None,
            };
            let one = Run {
                start: cluster,
                len: 1,
                ..run
            };
            match cached {
                Some((bytes, within)) => {
                    let set = refcount::set(bytes, order, within, 0);
                    debug_assert!(set.is_ok(), "every width holds a count of 0");
                    self.give_back(one);
                }
                // A pass loads the count and takes it down.
                None => self.releasable.push(ClusterRange::new(cluster, 1)),
            }
        }
    }

    /// The space of these clusters has been punched, if it was to be.
    fn punched(&mut self, run: Run) {
        let end = run.start + run.len;
        let mut rest = Vec::new();
        self.punching.retain_mut(|other| {
            let other_end = other.start + other.len;
            if other_end <= run.start || end <= other.start {
                return true;
            }
            for (from, upto) in [(other.start, run.start), (end, other_end)] {
                if from < upto {
                    rest.push(Run {
                        start: from,
                        len: upto - from,
                        ..*other
                    });
                }
            }
            false
        });
        self.punching.append(&mut rest);
    }

    /// Puts free clusters where later allocations find them.
    pub(crate) fn give_back(&mut self, run: Run) {
        if run.len == 0 {
            return;
        }
        self.punched(run);
        // A run that was not scanned yet will be found by the scan.
        if run.start >= self.scan_end || run.start + run.len <= self.scan {
            if let Some(last) = self.free.last_mut()
                && last.start + last.len == run.start
                && (last.zeroed, last.backed) == (run.zeroed, run.backed)
            {
                last.len += run.len;
                return;
            }
            self.free.push(run);
        } else if run.start < self.scan {
            let len = self.scan - run.start;
            self.free.push(Run { len, ..run });
        }
    }

    /// Ends the reservation of `queue`.
    pub(crate) fn unreserve(&mut self, queue: usize) {
        if let Some(slot) = self.reserved.get_mut(queue) {
            let run = std::mem::replace(slot, Run::EMPTY);
            if run.len > 0 {
                self.free.push(run);
            }
        }
    }

    /// Ends the reservations of all queues.
    pub(crate) fn unreserve_all(&mut self) {
        for queue in 0..self.reserved.len() {
            self.unreserve(queue);
        }
    }

    /// Lowers the end of used space over free runs that touch it.
    pub(crate) fn settle_end(&mut self) {
        self.free.sort_unstable_by_key(|run| run.start);
        while let Some(run) = self.free.last().copied() {
            if run.start + run.len != self.bump {
                break;
            }
            self.bump = run.start;
            self.free.pop();
        }
        self.scan_end = self.scan_end.min(self.bump);
        self.scan = self.scan.min(self.scan_end);
    }
}

impl Run {
    /// Its clusters.
    pub(crate) fn range(self) -> ClusterRange {
        ClusterRange::new(self.start, self.len)
    }

    /// No clusters.
    pub(crate) const EMPTY: Run = Run {
        start: 0,
        len: 0,
        zeroed: false,
        backed: false,
    };
}

/// How many counts of a slice are not zero, from the first of `range` on.
fn used_from(bytes: &[u8], order: u32, mut range: Range<u64>) -> u64 {
    let len = range.end - range.start;
    let free = range.position(|at| refcount::get(bytes, order, at) == 0);
    free.map_or(len, |free| free as u64)
}

/// Whether `cluster` is in one of the runs.
fn punching(runs: &[Run], cluster: u64) -> bool {
    runs.iter()
        .any(|run| run.start <= cluster && cluster - run.start < run.len)
}

/// Adds one cluster to a list of runs.
fn join(runs: &mut Vec<Run>, cluster: u64) {
    match runs.last_mut() {
        Some(run) if run.start + run.len == cluster => run.len += 1,
        _ => runs.push(Run {
            start: cluster,
            len: 1,
            ..Run::EMPTY
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_grow_in_steps_that_grow_with_them() {
        const MIB: u64 = 1 << 20;
        assert_eq!(grown_len(0, 1), 32 * MIB);
        assert_eq!(grown_len(MIB, 2 * MIB), 32 * MIB);
        assert_eq!(grown_len(32 * MIB, 32 * MIB + 1), 64 * MIB);
        assert_eq!(grown_len(32 * MIB, 200 * MIB), 224 * MIB);
        assert_eq!(grown_len(1024 * MIB, 1025 * MIB), 1088 * MIB);
        assert_eq!(grown_len(1 << 40, (1 << 40) + 1), (1 << 40) + (1 << 30));
        assert_eq!(grown_len(0, u64::MAX), u64::MAX);
    }
}
