//! Growing metadata: L2 tables, refcount blocks and tables, length of the file.
//!
//! Crash rules. A new L2 table is complete on disk before the L1 entry that points to it can be
//! written (its zeros or its copy are written here; the pass flushes before it writes the L1
//! table). A refcount block is flushed before the table entry that points to it is written, and
//! that entry is flushed by the pass before any reference to a cluster it counts. A refcount table
//! becomes visible by one header write between two flushes (O5).

use gaur_block::{Errno, File};
use gaur_format::addr::{ClusterIndex, HostOffset};
use gaur_format::l1::L1Ref;
use gaur_format::{AllocationPolicy, refcount};

use crate::active::Active;
use crate::align;
use crate::image::Writer;
use crate::metadata::alloc::{Alloc, AllocError, AllocNeed, Run, grown_len};
use crate::metadata::area::SECTOR_ENTRIES;
use crate::options::FreedBy;
use crate::range::{ClusterRange, HostRange};
use crate::snapshot::references;
use crate::sync::atomic::Ordering;

/// Refcount blocks of small clusters are made this many bytes at a time.
const BLOCK_BATCH_BYTES: u64 = 32 << 10;

impl<'q, F: File> Active<'q, F> {
    /// Gives L1 entry `index` an L2 table of its own: an empty one, or a copy of the one it shares
    /// with a snapshot.
    pub(crate) async fn make_table(&self, index: u64) -> Result<(), Errno> {
        let made = |table: Option<L1Ref>| table.is_some_and(|table| table.copied);
        // Many may want the same table; only the first has something to do.
        if matches!(self.qcow2.maps.table(index), Ok(table) if made(table)) {
            return Ok(());
        }
        let _making = self.writer.tables.lock().await;
        let maps = &self.qcow2.maps;
        let old = maps.table(index);
        let old = old.map_err(|fault| self.image.corrupt(0, fault))?;
        if made(old) {
            return Ok(());
        }
        let run = self.take_clusters(1).await?;
        let taken = self.taken(run.range());
        let table = run.range().bytes(self.geometry());
        let shared = old.map(|old| self.table_clusters(old));
        match old {
            Some(old) => self.copy_table(old, table.start).await?,
            None if run.zeroed => {}
            None => self.write_zeros(table).await?,
        }
        maps.slices.invalidate(table);
        maps.metadata.insert(run.range());
        maps.watch.note(run.range());
        if let Some(shared) = shared {
            maps.metadata.remove(shared);
            maps.watch.note(shared);
        }
        let entry = L1Ref {
            offset: HostOffset(table.start),
            copied: true,
        };
        maps.l1.set(index, Some(entry));
        taken.keep();
        if let Some(shared) = shared
            && !maps.watch.hold_back(shared)
        {
            self.unmapped(&[shared]);
        }
        Ok(())
    }

    /// The cluster that an L2 table lies in.
    pub(crate) fn table_clusters(&self, table: L1Ref) -> ClusterRange {
        ClusterRange::new(self.geometry().cluster_of(table.offset).0, 1)
    }

    /// Copies an L2 table. Its entries refer to clusters that the copy now shares, so none of them is
    /// the active image's own.
    async fn copy_table(&self, from: L1Ref, to: u64) -> Result<(), Errno> {
        let geometry = self.geometry();
        let len = geometry.cluster_size() as usize;
        let mut table = self.queue.pool.take(self.queue.top_file(), len);
        self.read_file(from.offset.0, &mut table).await?;
        references::clear_flags(&mut table, geometry);
        self.write_file(to, &table).await
    }

    /// Takes up to `want` clusters in a row, doing whatever that needs.
    pub(crate) async fn take_clusters(&self, want: u64) -> Result<Run, Errno> {
        self.allocate(|| self.take_local(want)).await
    }

    /// Asks the allocator until it can answer, and does what it needs for that.
    pub(crate) async fn allocate<T>(
        &self,
        mut ask: impl FnMut() -> Result<T, AllocError>,
    ) -> Result<T, Errno> {
        loop {
            match ask() {
                Ok(answer) => return Ok(answer),
                Err(AllocError::Need(need)) => self.resolve_alloc(need).await?,
                Err(AllocError::Failed(errno)) => return Err(errno),
                Err(AllocError::Corrupt(fault)) => return Err(self.image.corrupt(0, fault)),
            }
        }
    }

    /// Gives back the clusters that this queue has counted and not used.
    pub(crate) fn give_back_local(&self) {
        let run = self.queue.local.replace(Run::EMPTY);
        if run.len > 0 {
            let mut alloc = self.writer.alloc.lock();
            alloc.take_back(run);
            alloc.handed.remove(&self.queue.id);
        }
    }

    /// Does what an allocation needs before it can go on.
    pub(crate) async fn resolve_alloc(&self, need: AllocNeed) -> Result<(), Errno> {
        match need {
            AllocNeed::Slice(slice) => self.load_refcounts(slice).await,
            AllocNeed::Grow(bytes) => self.grow_file(bytes).await,
            AllocNeed::Block(index) => {
                let _making = self.writer.blocks.lock().await;
                let entries = self.writer.alloc.lock().table.len() as u64;
                if index < entries {
                    self.make_blocks(index).await
                } else {
                    self.grow_refcount_table(index).await
                }
            }
        }
    }

    /// Brings the slice of a refcount block at host offset `slice` into the cache.
    pub(crate) async fn load_refcounts(&self, slice: u64) -> Result<(), Errno> {
        let Some(_loading) = self.writer.refcount_loads.lock_or_wait(slice).await else {
            return Ok(());
        };
        let bytes = {
            let alloc = self.writer.alloc.lock();
            if alloc.blocks.get(slice).is_some() {
                return Ok(());
            }
            alloc.blocks.slice_bytes() as usize
        };
        let mut buffer = self.queue.pool.take(self.queue.top_file(), bytes);
        self.read_file(slice, &mut buffer).await?;
        self.writer.alloc.lock().blocks.insert(slice, &buffer);
        Ok(())
    }

    /// Makes the file at least `need` bytes long.
    pub(crate) async fn grow_file(&self, need: u64) -> Result<(), Errno> {
        if self.writer.alloc.lock().physical_end >= need {
            return Ok(());
        }
        let _held = self.writer.structure.lock().await;
        if self.writer.alloc.lock().physical_end >= need {
            return Ok(());
        }
        let file = self.queue.top_file();
        let now = file.len().await?;
        let mut end = now;
        if now < need {
            let goal = grown_len(now, need);
            // A limit on the file's size may allow what is needed and not the whole step.
            end = match file.set_len(goal).await {
                Ok(()) => goal,
                Err(_) => file.set_len(need).await.map(|()| need)?,
            };
            self.take_ahead(now, need, end).await;
        }
        self.writer.alloc.lock().physical_end = end;
        Ok(())
    }

    /// Takes the host's space for what the file has grown by, from `start` to `end`, under the
    /// policy *contiguous*; or at least up to `need`. It is no error if that cannot be: clusters then
    /// take their space when they are used, as far as there is some.
    async fn take_ahead(&self, start: u64, need: u64, end: u64) {
        if self.writer.allocation != AllocationPolicy::Contiguous {
            return;
        }
        let file = self.queue.top_file();
        for upto in [end, need] {
            match file.allocate_at(start, upto - start).await {
                Ok(()) => {
                    self.writer.alloc.lock().backed_end = upto;
                    return;
                }
                Err(Errno::EOPNOTSUPP) => return,
                Err(_) => {}
            }
        }
    }

    /// Makes refcount block `index`, and a few after it when clusters are small, in the clusters
    /// that this queue reserved: they lie in the range that the block counts. The lock on blocks is
    /// held.
    async fn make_blocks(&self, index: u64) -> Result<(), Errno> {
        let _held = self.writer.structure.lock().await;
        let geometry = self.geometry();
        let clusters = {
            let mut alloc = self.writer.alloc.lock();
            let clusters = alloc.blocks_to_make(self.queue.id, index);
            alloc.consume(self.queue.id, clusters.len);
            clusters
        };
        if clusters.is_empty() {
            return Ok(());
        }
        if self.qcow2.maps.metadata.touches(clusters) {
            let fault = self.writer.alloc.lock().metadata_is_free(clusters.start);
            return Err(self.image.corrupt(0, fault));
        }
        let (blocks, size) = (clusters.bytes(geometry), geometry.cluster_size());
        let pool = &self.queue.pool;
        let mut bytes = pool.take(self.queue.top_file(), blocks.len as usize);
        bytes.fill(0);
        let within = geometry.refcount_block_index(ClusterIndex(clusters.start));
        let (first, order) = (&mut bytes[..size as usize], geometry.refcount_order());
        for at in within..within + clusters.len {
            refcount::set(first, order, at, 1).map_err(|_| Errno::EIO)?;
        }
        self.write_file(blocks.start, &bytes).await?;
        self.queue.barrier().await?;
        let table_offset = self.writer.alloc.lock().table_offset;
        let mut entries = [0; (BLOCK_BATCH_BYTES / 512 * 8) as usize];
        for (block, out) in blocks.pieces(size).zip(entries.chunks_exact_mut(8)) {
            out.copy_from_slice(&block.start.to_be_bytes());
        }
        let entries = &entries[..clusters.len as usize * 8];
        let written = self.write_file(table_offset + index * 8, entries).await;
        written.inspect_err(|errno| self.image.poison(*errno))?;
        self.qcow2.maps.metadata.insert(clusters);
        self.qcow2.maps.watch.note(clusters);
        let mut alloc = self.writer.alloc.lock();
        alloc.blocks.invalidate(blocks);
        for (block, index) in blocks.pieces(size).zip(index..) {
            if let Some(slot) = alloc.table.get_mut(index as usize) {
                *slot = block.start;
            }
        }
        Ok(())
    }

    /// Makes a range of the top file read as zeros.
    pub(crate) async fn write_zeros(&self, range: HostRange) -> Result<(), Errno> {
        let (file, locks) = (self.queue.top_file(), &self.image.locks);
        let range = range.start..range.end();
        align::write_zeroes(file, &self.queue.pool, locks, range, false).await
    }

    /// Takes up to `want` clusters in a row from those that this queue has counted ahead. Counting them many
    /// at a time keeps threads that allocate out of each other's way; a crash leaks those that were not used.
    pub(crate) fn take_local(&self, want: u64) -> Result<Run, AllocError> {
        let local = &self.queue.local;
        let mut run = local.get();
        if run.len == 0 {
            let metadata = &self.qcow2.maps.metadata;
            let mut alloc = self.writer.alloc.lock();
            let batch = want.max(alloc.batch());
            run = alloc.take(self.queue.id, batch, |cluster| metadata.contains(cluster))?;
            alloc.handed.entry(self.queue.id).or_default().local = run.range();
            self.writer.note_pressure(&alloc);
        }
        let taken = Run {
            len: want.min(run.len),
            ..run
        };
        run.start += taken.len;
        run.len -= taken.len;
        local.set(run);
        Ok(taken)
    }

    /// Clusters that are given back unless they are kept.
    pub(crate) fn taken(&self, clusters: ClusterRange) -> Taken<'q> {
        Taken {
            writer: self.writer,
            clusters,
            keep: false,
        }
    }

    /// Notes references that a mapping no longer has in memory. They are given back after a pass
    /// has made that durable.
    pub(crate) fn unmapped(&self, frees: &[ClusterRange]) {
        self.unmapped_by(FreedBy::Other, frees);
    }

    /// The same for what was freed in this way.
    pub(crate) fn unmapped_by(&self, freed: FreedBy, frees: &[ClusterRange]) {
        let mut alloc = self.writer.alloc.lock();
        if freed == FreedBy::Request && self.image.options.tells_requests() {
            for clusters in frees {
                alloc.requested.insert(*clusters);
            }
        }
        #[cfg(feature = "broken-order")]
        if self.image.breaks(crate::options::BrokenRule::O3) {
            alloc.releasable.extend_from_slice(frees);
            return;
        }
        alloc.unmapped.extend_from_slice(frees);
        self.writer.note_pressure(&alloc);
    }
}

/// Clusters taken and not yet referred to; given back unless `keep` is called.
pub(crate) struct Taken<'a> {
    writer: &'a Writer,
    pub(crate) clusters: ClusterRange,
    keep: bool,
}

impl Taken<'_> {
    pub(crate) fn keep(mut self) {
        self.keep = true;
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if !self.keep {
            self.writer.alloc.lock().releasable.push(self.clusters);
        }
    }
}

impl Alloc {
    /// Which clusters of the reservation of `queue` become block `index` and those after it; none if
    /// another task made the block meanwhile.
    fn blocks_to_make(&self, queue: usize, index: u64) -> ClusterRange {
        let Some(reserved) = self.reserved.get(queue).copied() else {
            return ClusterRange::default();
        };
        let counted = self
            .geometry
            .refcount_table_index(ClusterIndex(reserved.start));
        if reserved.len == 0 || counted != index {
            return ClusterRange::default();
        }
        let missing = self
            .table
            .iter()
            .skip(index as usize)
            .take_while(|offset| **offset == 0)
            .count();
        let batch = (BLOCK_BATCH_BYTES / self.geometry.cluster_size()).max(1);
        let room = reserved.len.saturating_sub(1).max(1);
        // The first block counts them all, so no entry may reach the disk before its own does: they
        // lie in one sector of the table.
        let in_sector = SECTOR_ENTRIES - index % SECTOR_ENTRIES;
        let count = batch.min(missing as u64).min(room).min(in_sector);
        ClusterRange::new(reserved.start, count)
    }
}

impl Writer {
    /// Asks for a pass if the allocator wants one.
    pub(crate) fn note_pressure(&self, alloc: &Alloc) {
        if alloc.pressed() && !self.pressed.load(Ordering::Relaxed) {
            self.pressed.store(true, Ordering::Relaxed);
        }
    }
}
