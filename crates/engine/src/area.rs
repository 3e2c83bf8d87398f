//! Contiguous allocation (an *area*): clusters in a row for an L1 table, a refcount table or a table of snapshots, with the
//! refcount blocks and the refcount table that counting them needs ([`crate::metadata::area`] has the plan).
//!
//! Crash rules. New blocks and a new refcount table are complete on the disk, and the clusters they lie in
//! are counted there, before anything leads to them (O1). They become visible together: by entries
//! in one sector of the refcount table, or by the header (O5).

use gaur_block::{Errno, File};
use gaur_format::header::field;
use gaur_format::refcount;

use crate::active::Active;
use crate::image::Writer;
use crate::job::Job;
use crate::metadata::alloc::AllocError;
use crate::metadata::area::{AreaPlan, Uncounted};
use crate::range::{ClusterRange, HostRange};
use crate::tables::Taken;

/// New refcount blocks are written this many bytes at a time.
const BLOCKS_BYTES: u64 = 1 << 20;

/// An area in the making. What it has taken is given back if it is dropped before it is done.
struct NewArea<'a> {
    writer: &'a Writer,
    plan: AreaPlan,
    /// The file has its clusters, and those before this one are counted where blocks in force count them.
    counted: Option<u64>,
    done: bool,
}

impl Drop for NewArea<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let plan = &self.plan;
        match self.counted {
            None => self.writer.alloc.lock().abandon_area(plan, plan.start),
            Some(counted) => {
                self.writer.zeroed.write().clear(plan.all());
                self.writer.alloc.lock().undo_area(plan, counted);
            }
        }
    }
}

impl<'q, F: File> Active<'q, F> {
    /// Takes `clusters` clusters in a row; their counts are durable after the next pass. The lock on
    /// resizing is held, and no pass is waited for.
    pub(crate) async fn take_area(&self, clusters: u64, job: &Job) -> Result<Taken<'q>, Errno> {
        if clusters == 1 {
            let run = self.take_clusters(1).await?;
            return Ok(self.taken(run.range()));
        }
        let _making = self.writer.blocks.lock().await;
        let find = || {
            job.step(0).map_err(AllocError::Failed)?;
            self.writer.alloc.lock().find_area(clusters)
        };
        loop {
            let plan = self.allocate(find).await?;
            let start = plan.area_start();
            if self.make_area(plan, job).await? {
                return Ok(self.taken(ClusterRange::new(start, clusters)));
            }
        }
    }

    /// Replaces the refcount table by a longer one that reaches block `index`, and makes that block. The
    /// lock on blocks is held.
    pub(crate) async fn grow_refcount_table(&self, index: u64) -> Result<(), Errno> {
        let found = self.writer.alloc.lock().find_table(index);
        let plan = found.map_err(|error| match error {
            AllocError::Failed(errno) => errno,
            AllocError::Need(_) | AllocError::Corrupt(_) => Errno::EIO,
        })?;
        // No block in force counts any of it, so none of it can be in use.
        self.make_area(plan, &Job::default()).await?;
        Ok(())
    }

    /// Counts the clusters of a plan and makes what counts them. Answers with `false` if some of them
    /// are in use after all: then they are passed over, and another plan is to be made.
    async fn make_area(&self, plan: AreaPlan, job: &Job) -> Result<bool, Errno> {
        let mut area = NewArea {
            writer: self.writer,
            plan,
            counted: None,
            done: false,
        };
        if let Some(used) = self.visit_area(&mut area, false, job).await? {
            self.writer.alloc.lock().abandon_area(&area.plan, used + 1);
            area.done = true;
            return Ok(false);
        }
        let metadata = &self.qcow2.maps.metadata;
        if metadata.touches(area.plan.all()) {
            let fault = self.writer.alloc.lock().metadata_is_free(area.plan.start);
            return Err(self.image.corrupt(0, fault));
        }
        let fixed = self.writer.alloc.lock().capacity.is_some();
        if !fixed {
            let end = area.plan.end() * self.geometry().cluster_size();
            self.grow_file(end).await?;
        }
        area.counted = Some(area.plan.start);
        let in_use = self.visit_area(&mut area, true, job).await?;
        debug_assert_eq!(in_use, None, "the clusters were free when they were taken");
        if !area.plan.blocks.is_empty() {
            self.write_new_blocks(&area.plan, job).await?;
            self.link_new_blocks(&area.plan).await?;
        }
        area.done = true;
        Ok(true)
    }

    /// Looks at the counts of an area's clusters, or raises them; the first cluster that is in use.
    async fn visit_area(
        &self,
        area: &mut NewArea<'_>,
        count: bool,
        job: &Job,
    ) -> Result<Option<u64>, Errno> {
        let mut rest = area.plan.all();
        loop {
            let visited = area.writer.alloc.lock().visit_area(&mut rest, count);
            area.counted = area.counted.map(|_| rest.start);
            match visited {
                Ok(()) => return Ok(None),
                Err(Uncounted::Used(cluster)) => return Ok(Some(cluster)),
                Err(Uncounted::Slice(slice)) => self.load_refcounts(slice).await?,
            }
            job.step(0)?;
        }
    }

    /// Writes the blocks of a plan. They count its clusters as far as these are theirs to count.
    async fn write_new_blocks(&self, plan: &AreaPlan, job: &Job) -> Result<(), Errno> {
        let geometry = self.geometry();
        let size = geometry.cluster_size() as usize;
        let per_block = geometry.refcount_block_entries();
        let file = self.queue.top_file();
        let together = (BLOCKS_BYTES as usize / size).max(1);
        let mut at = plan.start * geometry.cluster_size();
        for indexes in plan.blocks.chunks(together) {
            job.step(0)?;
            let mut bytes = self.queue.pool.take(file, indexes.len() * size);
            bytes.fill(0);
            for (index, block) in indexes.iter().zip(bytes.chunks_exact_mut(size)) {
                let first = index * per_block;
                let (from, upto) = (plan.start.max(first), plan.end().min(first + per_block));
                for cluster in from..upto {
                    refcount::set(block, geometry.refcount_order(), cluster - first, 1)
                        .map_err(|_| Errno::EIO)?;
                }
            }
            self.write_file(at, &bytes).await?;
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Makes the refcount table lead to the new blocks of a plan.
    async fn link_new_blocks(&self, plan: &AreaPlan) -> Result<(), Errno> {
        // Old blocks may count the clusters of the new ones and of the table: those counts come first.
        let counted_before = self.writer.alloc.lock().counts_some_of(plan);
        match counted_before {
            // On the heap, so that writes do not carry its state.
            true => Box::pin(self.flush_all()).await?,
            false => self.queue.barrier().await?,
        }
        let _held = self.writer.structure.lock().await;
        let geometry = self.geometry();
        let (mut entries, place) = {
            let alloc = self.writer.alloc.lock();
            (alloc.table.clone(), alloc.table_offset)
        };
        let new_place = plan.table().bytes(geometry);
        entries.resize(entries.len().max((new_place.len / 8) as usize), 0);
        let blocks = plan.block_clusters().bytes(geometry);
        let block_offsets = blocks.pieces(geometry.cluster_size());
        for (index, block) in plan.blocks.iter().zip(block_offsets) {
            if let Some(slot) = entries.get_mut(*index as usize) {
                *slot = block.start;
            }
        }
        match new_place.is_empty() {
            true => self.write_entries(&entries, place, &plan.blocks).await?,
            false => self.switch_refcount_table(&entries, new_place).await?,
        }
        self.qcow2.maps.watch.note(plan.all());
        let metadata = &self.qcow2.maps.metadata;
        metadata.insert(plan.tables());
        let mut alloc = self.writer.alloc.lock();
        alloc.blocks.invalidate(blocks);
        alloc.table = entries;
        if !new_place.is_empty() {
            let old = alloc.table_range().clusters(geometry);
            (alloc.table_offset, alloc.table_clusters) = (new_place.start, plan.table_clusters);
            metadata.remove(old);
            // The table is not read from disk any more, and the header is durable.
            alloc.releasable.push(old);
        }
        Ok(())
    }

    /// Writes the entries of `blocks`, which lie in one sector of the refcount table at `place`.
    async fn write_entries(
        &self,
        entries: &[u64],
        place: u64,
        blocks: &[u64],
    ) -> Result<(), Errno> {
        let (Some(&first), Some(&last)) = (blocks.iter().min(), blocks.iter().max()) else {
            return Ok(());
        };
        let mut bytes = Vec::new();
        for entry in entries.get(first as usize..=last as usize).unwrap_or(&[]) {
            bytes.extend_from_slice(&entry.to_be_bytes());
        }
        let written = self.write_file(place + first * 8, &bytes).await;
        written.inspect_err(|errno| self.image.poison(*errno))
    }

    /// Puts a new refcount table in place of the present one.
    async fn switch_refcount_table(&self, entries: &[u64], place: HostRange) -> Result<(), Errno> {
        let clusters = self.geometry().clusters_for(place.len);
        self.write_table(entries, place).await?;
        self.queue.barrier().await?;
        let mut fields = [0; 12];
        fields[..8].copy_from_slice(&place.start.to_be_bytes());
        fields[8..].copy_from_slice(&(clusters as u32).to_be_bytes());
        self.switch_header(field::REFCOUNT_TABLE_OFFSET, &fields)
            .await
    }

    /// Writes a table of numbers, padded with zeros to the length of its place.
    pub(crate) async fn write_table(&self, entries: &[u64], place: HostRange) -> Result<(), Errno> {
        const PIECE: u64 = 64 << 10;
        let mut piece = self.queue.pool.take(self.queue.top_file(), PIECE as usize);
        let (mut entries, mut rest) = (entries.iter(), place);
        while !rest.is_empty() {
            let part = rest.first(PIECE);
            piece.fill(0);
            let bytes = &mut piece[..part.len as usize];
            for (out, entry) in bytes.chunks_exact_mut(8).zip(&mut entries) {
                out.copy_from_slice(&entry.to_be_bytes());
            }
            self.write_file(part.start, bytes).await?;
            rest = rest.after(part.len);
        }
        Ok(())
    }
}
