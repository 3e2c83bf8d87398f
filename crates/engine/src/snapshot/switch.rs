//! Atomic switch of the whole image to new metadata: new refcount blocks, new L2 tables and new L1 tables are written to free
//! clusters while requests go on, and become visible together by one write of the header's sector.
//!
//! Crash rules. Nothing that the old header leads to is changed, so a power cut before the header's
//! sector is durable leaves the image as it was, and what was written to free clusters is at most
//! leaked. All that the new header leads to was flushed before that sector is written (O5). COPIED flags
//! and refcounts change together, because both lie in what is switched.
//!
//! While requests go on, they change tables and counts that were copied already. They are tracked: what
//! changed is copied once more, and in the end, with no request inside, once again.

use std::collections::BTreeSet;

use futures_util::future::try_join_all;
use gaur_block::{Errno, File};
use gaur_format::geometry::Version;
use gaur_format::header::{CryptMethod, field};
use gaur_format::snapshot::Snapshot;

use super::failure::Failure;
use super::list;
use super::plan::{Block, SwitchPlan};
use crate::active::Active;
use crate::job::Job;
use crate::metadata::tracker::Changed;
use crate::range::{ClusterRange, HostRange};
use crate::sync::atomic::Ordering;

/// Bytes of tables read at once.
const BATCH_BYTES: u64 = 1 << 20;
/// Tables read at once.
const BATCH_TABLES: u64 = 64;
/// Refcount blocks read at once.
const BATCH_BLOCKS: usize = 16;

/// A switch in the making. Dropping it gives back every cluster it has taken.
pub(crate) struct Switch<'a, F: File> {
    pub(crate) active: Active<'a, F>,
    pub(crate) job: &'a Job,
    pub(crate) plan: SwitchPlan,
    taken: Vec<ClusterRange>,
    switched: bool,
}

/// What the header is to lead to.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) size_bytes: u64,
    /// Entries of the active L1 table, and where it is.
    pub(crate) l1: (Vec<u64>, HostRange),
    /// Snapshots, and where their table goes.
    pub(crate) snapshots: (Vec<Snapshot>, HostRange),
    /// Where the refcount table goes.
    pub(crate) refcount_table: HostRange,
}

impl<'a, F: File> Switch<'a, F> {
    /// Begins, and watches what requests change from now on.
    pub(crate) fn begin(active: Active<'a, F>, job: &'a Job) -> Switch<'a, F> {
        active.qcow2.maps.l1.tracker.watch(true);
        active.writer.alloc.lock().blocks.watch(true);
        Switch {
            active,
            job,
            plan: SwitchPlan::new(*active.geometry()),
            taken: Vec::new(),
            switched: false,
        }
    }

    pub(crate) fn cluster_size(&self) -> u64 {
        self.active.geometry().cluster_size()
    }

    /// Takes the active L1 table as it stands as slots, `len` of them at least.
    pub(crate) fn take_slots(&mut self, len: u64) -> Result<(), Failure> {
        let l1 = &self.active.qcow2.maps.l1;
        for index in 0..l1.len().max(len) {
            let slot = self.plan.slot_of(l1.get(index))?;
            self.plan.slots.push(slot);
        }
        self.cover_blocks();
        Ok(())
    }

    /// Lets the plan know of all refcount blocks there are.
    pub(crate) fn cover_blocks(&mut self) {
        let count = self.active.writer.alloc.lock().table.len();
        self.plan.deltas.cover(count);
    }

    /// Has `count` spare clusters at least.
    pub(crate) async fn fill_spare(&mut self, count: usize) -> Result<(), Failure> {
        while self.plan.spare.len() < count {
            let want = (count - self.plan.spare.len()) as u64;
            let run = self.active.take_clusters(want).await?;
            self.taken.push(run.range());
            self.plan.spare.extend(run.range().numbers());
        }
        Ok(())
    }

    /// Room for `len` bytes in one piece.
    pub(crate) async fn take_area(&mut self, len: u64) -> Result<HostRange, Failure> {
        let geometry = self.active.geometry();
        let clusters = geometry.clusters_for(len.max(1));
        let taken = self.active.take_area(clusters, self.job).await?;
        let clusters = taken.clusters;
        taken.keep();
        self.taken.push(clusters);
        Ok(clusters.bytes(geometry))
    }

    /// Reads the tables of `list`, by number and host offset, and shows each to `visit`. Where that
    /// answers with an offset, the table as it is then is written there. With `copies` the tables are
    /// those of the active image, as they are in memory, and there is a spare cluster for each.
    pub(crate) async fn each_table(
        &mut self,
        list: &[(u64, u64)],
        copies: bool,
        mut visit: impl FnMut(&mut SwitchPlan, (u64, u64), &mut [u8]) -> Result<Option<u64>, Failure>,
    ) -> Result<(), Failure> {
        let size = self.cluster_size();
        let batch = (BATCH_BYTES / size).clamp(1, BATCH_TABLES) as usize;
        self.job.expect(list.len() as u64 * size);
        let spare = if copies { batch } else { 0 };
        for tables in list.chunks(batch) {
            self.fill_spare(spare.min(tables.len())).await?;
            let len = tables.len() * size as usize;
            let mut buffer = self
                .active
                .queue
                .pool
                .take(self.active.queue.top_file(), len);
            let places: Vec<u64> = tables.iter().map(|table| table.1).collect();
            if copies {
                self.read_active(&places, size, &mut buffer).await?;
            } else {
                self.read_all(&places, size, &mut buffer).await?;
            }
            // A block is there before what it counts is referred to; some may be younger than the last look.
            self.cover_blocks();
            let mut writes = Vec::new();
            let pieces = buffer.chunks_exact_mut(size as usize);
            for (table, bytes) in tables.iter().zip(pieces) {
                writes.push(visit(&mut self.plan, *table, bytes)?);
            }
            self.write_some(&writes, size, &buffer).await?;
            self.job.step(len as u64)?;
        }
        Ok(())
    }

    /// Fills `buffer` with pieces of `size` bytes at these host offsets.
    pub(crate) async fn read_all(
        &self,
        places: &[u64],
        size: u64,
        buffer: &mut [u8],
    ) -> Result<(), Failure> {
        let (mut reads, mut rest, mut at) = (Vec::new(), buffer, 0);
        while at < places.len() {
            let count = in_a_row(&places[at..], size);
            let (part, after) = rest.split_at_mut(count * size as usize);
            rest = after;
            reads.push(self.active.read_file(places[at], part));
            at += count;
        }
        try_join_all(reads).await?;
        Ok(())
    }

    /// The same for pieces of the active image's tables: as they are in memory where they are there. What
    /// is not there is on the disk, at least as new as at the time of the look.
    pub(crate) async fn read_active(
        &self,
        places: &[u64],
        size: u64,
        buffer: &mut [u8],
    ) -> Result<(), Failure> {
        let slices = &self.active.qcow2.maps.slices;
        let slice_bytes = slices.slice_bytes();
        let mut cached = Vec::new();
        for (number, place) in places.iter().enumerate() {
            for at in (0..size).step_by(slice_bytes as usize) {
                let mut bytes = vec![0; slice_bytes as usize];
                if slices.peek(place + at, &mut bytes) {
                    cached.push((number * size as usize + at as usize, bytes));
                }
            }
        }
        if cached.len() as u64 * slice_bytes < buffer.len() as u64 {
            self.read_all(places, size, buffer).await?;
        }
        for (at, bytes) in cached {
            buffer[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }

    /// Writes those pieces of `buffer` that have an offset.
    pub(crate) async fn write_some(
        &self,
        places: &[Option<u64>],
        size: u64,
        buffer: &[u8],
    ) -> Result<(), Failure> {
        let mut writes = Vec::new();
        let mut at = 0;
        while at < places.len() {
            let Some(place) = places[at] else {
                at += 1;
                continue;
            };
            let known: Vec<u64> = places[at..].iter().map_while(|place| *place).collect();
            let count = in_a_row(&known, size);
            let part = &buffer[at * size as usize..(at + count) * size as usize];
            writes.push(self.active.write_file(place, part));
            at += count;
        }
        try_join_all(writes).await?;
        Ok(())
    }

    /// Reads these bytes of the image file.
    pub(crate) async fn read(&self, range: HostRange) -> Result<Vec<u8>, Failure> {
        let mut bytes = vec![0; range.len as usize];
        self.active.read_file(range.start, &mut bytes).await?;
        Ok(bytes)
    }

    /// What is known of a new table's cluster from its former life is forgotten.
    pub(crate) fn forget_copies(&self) {
        let size = self.cluster_size();
        for slot in self.plan.slots.iter().filter(|slot| slot.copied) {
            let copy = HostRange::new(slot.copy, size);
            self.active.qcow2.maps.slices.invalidate(copy);
        }
    }

    /// What requests changed since the last call.
    pub(crate) fn take_changed(&mut self) -> Changed {
        self.note_changed_counts();
        self.active.qcow2.maps.l1.tracker.take()
    }

    /// Blocks whose counts changed are to be written again.
    fn note_changed_counts(&mut self) {
        let size = self.cluster_size();
        let changed = self.active.writer.alloc.lock().blocks.take_changed();
        for block in self.plan.blocks.values_mut() {
            let range = block.old..block.old + size;
            if changed.range(range).next().is_some() {
                block.written = false;
            }
        }
    }

    /// Gives every refcount block with counts to change another place, and writes there what is not
    /// written yet. Unless this is the `last` time, references and counts need not fit together.
    pub(crate) async fn write_blocks(&mut self, last: bool) -> Result<(), Failure> {
        loop {
            self.cover_blocks();
            let blocks = &self.plan.blocks;
            let missing: Vec<u64> = self
                .plan
                .deltas
                .touched()
                .filter(|index| !blocks.contains_key(index))
                .collect();
            if missing.is_empty() {
                break;
            }
            self.fill_spare(missing.len()).await?;
            for index in missing {
                self.move_block(index)?;
            }
        }
        self.note_changed_counts();
        for index in self.plan.deltas.take_changed() {
            if let Some(block) = self.plan.blocks.get_mut(&index) {
                block.written = false;
            }
        }
        let list = self.plan.blocks.iter();
        let list: Vec<u64> = list
            .filter(|(_, block)| !block.written)
            .map(|(index, _)| *index)
            .collect();
        let size = self.cluster_size();
        self.job.expect(list.len() as u64 * size);
        for some in list.chunks(BATCH_BLOCKS) {
            self.rewrite(some, last).await?;
            self.job.step(some.len() as u64 * size)?;
        }
        Ok(())
    }

    fn move_block(&mut self, index: u64) -> Result<(), Failure> {
        let old = self.block_offset(index)?;
        let new = self.plan.spare()?;
        self.plan.count(old, -1)?;
        let written = false;
        self.plan.blocks.insert(index, Block { old, new, written });
        Ok(())
    }

    fn block_offset(&self, index: u64) -> Result<u64, Failure> {
        let alloc = self.active.writer.alloc.lock();
        let offset = alloc.table.get(index as usize).copied().unwrap_or(0);
        let first = index * self.active.geometry().refcount_block_entries();
        match offset {
            0 => Err(super::deltas::DeltaError::Uncounted(first).into()),
            _ => Ok(offset),
        }
    }

    /// Writes some refcount blocks with the counts to come.
    async fn rewrite(&mut self, list: &[u64], last: bool) -> Result<(), Failure> {
        let mut blocks = Vec::new();
        for index in list {
            let mut bytes = self.counts_in_force(*index).await?;
            match self.plan.apply(*index, &mut bytes) {
                Ok(()) => {}
                // A reference may be gone since it was counted, and its cluster with it.
                Err(_) if !last => continue,
                Err(failure) => return Err(failure),
            }
            if let Some(block) = self.plan.blocks.get_mut(index) {
                block.written = true;
                blocks.push((block.new, bytes));
            }
        }
        let this = &*self;
        let writes = blocks
            .iter()
            .map(|(place, bytes)| this.active.write_file(*place, bytes));
        try_join_all(writes).await?;
        Ok(())
    }

    /// The counts of a refcount block as they are now, on the disk or in memory.
    pub(crate) async fn counts_in_force(&self, index: u64) -> Result<Vec<u8>, Failure> {
        let offset = self.block_offset(index)?;
        let mut bytes = self
            .read(HostRange::new(offset, self.cluster_size()))
            .await?;
        let alloc = self.active.writer.alloc.lock();
        let slice_bytes = alloc.blocks.slice_bytes();
        let slices = bytes.chunks_exact_mut(slice_bytes as usize);
        for (number, slice) in (0..).zip(slices) {
            if let Some(cached) = alloc.blocks.get(offset + number * slice_bytes) {
                slice.copy_from_slice(cached);
            }
        }
        Ok(bytes)
    }

    /// Room for the refcount table, which keeps its length.
    pub(crate) async fn take_refcount_table(&mut self) -> Result<HostRange, Failure> {
        let bytes = self.active.writer.alloc.lock().table_range().len;
        self.take_area(bytes).await
    }

    /// The areas that are not needed once the switch is made lose their reference: the active L1 table,
    /// the refcount table and the table of snapshots.
    pub(crate) fn drop_old_areas(&mut self) -> Result<(), Failure> {
        self.cover_blocks();
        for area in self.areas_in_force() {
            self.plan.count_bytes(area, -1)?;
        }
        Ok(())
    }

    /// The active L1 table, the refcount table and the table of snapshots as the header has them.
    fn areas_in_force(&self) -> [HostRange; 3] {
        let refcount_table = self.active.writer.alloc.lock().table_range();
        let snapshots = self.active.writer.snapshots.lock().place;
        let l1 = self.active.qcow2.maps.l1.range();
        [l1, refcount_table, snapshots]
    }

    /// Writes what is left to write and switches. No request is inside, and this is the only pass. The
    /// second error means that it is unknown what the disk has.
    pub(crate) async fn make(&mut self, outcome: Outcome) -> Result<Result<(), Failure>, Errno> {
        if let Err(failure) = self.write_outcome(&outcome).await {
            return Ok(Err(failure));
        }
        // Counts of clusters that no replaced block counts; what goes to replaced ones does no harm.
        let counts = self.active.stage_counts();
        self.active.write_staged(&counts).await?;
        self.active.counts_are_written(&counts);
        self.active.keep_staging(counts);
        self.switch_header(&outcome).await?;
        self.switch_memory(outcome);
        Ok(Ok(()))
    }

    async fn write_outcome(&mut self, outcome: &Outcome) -> Result<(), Failure> {
        let table = {
            let alloc = self.active.writer.alloc.lock();
            let mut table = alloc.table.clone();
            for (index, block) in &self.plan.blocks {
                if let Some(slot) = table.get_mut(*index as usize) {
                    *slot = block.new;
                }
            }
            table
        };
        let area = outcome.refcount_table;
        if table.len() as u64 * 8 > area.len {
            return Err(Failure::Again);
        }
        self.active.write_table(&table, area).await?;
        let (l1, area) = &outcome.l1;
        self.active.write_table(l1, *area).await?;
        let (all, area) = &outcome.snapshots;
        let mut bytes = list::encode(all, self.active.geometry())?;
        if bytes.len() as u64 > area.len {
            return Err(Failure::Again);
        }
        bytes.resize(area.len as usize, 0);
        Ok(self.active.write_file(area.start, &bytes).await?)
    }

    async fn switch_header(&self, outcome: &Outcome) -> Result<(), Errno> {
        #[cfg(feature = "broken-order")]
        let early = self.active.image.breaks(crate::options::BrokenRule::O5);
        #[cfg(not(feature = "broken-order"))]
        let early = false;
        if !early {
            self.active.queue.barrier().await?;
        }
        let geometry = self.active.geometry();
        let table_clusters = geometry.clusters_for(outcome.refcount_table.len) as u32;
        let (l1, l1_area) = &outcome.l1;
        let (all, list_area) = &outcome.snapshots;
        let mut fields = [0; (field::INCOMPATIBLE - field::SIZE) as usize];
        let mut put = |at: u64, bytes: &[u8]| {
            let at = (at - field::SIZE) as usize;
            fields[at..at + bytes.len()].copy_from_slice(bytes);
        };
        put(field::SIZE, &outcome.size_bytes.to_be_bytes());
        let header = self.active.image.top.header();
        let method = header.map_or(CryptMethod::None, |header| header.crypt_method);
        put(field::CRYPT_METHOD, &(method as u32).to_be_bytes());
        put(field::L1_SIZE, &(l1.len() as u32).to_be_bytes());
        put(field::L1_TABLE_OFFSET, &l1_area.start.to_be_bytes());
        put(
            field::REFCOUNT_TABLE_OFFSET,
            &outcome.refcount_table.start.to_be_bytes(),
        );
        put(
            field::REFCOUNT_TABLE_CLUSTERS,
            &table_clusters.to_be_bytes(),
        );
        put(field::NB_SNAPSHOTS, &(all.len() as u32).to_be_bytes());
        put(field::SNAPSHOTS_OFFSET, &list_area.start.to_be_bytes());
        let marks = self.active.marks_with(all.len()).encode();
        let both = [(field::SIZE, &fields[..]), (field::COMPATIBLE, &marks[..])];
        let count = match geometry.version() {
            Version::V2 => 1,
            Version::V3 => 2,
        };
        let _held = self.active.writer.structure.lock().await;
        self.active.step(&both[..count]).await
    }

    /// Slices of tables that the new L1 table does not lead to are not to be written any more.
    fn forget_dirt(&self, l1: &[u64]) {
        let (slices, size) = (&self.active.qcow2.maps.slices, self.cluster_size());
        let tables = l1.iter().filter_map(|raw| self.plan.slot_of(*raw).ok());
        let kept: BTreeSet<u64> = tables.map(|slot| slot.table).collect();
        for slice in slices.dirty_slices() {
            if !kept.contains(&(slice & !(size - 1))) {
                slices.invalidate(HostRange::new(slice, slices.slice_bytes()));
            }
        }
    }

    /// What is in memory follows the disk.
    fn switch_memory(&mut self, outcome: Outcome) {
        self.forget_copies();
        self.forget_dirt(&outcome.l1.0);
        let (geometry, size) = (self.active.geometry(), self.cluster_size());
        let maps = &self.active.qcow2.maps;
        let (l1, l1_area) = outcome.l1;
        let (snapshots, list_area) = outcome.snapshots;
        self.each_table_cluster(&maps.l1.entries(), |table| maps.metadata.remove(table));
        for area in self.areas_in_force() {
            maps.metadata.remove(area.clusters(geometry));
        }
        self.each_table_cluster(&l1, |table| maps.metadata.insert(table));
        for area in [l1_area, list_area, outcome.refcount_table] {
            maps.metadata.insert(area.clusters(geometry));
        }
        maps.l1.replace(l1_area.start, &l1);
        {
            let mut alloc = self.active.writer.alloc.lock();
            for (index, block) in &self.plan.blocks {
                let [old, new] = [block.old, block.new].map(|at| HostRange::new(at, size));
                alloc.blocks.invalidate(old);
                alloc.blocks.invalidate(new);
                maps.metadata.remove(old.clusters(geometry));
                maps.metadata.insert(new.clusters(geometry));
                if let Some(slot) = alloc.table.get_mut(*index as usize) {
                    *slot = block.new;
                }
            }
            alloc.table_offset = outcome.refcount_table.start;
            alloc.table_clusters = outcome.refcount_table.len / size;
            alloc.holes.forget();
            let per_block = geometry.refcount_block_entries();
            let none = crate::metadata::freed::FreedBlocks::new(per_block);
            alloc
                .freed
                .append(std::mem::replace(&mut self.plan.freed, none));
        }
        let bytes = gaur_format::snapshot::encode_table(&snapshots).len() as u64;
        let mut known = self.active.writer.snapshots.lock();
        known.replace(snapshots, list_area.first(bytes));
        let new_size = outcome.size_bytes;
        let size_bytes = &self.active.image.size_bytes;
        size_bytes.store(new_size, Ordering::Release);
        self.switched = true;
    }

    /// Calls `visit` with the cluster of every L2 table that these entries lead to.
    fn each_table_cluster(&self, l1: &[u64], visit: impl Fn(ClusterRange)) {
        for raw in l1 {
            if let Ok(slot) = self.plan.slot_of(*raw)
                && slot.table != 0
            {
                visit(ClusterRange::new(slot.table / self.cluster_size(), 1));
            }
        }
    }

    /// Clusters that were taken and that nothing refers to.
    fn unused(&mut self) -> Vec<ClusterRange> {
        if !self.switched {
            return std::mem::take(&mut self.taken);
        }
        let size = self.cluster_size();
        let mut unused: Vec<u64> = self.plan.spare.drain(..).collect();
        let kept = self.plan.slots.iter().filter(|slot| !slot.copied);
        unused.extend(
            kept.filter(|slot| slot.copy != 0)
                .map(|slot| slot.copy / size),
        );
        let one = |start| ClusterRange::new(start, 1);
        unused.into_iter().map(one).collect()
    }
}

impl<F: File> Drop for Switch<'_, F> {
    fn drop(&mut self) {
        self.active.qcow2.maps.l1.tracker.watch(false);
        let unused = self.unused();
        let mut alloc = self.active.writer.alloc.lock();
        alloc.blocks.watch(false);
        alloc.releasable.extend(unused);
    }
}

/// How many of these offsets, from the first on, follow each other `size` bytes apart.
fn in_a_row(places: &[u64], size: u64) -> usize {
    let pairs = places.windows(2);
    1 + pairs.take_while(|pair| pair[0] + size == pair[1]).count()
}
