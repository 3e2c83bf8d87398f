//! Making room: L2 tables, refcount blocks and tables, length of the file.
//!
//! Crash rules. A new L2 table is complete on disk before the L1 entry that points to it can be
//! written (its zeros or its copy are written here; the pass flushes before it writes the L1
//! table). A refcount block is flushed before the table entry that points to it is written, and
//! that entry is flushed by the pass before any reference to a cluster it counts. A refcount table
//! becomes visible by one header write between two flushes (O5).

use std::cell::Cell;

use gaur_block::{Errno, File, Source, Target};
use gaur_format::addr::{ClusterIndex, HostOffset};
use gaur_format::header::field;
use gaur_format::l1::L1Ref;
use gaur_format::{AllocationPolicy, limit, refcount};

use crate::align;
use crate::image::{Qcow2, Writer};
use crate::metadata::alloc::{Alloc, AllocError, AllocNeed, Free, Run, grown_len};
use crate::metadata::maps::Maps;
use crate::queue::Queue;
use crate::sync::atomic::Ordering;

/// Entries of a refcount table in one sector.
const SECTOR_ENTRIES: u64 = 512 / 8;
/// Refcount blocks of small clusters are made this many bytes at a time.
const BLOCK_BATCH_BYTES: u64 = 32 << 10;
/// The bit that says that an entry's cluster belongs to the active image alone.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

impl<F: File> Queue<F> {
    /// Gives L1 entry `index` an L2 table of its own: an empty one, or a copy of the one it shares
    /// with a snapshot.
    pub(crate) async fn make_table(
        &self,
        qcow2: &Qcow2,
        writer: &Writer,
        index: u64,
    ) -> Result<(), Errno> {
        let made = |table: Option<L1Ref>| table.is_some_and(|table| table.copied);
        // Many may want the same table; only the first has something to do.
        if matches!(qcow2.maps.table(index), Ok(table) if made(table)) {
            return Ok(());
        }
        let _making = writer.tables.lock().await;
        let old = {
            let maps = &qcow2.maps;
            maps.table(index)
                .map_err(|what| self.image.corruption(0, what))?
        };
        if made(old) {
            return Ok(());
        }
        let run = self.take_clusters(qcow2, writer, 1).await?;
        let taken = Taken {
            writer,
            free: Free {
                start: run.start,
                len: 1,
            },
            keep: false,
        };
        let size = qcow2.geometry.cluster_size();
        let offset = run.start * size;
        match old {
            Some(shared) => self.copy_table(qcow2, shared.offset.0, offset).await?,
            None if run.fresh => {}
            None => self.write_zeros(offset, size).await?,
        }
        {
            let maps = &qcow2.maps;
            maps.slices.invalidate(offset, size);
            maps.metadata.insert(run.start, 1);
            if let Some(shared) = old {
                maps.metadata.remove(shared.offset.0 / size, 1);
            }
            maps.l1.set(
                index,
                Some(L1Ref {
                    offset: HostOffset(offset),
                    copied: true,
                }),
            );
        }
        taken.keep();
        if let Some(shared) = old {
            let free = Free {
                start: shared.offset.0 / size,
                len: 1,
            };
            writer.unmapped(&self.image, &[free]);
        }
        Ok(())
    }

    /// Copies the L2 table at `from` to `to`. Its entries refer to clusters that the copy now
    /// shares, so none of them is the active image's own.
    async fn copy_table(&self, qcow2: &Qcow2, from: u64, to: u64) -> Result<(), Errno> {
        let file = self.top_file();
        let geometry = &qcow2.geometry;
        let mut table = self.pool.take(file, geometry.cluster_size() as usize);
        align::read(file, &self.pool, from, Target::Memory(&mut table)).await?;
        for entry in table.chunks_exact_mut(geometry.l2_entry_size() as usize) {
            if let Some(bytes) = entry.first_chunk_mut::<8>() {
                let raw = u64::from_be_bytes(*bytes);
                if raw & COMPRESSED == 0 {
                    *bytes = (raw & !COPIED).to_be_bytes();
                }
            }
        }
        align::write(
            file,
            &self.pool,
            &self.image.locks,
            to,
            Source::Memory(&table),
        )
        .await
    }

    /// Takes up to `want` clusters in a row, doing whatever that needs.
    pub(crate) async fn take_clusters(
        &self,
        qcow2: &Qcow2,
        writer: &Writer,
        want: u64,
    ) -> Result<Run, Errno> {
        loop {
            match self.local.take(self.id, &qcow2.maps, writer, want) {
                Ok(run) => return Ok(run),
                Err(AllocError::Need(need)) => self.resolve_alloc(qcow2, writer, need).await?,
                Err(AllocError::Failed(errno)) => return Err(errno),
                Err(AllocError::Corrupt(_)) => return Err(self.image.contradiction()),
            }
        }
    }

    /// Gives back the clusters that this queue has counted and not used.
    pub(crate) fn give_back_local(&self, writer: &Writer) {
        let run = self.local.0.replace(Run::EMPTY);
        if run.len > 0 {
            writer.alloc.lock().take_back(run);
        }
    }

    /// Does what an allocation needs before it can go on.
    pub(crate) async fn resolve_alloc(
        &self,
        qcow2: &Qcow2,
        writer: &Writer,
        need: AllocNeed,
    ) -> Result<(), Errno> {
        match need {
            AllocNeed::Slice(slice) => self.load_refcounts(writer, slice).await,
            AllocNeed::Grow(bytes) => {
                if writer.alloc.lock().physical_end >= bytes {
                    return Ok(());
                }
                let _held = writer.structure.lock().await;
                self.grow_file(writer, bytes).await
            }
            AllocNeed::Block(index) => {
                let held = writer.structure.lock().await;
                let entries = writer.alloc.lock().table.len() as u64;
                let result = if index < entries {
                    self.make_blocks(qcow2, writer, index).await
                } else {
                    self.grow_refcount_table(qcow2, writer, index).await
                };
                drop(held);
                result
            }
        }
    }

    /// Brings the slice of a refcount block at host offset `slice` into the cache.
    pub(crate) async fn load_refcounts(&self, writer: &Writer, slice: u64) -> Result<(), Errno> {
        let Some(_loading) = writer.refcount_loads.lock_or_wait(slice).await else {
            return Ok(());
        };
        let bytes = {
            let alloc = writer.alloc.lock();
            if alloc.blocks.get(slice).is_some() {
                return Ok(());
            }
            alloc.blocks.slice_bytes() as usize
        };
        let file = self.top_file();
        let mut buffer = self.pool.take(file, bytes);
        align::read(file, &self.pool, slice, Target::Memory(&mut buffer)).await?;
        writer.alloc.lock().blocks.insert(slice, &buffer);
        Ok(())
    }

    /// Makes the file at least `need` bytes long; the structure lock is held.
    async fn grow_file(&self, writer: &Writer, need: u64) -> Result<(), Errno> {
        if writer.alloc.lock().physical_end >= need {
            return Ok(());
        }
        let file = self.top_file();
        let now = file.len().await?;
        let mut end = now;
        if now < need {
            let goal = grown_len(now, need);
            // A limit on the file's size may allow what is needed and not the whole step.
            end = match file.set_len(goal).await {
                Ok(()) => goal,
                Err(_) => file.set_len(need).await.map(|()| need)?,
            };
            self.take_ahead(writer, now, need, end).await;
        }
        writer.alloc.lock().physical_end = end;
        Ok(())
    }

    /// Takes the host's space for what the file has grown by, from `start` to `end`, under the
    /// policy *contiguous*; or at least up to `need`. It is no error if that cannot be: clusters then
    /// take their space when they are used, as far as there is some.
    async fn take_ahead(&self, writer: &Writer, start: u64, need: u64, end: u64) {
        if writer.allocation != AllocationPolicy::Contiguous {
            return;
        }
        let file = self.top_file();
        for upto in [end, need] {
            match file.allocate_at(start, upto - start).await {
                Ok(()) => {
                    writer.alloc.lock().backed_end = upto;
                    return;
                }
                Err(Errno::EOPNOTSUPP) => return,
                Err(_) => {}
            }
        }
    }

    /// Makes refcount block `index`, and a few after it when clusters are small, in the clusters
    /// that this queue reserved: they lie in the range that the block counts. The structure lock is
    /// held.
    async fn make_blocks(&self, qcow2: &Qcow2, writer: &Writer, index: u64) -> Result<(), Errno> {
        let geometry = &qcow2.geometry;
        let size = geometry.cluster_size();
        let (start, count) = {
            let mut alloc = writer.alloc.lock();
            let (start, count) = alloc.blocks_to_make(self.id, index);
            alloc.consume(self.id, count);
            (start, count)
        };
        if count == 0 {
            return Ok(());
        }
        if qcow2.maps.metadata.touches(start, count) {
            return Err(self.image.contradiction());
        }
        let file = self.top_file();
        let mut bytes = self.pool.take(file, (count * size) as usize);
        bytes.fill(0);
        let within = geometry.refcount_block_index(ClusterIndex(start));
        for at in within..within + count {
            refcount::set(
                &mut bytes[..size as usize],
                geometry.refcount_order(),
                at,
                1,
            )
            .map_err(|_| Errno::EIO)?;
        }
        let locks = &self.image.locks;
        align::write(
            file,
            &self.pool,
            locks,
            start * size,
            Source::Memory(&bytes),
        )
        .await?;
        self.barrier().await?;
        let table_offset = writer.alloc.lock().table_offset;
        let mut entries = [0; (BLOCK_BATCH_BYTES / 512 * 8) as usize];
        for (step, out) in entries.chunks_exact_mut(8).take(count as usize).enumerate() {
            out.copy_from_slice(&((start + step as u64) * size).to_be_bytes());
        }
        let entries = Source::Memory(&entries[..count as usize * 8]);
        let at = table_offset + index * 8;
        let written = align::write(file, &self.pool, locks, at, entries).await;
        written.inspect_err(|errno| self.image.poison(*errno))?;
        qcow2.maps.metadata.insert(start, count);
        let mut alloc = writer.alloc.lock();
        alloc.blocks.invalidate(start * size, count * size);
        for step in 0..count {
            if let Some(slot) = alloc.table.get_mut((index + step) as usize) {
                *slot = (start + step) * size;
            }
        }
        Ok(())
    }

    /// Replaces the refcount table by a longer one that reaches block `index`. The structure lock
    /// is held.
    async fn grow_refcount_table(
        &self,
        qcow2: &Qcow2,
        writer: &Writer,
        index: u64,
    ) -> Result<(), Errno> {
        let plan = writer.alloc.lock().plan_table(index)?;
        let geometry = qcow2.geometry;
        let size = geometry.cluster_size();
        let end = plan.start + plan.blocks + plan.clusters;
        if qcow2
            .maps
            .metadata
            .touches(plan.start, plan.blocks + plan.clusters)
        {
            return Err(self.image.contradiction());
        }
        let fixed = writer.alloc.lock().capacity;
        match fixed {
            Some(capacity) if end > capacity => return Err(Errno::ENOSPC),
            Some(_) => {}
            None => self.grow_file(writer, end * size).await?,
        }
        let file = self.top_file();
        let locks = &self.image.locks;
        // The blocks count themselves and the table.
        let mut block = self.pool.take(file, size as usize);
        for step in 0..plan.blocks {
            block.fill(0);
            let counted = (plan.first_block + step) * geometry.refcount_block_entries();
            let from = plan.start.max(counted);
            let upto = end.min(counted + geometry.refcount_block_entries());
            for cluster in from..upto {
                refcount::set(&mut block, geometry.refcount_order(), cluster - counted, 1)
                    .map_err(|_| Errno::EIO)?;
            }
            let at = (plan.start + step) * size;
            align::write(file, &self.pool, locks, at, Source::Memory(&block)).await?;
        }
        let table_at = (plan.start + plan.blocks) * size;
        self.write_table(&plan.entries, table_at, plan.clusters * size)
            .await?;
        self.barrier().await?;
        let mut fields = [0; 12];
        fields[..8].copy_from_slice(&table_at.to_be_bytes());
        fields[8..].copy_from_slice(&(plan.clusters as u32).to_be_bytes());
        self.switch_header(field::REFCOUNT_TABLE_OFFSET, &fields)
            .await?;
        let maps = &qcow2.maps;
        let mut alloc = writer.alloc.lock();
        let old = Free {
            start: alloc.table_offset / size,
            len: alloc.table_clusters,
        };
        maps.metadata.remove(old.start, old.len);
        maps.metadata
            .insert(plan.start, plan.blocks + plan.clusters);
        alloc
            .blocks
            .invalidate(plan.start * size, plan.blocks * size);
        alloc.table = plan.entries;
        alloc.table_offset = table_at;
        alloc.table_clusters = plan.clusters;
        // Nobody reads the table from disk, and the header is durable.
        alloc.releasable.push(old);
        Ok(())
    }

    /// Makes refcount block `index` in a cluster that another block counts. Both flushes of a pass
    /// come before the table entry, so the count of that cluster is durable first (O1).
    pub(crate) async fn make_block_elsewhere(
        &self,
        qcow2: &Qcow2,
        writer: &Writer,
        index: u64,
    ) -> Result<(), Errno> {
        if index >= writer.alloc.lock().table.len() as u64 {
            let _held = writer.structure.lock().await;
            return self.grow_refcount_table(qcow2, writer, index).await;
        }
        let size = qcow2.geometry.cluster_size();
        let run = self.take_clusters(qcow2, writer, 1).await?;
        let taken = Taken {
            writer,
            free: Free {
                start: run.start,
                len: 1,
            },
            keep: false,
        };
        let offset = run.start * size;
        self.write_zeros(offset, size).await?;
        self.flush_all().await?;
        let _held = writer.structure.lock().await;
        let place = {
            let alloc = writer.alloc.lock();
            let vacant = alloc.table.get(index as usize) == Some(&0);
            vacant.then_some(alloc.table_offset + index * 8)
        };
        let Some(place) = place else { return Ok(()) };
        let entry = offset.to_be_bytes();
        let (file, locks) = (self.top_file(), &self.image.locks);
        let written = align::write(file, &self.pool, locks, place, Source::Memory(&entry)).await;
        written.inspect_err(|errno| self.image.poison(*errno))?;
        taken.keep();
        qcow2.maps.metadata.insert(run.start, 1);
        let mut alloc = writer.alloc.lock();
        alloc.blocks.invalidate(offset, size);
        if let Some(slot) = alloc.table.get_mut(index as usize) {
            *slot = offset;
        }
        Ok(())
    }

    /// Makes a range of the top file read as zeros.
    pub(crate) async fn write_zeros(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let (file, locks) = (self.top_file(), &self.image.locks);
        align::write_zeroes(file, &self.pool, locks, offset..offset + len, false).await
    }

    /// Everything written so far is durable; if that fails nothing is known any more.
    ///
    /// One at a time: a host that has lost data says so once, to whoever flushes first. The next
    /// flush may succeed without the lost data, so it must not be asked for before the image is
    /// poisoned.
    pub(crate) async fn barrier(&self) -> Result<(), Errno> {
        let _held = self.image.flushing.lock().await;
        if let Some(errno) = self.image.poisoned() {
            return Err(errno);
        }
        self.top_file()
            .flush()
            .await
            .inspect_err(|errno| self.image.poison(*errno))
    }
}

/// Clusters of one queue that are counted and free to use. Counting them many at a time keeps
/// threads that allocate out of each other's way; a crash leaks those that were not used.
#[derive(Debug)]
pub(crate) struct LocalRun(pub(crate) Cell<Run>);

impl LocalRun {
    /// Takes up to `want` clusters in a row for `queue`, whose run this is.
    pub(crate) fn take(
        &self,
        queue: usize,
        maps: &Maps,
        writer: &Writer,
        want: u64,
    ) -> Result<Run, AllocError> {
        let mut run = self.0.get();
        if run.len == 0 {
            let mut alloc = writer.alloc.lock();
            let batch = want.max(alloc.batch());
            run = alloc.take(queue, batch, |cluster| maps.metadata.contains(cluster))?;
            writer.note_pressure(&alloc);
        }
        let taken = Run {
            len: want.min(run.len),
            ..run
        };
        run.start += taken.len;
        run.len -= taken.len;
        self.0.set(run);
        Ok(taken)
    }
}

/// Clusters taken and not yet referred to; given back if nobody says `keep`.
pub(crate) struct Taken<'a> {
    pub(crate) writer: &'a Writer,
    pub(crate) free: Free,
    pub(crate) keep: bool,
}

impl Taken<'_> {
    pub(crate) fn keep(mut self) {
        self.keep = true;
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if !self.keep {
            self.writer.alloc.lock().releasable.push(self.free);
        }
    }
}

/// A longer refcount table.
pub(crate) struct TablePlan {
    /// First cluster of the new area: the blocks, then the table.
    start: u64,
    /// Index of the first new block.
    first_block: u64,
    blocks: u64,
    clusters: u64,
    entries: Vec<u64>,
}

impl Alloc {
    /// Which clusters of the reservation of `queue` become block `index` and those after it: first
    /// cluster and count; count 0 if somebody made the block meanwhile.
    fn blocks_to_make(&self, queue: usize, index: u64) -> (u64, u64) {
        let Some(reserved) = self.reserved.get(queue).copied() else {
            return (0, 0);
        };
        let counted = self
            .geometry
            .refcount_table_index(ClusterIndex(reserved.start));
        if reserved.len == 0 || counted != index {
            return (0, 0);
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
        (reserved.start, count)
    }

    /// Where a table that reaches block `index` goes, and what it holds.
    fn plan_table(&mut self, index: u64) -> Result<TablePlan, Errno> {
        let geometry = self.geometry;
        let per_block = geometry.refcount_block_entries();
        let covered = self.table.len() as u64 * per_block;
        let start = self.bump.max(covered);
        let per_cluster = geometry.cluster_size() / 8;
        let first_block = geometry.refcount_table_index(ClusterIndex(start));
        let (mut blocks, mut clusters) = (1, 1);
        loop {
            let last = geometry.refcount_table_index(ClusterIndex(start + blocks + clusters - 1));
            // Half as much again, so that growing stays rare.
            let entries = (last.max(index) + 1).max(self.table.len() as u64 * 3 / 2);
            let next = (last + 1 - first_block, entries.div_ceil(per_cluster));
            if next.0 <= blocks && next.1 <= clusters {
                break;
            }
            (blocks, clusters) = (next.0.max(blocks), next.1.max(clusters));
        }
        if clusters * geometry.cluster_size() > limit::REFCOUNT_TABLE_BYTES_MAX {
            return Err(Errno::EFBIG);
        }
        let mut entries = self.table.clone();
        entries.resize((clusters * per_cluster) as usize, 0);
        for step in 0..blocks {
            if let Some(slot) = entries.get_mut((first_block + step) as usize) {
                *slot = (start + step) * geometry.cluster_size();
            }
        }
        self.bump = start + blocks + clusters;
        Ok(TablePlan {
            start,
            first_block,
            blocks,
            clusters,
            entries,
        })
    }
}

impl Writer {
    /// Notes references that a mapping no longer has in memory. They are given back after a pass
    /// has made that durable.
    pub(crate) fn unmapped(&self, _image: &crate::image::Image, frees: &[Free]) {
        let mut alloc = self.alloc.lock();
        #[cfg(feature = "broken-order")]
        if _image.breaks(crate::options::BrokenRule::O3) {
            alloc.releasable.extend_from_slice(frees);
            return;
        }
        alloc.unmapped.extend_from_slice(frees);
        self.note_pressure(&alloc);
    }

    /// Asks for a pass if the allocator wants one.
    pub(crate) fn note_pressure(&self, alloc: &Alloc) {
        if alloc.pressed() && !self.pressed.load(Ordering::Relaxed) {
            self.pressed.store(true, Ordering::Relaxed);
        }
    }
}

/// Removes what is known of the tables in `len` bytes at `offset`.
pub(crate) fn forget_table(maps: &Maps, offset: u64, len: u64) {
    maps.slices.invalidate(offset, len);
    maps.metadata.remove(offset / len, 1);
}
