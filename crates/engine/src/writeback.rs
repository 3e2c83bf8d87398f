//! The writeback pass: the only place where references reach the disk.
//!
//! 1. Under the locks: take the list of removed references, then a copy of every dirty L2 slice and
//!    L1 sector, then a copy of every dirty refcount slice. In this order, a removed reference is
//!    missing from the copied mappings, and every mapping that was copied has its count.
//! 2. Write the refcount slices. Flush, also the data file: counts and guest data are durable.
//! 3. Write the L2 slices and L1 sectors. Flush: mappings are durable, and so is what was removed.
//! 4. Only now do the removed references count down, once the requests that may still use their
//!    clusters have ended; clusters that reach zero are punched and can be allocated again.
//!
//! What changes while a pass runs belongs to the next one. Two flushes at most, one if no mapping
//! changed.

use gaur_block::{Errno, File};

use crate::active::Active;
use crate::align;
use crate::job::Job;
use crate::metadata::alloc::{AllocNeed, Run};
use crate::options::FreedBy;
use crate::pool::PoolBuffer;
use crate::queue::Queue;
use crate::range::ClusterRange;
use crate::sync::atomic::Ordering;

/// Bytes staged in one buffer.
const STAGE_BYTES: usize = 128 << 10;

/// Copies of dirty metadata on their way to the disk.
pub(crate) struct Staging<F: File> {
    buffers: Vec<PoolBuffer<F>>,
    used: usize,
    writes: Vec<StagedWrite>,
}

/// Bytes next to each other in one buffer and in the file.
#[derive(Clone, Copy, Debug)]
struct StagedWrite {
    buffer: usize,
    start: usize,
    len: usize,
    offset: u64,
}

impl<F: File> Staging<F> {
    fn new() -> Staging<F> {
        Staging {
            buffers: Vec::new(),
            used: 0,
            writes: Vec::new(),
        }
    }

    fn add(&mut self, queue: &Queue<F>, offset: u64, bytes: &[u8]) {
        self.add_with(queue, offset, bytes.len(), |out| {
            out.copy_from_slice(bytes);
            true
        });
    }

    /// Adds `len` bytes that `fill` provides, or nothing if it returns `false`.
    fn add_with(
        &mut self,
        queue: &Queue<F>,
        offset: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) {
        let room = self.buffers.last().map_or(0, |buffer| buffer.len());
        if self.used + len > room {
            let bytes = len.max(STAGE_BYTES);
            self.buffers.push(queue.pool.take(queue.top_file(), bytes));
            self.used = 0;
        }
        let buffer = self.buffers.len() - 1;
        let start = self.used;
        if !fill(&mut self.buffers[buffer][start..start + len]) {
            return;
        }
        self.used += len;
        if let Some(last) = self.writes.last_mut()
            && last.buffer == buffer
            && last.start + last.len == start
            && last.offset + last.len as u64 == offset
        {
            last.len += len;
            return;
        }
        self.writes.push(StagedWrite {
            buffer,
            start,
            len,
            offset,
        });
    }

    fn bytes(&self, write: StagedWrite) -> &[u8] {
        &self.buffers[write.buffer][write.start..write.start + write.len]
    }
}

impl<F: File> Active<'_, F> {
    /// One pass; see the module.
    pub(crate) async fn write_back(&self) -> Result<(), Errno> {
        let log = self.qcow2.maps.log.as_deref();
        if let Some(log) = log {
            log.pass_starts();
        }
        let (frees, holes) = {
            let mut alloc = self.writer.alloc.lock();
            let holes = std::mem::take(&mut alloc.holes.unmapped);
            (std::mem::take(&mut alloc.unmapped), holes)
        };
        let maps = self.stage_maps();
        let counts = self.stage_counts();
        let written = self.write_in_order(&maps, &counts).await;
        if let Some(log) = log {
            match written {
                Ok(()) => log.pass_ends(),
                Err(_) => log.failed(),
            }
        }
        written?;
        self.tell_of_pass(&maps, &counts, frees.len());
        self.staged_are_written(&maps, &counts);
        self.keep_staging(maps);
        self.keep_staging(counts);
        {
            let mut alloc = self.writer.alloc.lock();
            alloc.durable.extend(frees);
            alloc.holes.durable.extend(holes);
        }
        self.release().await;
        self.punch_holes().await;
        Ok(())
    }

    fn tell_of_pass(&self, maps: &Staging<F>, counts: &Staging<F>, unmapped_runs: usize) {
        let bytes = |staging: &Staging<F>| staging.writes.iter().map(|one| one.len).sum::<usize>();
        tracing::debug!(
            image = %self.image.name(),
            mapping_bytes = bytes(maps),
            refcount_bytes = bytes(counts),
            unmapped_runs,
            "writeback pass"
        );
    }

    #[cfg(not(feature = "broken-order"))]
    async fn write_in_order(&self, maps: &Staging<F>, counts: &Staging<F>) -> Result<(), Errno> {
        self.write_staged(counts).await?;
        self.queue.barrier().await?;
        if maps.writes.is_empty() {
            return Ok(());
        }
        self.write_staged(maps).await?;
        self.queue.metadata_barrier().await
    }

    #[cfg(feature = "broken-order")]
    async fn write_in_order(&self, maps: &Staging<F>, counts: &Staging<F>) -> Result<(), Errno> {
        use crate::options::BrokenRule;
        if self.image.breaks(BrokenRule::O1) {
            // Data first, as it should be, but mappings ahead of the counts.
            self.queue.barrier().await?;
            self.write_staged(maps).await?;
            self.write_staged(counts).await?;
            return self.queue.barrier().await;
        }
        self.write_staged(counts).await?;
        self.queue.barrier().await?;
        self.write_staged(maps).await?;
        if maps.writes.is_empty() || self.image.breaks(BrokenRule::O4) {
            return Ok(());
        }
        self.queue.metadata_barrier().await
    }

    /// Lists that an earlier pass of this queue left, so that passes need no new memory.
    fn take_staging(&self) -> Staging<F> {
        let kept = self.queue.staging.borrow_mut().pop();
        kept.unwrap_or_else(Staging::new)
    }

    pub(crate) fn keep_staging(&self, mut staging: Staging<F>) {
        staging.buffers.clear();
        staging.writes.clear();
        staging.used = 0;
        self.queue.staging.borrow_mut().push(staging);
    }

    fn stage_maps(&self) -> Staging<F> {
        let mut staging = self.take_staging();
        let maps = &self.qcow2.maps;
        let slice_bytes = maps.slices.slice_bytes() as usize;
        maps.slices
            .stage_dirty(|offset, fill| staging.add_with(self.queue, offset, slice_bytes, fill));
        maps.l1
            .stage_dirty(|offset, bytes| staging.add(self.queue, offset, bytes));
        staging
    }

    pub(crate) fn stage_counts(&self) -> Staging<F> {
        let mut staging = self.take_staging();
        let mut alloc = self.writer.alloc.lock();
        self.writer.pressed.store(false, Ordering::Relaxed);
        alloc
            .blocks
            .stage_dirty(|offset, bytes| staging.add(self.queue, offset, bytes));
        staging
    }

    pub(crate) async fn write_staged(&self, staging: &Staging<F>) -> Result<(), Errno> {
        let write = async |write: Option<&StagedWrite>| match write {
            Some(write) => self.write_file(write.offset, staging.bytes(*write)).await,
            None => Ok(()),
        };
        for group in staging.writes.chunks(4) {
            let done = futures_util::join!(
                write(group.first()),
                write(group.get(1)),
                write(group.get(2)),
                write(group.get(3)),
            );
            done.0.and(done.1).and(done.2).and(done.3)?;
        }
        Ok(())
    }

    fn staged_are_written(&self, maps: &Staging<F>, counts: &Staging<F>) {
        if !maps.writes.is_empty() {
            let slices = &self.qcow2.maps.slices;
            each_slice(&maps.writes, slices.slice_bytes(), |offset| {
                slices.written(offset)
            });
            slices.settle();
        }
        self.counts_are_written(counts);
    }

    pub(crate) fn counts_are_written(&self, counts: &Staging<F>) {
        if !counts.writes.is_empty() {
            let mut alloc = self.writer.alloc.lock();
            let slice_bytes = alloc.blocks.slice_bytes();
            each_slice(&counts.writes, slice_bytes, |offset| {
                alloc.blocks.written(offset)
            });
        }
    }

    /// Gives back what is durably unreferenced and no longer used by any request. What some
    /// request may still be using, or cannot be counted now, waits for a later pass.
    async fn release(&self) {
        self.writer.alloc.lock().drain(&self.writer.epochs);
        loop {
            let Some(mut free) = self.writer.alloc.lock().releasable.pop() else {
                return;
            };
            if self.count_down(&mut free).await.is_err() {
                self.writer.alloc.lock().releasable.push(free);
                return;
            }
        }
    }

    async fn count_down(&self, free: &mut ClusterRange) -> Result<(), Errno> {
        let (all, mut result) = (*free, Ok(()));
        let mut zeroed = Vec::new();
        while free.len > 0 && result.is_ok() {
            let need = self.writer.alloc.lock().count_down(free, &mut zeroed);
            if let Err(AllocNeed::Slice(slice)) = need {
                result = self.load_refcounts(slice).await;
            }
        }
        for run in zeroed {
            let mut rest = run;
            while rest.len > 0 {
                let (part, freed) = self.freed_by(&mut rest);
                let part = self.empty(part, freed, &Job::default()).await;
                self.writer.alloc.lock().give_back(part);
            }
        }
        if self.image.options.tells_requests() {
            let done = ClusterRange::new(all.start, all.len - free.len);
            self.writer.alloc.lock().requested.remove(done);
        }
        result
    }

    /// Takes from the start of `run` what was freed in one way.
    fn freed_by(&self, run: &mut Run) -> (Run, FreedBy) {
        let mut len = run.len;
        let mut freed = FreedBy::Other;
        if self.image.options.tells_requests() {
            let requested = &self.writer.alloc.lock().requested;
            let first = requested.contains(run.start);
            let clusters = run.start..run.start + run.len;
            len = clusters
                .take_while(|cluster| requested.contains(*cluster) == first)
                .count() as u64;
            freed = match first {
                true => FreedBy::Request,
                false => FreedBy::Other,
            };
        }
        let part = Run { len, ..*run };
        run.start += len;
        run.len -= len;
        (part, freed)
    }

    /// Gives back the clusters that a switch of the whole image has freed. When `job` is cancelled their
    /// space stays allocated on the host; they are free all the same.
    pub(crate) async fn release_freed(&self, job: &Job) {
        let mut from = 0;
        loop {
            let next = self.writer.alloc.lock().freed.run_from(from);
            let Some(run) = next else { return };
            from = run.start + run.len;
            let run = self.empty(run, FreedBy::Snapshot, job).await;
            let mut alloc = self.writer.alloc.lock();
            // Another task may have been at the same run.
            if alloc.freed.contains(run.start) {
                alloc.freed.remove(run);
                alloc.give_back(run);
            }
        }
    }

    /// Punches free clusters, and notes whether they read as zeros now.
    async fn empty(&self, run: Run, freed: FreedBy, job: &Job) -> Run {
        // Before anything else can be there.
        let host = run.range().bytes(self.geometry());
        self.image.decompressed(0).forget(0, host);
        let zeroed = job.step(0).is_ok() && self.punch(run, freed).await;
        if zeroed {
            self.writer.zeroed.write().set(run.range());
        } else {
            self.writer.zeroed.write().clear(run.range());
        }
        Run { zeroed, ..run }
    }

    /// Gives the space of free clusters back to the host; whether they read as zeros now.
    async fn punch(&self, run: Run, freed: FreedBy) -> bool {
        /// Smaller clusters share the host's blocks; punching them would write zeros.
        const PUNCH_BYTES_MIN: u64 = 4096;
        let limits = &self.writer.limits;
        let size = self.writer.alloc.lock().geometry.cluster_size();
        let wanted = self.image.options.gives_back(freed);
        if !wanted || !limits.discard_zeroes || size < PUNCH_BYTES_MIN {
            return false;
        }
        let range = run.start * size..(run.start + run.len) * size;
        align::discard(self.queue.top_file(), &self.image.locks, range)
            .await
            .is_ok()
    }
}

fn each_slice(writes: &[StagedWrite], slice_bytes: u64, mut visit: impl FnMut(u64)) {
    for write in writes {
        let mut offset = write.offset & !(slice_bytes - 1);
        while offset < write.offset + write.len as u64 {
            visit(offset);
            offset += slice_bytes;
        }
    }
}
