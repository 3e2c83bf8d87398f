//! Growing and shrinking the guest's disk.
//!
//! Crash rule: the size changes by one header write between two flushes (O5). Before a disk grows,
//! what it will reach reads as zeros; before it shrinks, what it loses is unmapped. An L1 table
//! moves the same way: copy, flush, header, flush.

use std::ops::Range;

use gaur_block::{Errno, File};
use gaur_format::geometry::Version;
use gaur_format::header::field;
use gaur_format::l2::L2Entry;
use gaur_format::limit;
use gaur_format::plan::Preallocation;

use crate::active::Active;
use crate::align;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::metadata::maps::Located;
use crate::queue::{Queue, Unmap};
use crate::range::GuestRange;
use crate::sync::atomic::Ordering;

/// Raw space that is taken between two looks at whether it is still wanted.
const FILL_BYTES: u64 = 8 << 20;

impl<F: File> Queue<F> {
    /// Changes the guest size, also while other queues have requests. Shrinking gives up the data beyond
    /// the new end and must be asked for with `shrink`; requests of a qcow2 image that are under way then
    /// are waited for, while those of a raw image must not reach beyond the new end.
    ///
    /// If it fails, or `job` is cancelled, the size is the old one. A shrink that was cancelled may have
    /// given up data beyond the new end.
    pub async fn resize(
        &self,
        new_size_bytes: u64,
        shrink: bool,
        job: &Job,
    ) -> Result<(), ImageError> {
        let none = Preallocation::Off;
        self.resize_preallocated(new_size_bytes, shrink, none, job)
            .await
    }

    /// As [`Queue::resize`]; what the disk gains has its space at once. A disk that becomes smaller has nothing to gain.
    ///
    /// # Errors
    /// Those of [`Queue::resize`]. Raw images have no metadata that could be preallocated.
    pub async fn resize_preallocated(
        &self,
        new_size_bytes: u64,
        shrink: bool,
        preallocation: Preallocation,
        job: &Job,
    ) -> Result<(), ImageError> {
        if self.image.read_only {
            return Err(ImageError::new(
                ErrorKind::ReadOnly,
                "the image is open read-only",
            ));
        }
        let old = self.image.size_bytes();
        if new_size_bytes < old && !shrink {
            let text = "shrinking would lose the data beyond the new end; ask for it with --shrink";
            return Err(ImageError::new(ErrorKind::InvalidInput, text));
        }
        if new_size_bytes < old && preallocation != Preallocation::Off {
            let text = "preallocation is for a disk that grows";
            return Err(ImageError::new(ErrorKind::InvalidInput, text));
        }
        let fail = |errno| self.image.explain(errno, "cannot resize");
        let Some(active) = self.active() else {
            if preallocation == Preallocation::Metadata {
                let format = self.image.top.format();
                let text = format!(
                    "a {format} image has no metadata to preallocate (falloc and full are)"
                );
                return Err(ImageError::new(ErrorKind::InvalidInput, text));
            }
            if self.image.top.container.is_some() && !new_size_bytes.is_multiple_of(512) {
                let text = format!("size {new_size_bytes} is not a multiple of 512 bytes");
                return Err(ImageError::new(ErrorKind::InvalidInput, text));
            }
            let resized = self.resize_raw(new_size_bytes, preallocation, job).await;
            return resized.map_err(fail);
        };
        let _held = active.writer.resizing.lock().await;
        let old = self.image.size_bytes();
        active.check_resize(new_size_bytes)?;
        active.check_bitmaps_fit(new_size_bytes)?;
        let resized = async {
            if new_size_bytes == old {
                return active.announce().await;
            }
            let changes = GuestRange::between(old.min(new_size_bytes), old.max(new_size_bytes));
            active.announce_new_disk(new_size_bytes, changes).await?;
            if new_size_bytes > old {
                active.grow_data_file(new_size_bytes).await?;
                active.grow(new_size_bytes, preallocation, job).await?;
            } else {
                let shrunk = active.shrink(old, new_size_bytes, job).await;
                // What is beyond the new end may be gone all the same.
                let lost = GuestRange::between(new_size_bytes, old);
                shrunk.inspect_err(|_| active.writer.bitmaps.mark_known(lost))?;
            }
            let epochs = &active.writer.epochs;
            let _closed = epochs.gate.close(|| epochs.is_empty()).await;
            active.resize_bitmaps(old, new_size_bytes);
            active.renew_intent_map().await;
            Ok(())
        };
        resized.await.map_err(fail)
    }

    async fn resize_raw(&self, new: u64, how: Preallocation, job: &Job) -> Result<(), Errno> {
        let (file, old) = (self.top_file(), self.top_file().len().await?);
        let end = self.image.top.flat_host(new);
        file.set_len(end).await?;
        let filled = self.fill_raw(old..end, how, job).await;
        if filled.is_err() {
            let _ = file.set_len(old).await;
            return filled;
        }
        self.image.size_bytes.store(new, Ordering::Release);
        self.flush_all().await
    }
}

impl<F: File> Queue<F> {
    /// Takes the space of what a raw disk has gained.
    async fn fill_raw(
        &self,
        gained: Range<u64>,
        how: Preallocation,
        job: &Job,
    ) -> Result<(), Errno> {
        let (file, pool) = (self.top_file(), &self.pool);
        let locks = self.image.data_locks();
        let mut start = gained.start;
        while how != Preallocation::Off && start < gained.end {
            let end = gained.end.min(start.saturating_add(FILL_BYTES));
            match how {
                Preallocation::Full => {
                    align::write_zero_bytes(file, pool, locks, start..end).await?;
                }
                _ => align::write_zeroes(file, pool, locks, start..end, false).await?,
            }
            job.step(end - start)?;
            start = end;
        }
        Ok(())
    }
}

impl<F: File> Active<'_, F> {
    fn check_resize(&self, new: u64) -> Result<(), ImageError> {
        let geometry = self.geometry();
        if !new.is_multiple_of(512) {
            let text = format!("size {new} is not a multiple of 512 bytes");
            return Err(ImageError::new(ErrorKind::InvalidInput, text));
        }
        if geometry.l1_entries_for(new) > limit::L1_BYTES_MAX / 8 {
            let text = format!("size {new} needs a larger L1 table than is allowed");
            return Err(ImageError::new(ErrorKind::InvalidInput, text));
        }
        let none = self.writer.snapshots.lock().all().is_empty();
        if geometry.version() == Version::V2 && !none {
            let text = "a version 2 image with internal snapshots cannot be resized";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        Ok(())
    }

    async fn grow(&self, new: u64, how: Preallocation, job: &Job) -> Result<(), Errno> {
        let entries = self.geometry().l1_entries_for(new);
        if entries > self.qcow2.maps.l1.len() {
            self.move_l1(entries, job).await?;
        }
        let _growing = match self.geometry().data_file() {
            true => Some(self.begin_growth(new).await),
            false => None,
        };
        let end = self.zero_tail(self.image.size_bytes(), new).await?;
        // Whatever is mapped behind the end is none of the guest's: the state of a machine that was
        // applied, or what another program has left.
        let reached = new.next_multiple_of(self.geometry().cluster_size());
        if reached > end {
            let gained = GuestRange::between(end, reached);
            self.zero_beyond(gained, job).await?;
            // A data file ends where the disk does.
            let mapped = match self.geometry().data_file() {
                true => GuestRange::between(end, new),
                false => gained,
            };
            if how != Preallocation::Off
                && let Err(errno) = self.preallocate(mapped, how, job).await
            {
                // Nothing of the disk refers to it yet.
                let _ = self.forget(gained, &Job::default()).await;
                return Err(errno);
            }
        }
        self.flush_all().await?;
        self.switch_size(new).await
    }

    /// Makes the last cluster of a disk of `size` bytes read as zeros behind the end; where it ends. A data
    /// file is long enough for `reach` bytes.
    async fn zero_tail(&self, size: u64, reach: u64) -> Result<u64, Errno> {
        let end = size.next_multiple_of(self.geometry().cluster_size());
        // Zeros may be written in place, like a request's: no cluster is given away meanwhile.
        let _epoch = self.queue.enter();
        if end > size && self.cluster_has_bytes(size).await? {
            let upto = match self.geometry().data_file() {
                true => end.min(reach).max(size),
                false => end,
            };
            self.write_zero_bytes(GuestRange::between(size, upto))
                .await?;
        }
        Ok(end)
    }

    /// Whether the cluster at guest offset `at` may hold something other than zeros behind the end
    /// of the image: bytes of its own, or those of a longer backing file.
    async fn cluster_has_bytes(&self, at: u64) -> Result<bool, Errno> {
        loop {
            let located = self.qcow2.maps.locate(at);
            match located.map_err(|fault| self.image.corrupt(0, fault))? {
                Located::Miss(slice) => self.layer().load_slice(slice).await?,
                Located::NoTable => return Ok(self.image.has_backing_at(at)),
                Located::Entry {
                    entry: L2Entry::Compressed(_),
                    ..
                } => return Ok(true),
                Located::Entry {
                    entry: L2Entry::Cluster { alloc, zero, .. },
                    ..
                } => {
                    let all = self.geometry().subcluster_mask();
                    let through = (alloc | zero) & all != all && self.image.has_backing_at(at);
                    return Ok(alloc != 0 || through);
                }
            }
        }
    }

    async fn shrink(&self, old: u64, new: u64, job: &Job) -> Result<(), Errno> {
        let geometry = self.geometry();
        job.step(0)?;
        {
            // A request that found its range inside the old size has ended before any of it is given up.
            let _closed = self
                .writer
                .epochs
                .gate
                .close(|| self.writer.epochs.is_empty())
                .await;
            self.image.size_bytes.store(new, Ordering::Release);
        }
        let unmapped = async {
            // A later growth of the disk must not find them.
            let end = self.zero_tail(new, old).await?;
            // And what their tables map behind the old end, before those go too.
            let last = old.next_multiple_of(geometry.guest_bytes_per_l2());
            if self.has_raw_data() {
                // What is not mapped reads as zeros, if the disk keeps its size.
                let lost = GuestRange::between(new, old);
                self.zero_raw_data(lost, Unmap::Allowed).await?;
            }
            self.forget(GuestRange::between(end, last), job).await?;
            let tables = geometry.l1_entries_for(new)..geometry.l1_entries_for(old);
            self.drop_tables(tables).await;
            self.flush_all().await
        };
        if let Err(errno) = unmapped.await {
            self.image.size_bytes.store(old, Ordering::Release);
            return Err(errno);
        }
        self.switch_size(new).await?;
        self.shrink_data_file(new).await;
        Ok(())
    }

    /// Gives up the L2 tables of these L1 entries, which are empty.
    async fn drop_tables(&self, indexes: Range<u64>) {
        let _held = self.writer.tables.lock().await;
        let maps = &self.qcow2.maps;
        let mut frees = Vec::new();
        for index in indexes {
            if let Ok(Some(table)) = maps.table(index)
                && table.copied
            {
                maps.l1.set(index, None);
                let clusters = self.table_clusters(table);
                maps.slices.invalidate(clusters.bytes(self.geometry()));
                maps.metadata.remove(clusters);
                frees.push(clusters);
            }
        }
        self.unmapped(&frees);
    }

    async fn switch_size(&self, new: u64) -> Result<(), Errno> {
        let _held = self.writer.structure.lock().await;
        self.switch_header(field::SIZE, &new.to_be_bytes()).await?;
        self.image.size_bytes.store(new, Ordering::Release);
        Ok(())
    }

    /// Moves the L1 table to a place where it has room for `entries` entries.
    async fn move_l1(&self, entries: u64, job: &Job) -> Result<(), Errno> {
        let geometry = self.geometry();
        let taken = self
            .take_area(geometry.clusters_for(entries * 8), job)
            .await?;
        let (clusters, place) = (taken.clusters, taken.clusters.bytes(geometry));
        let _held = self.writer.tables.lock().await;
        self.flush_all().await?;
        let maps = &self.qcow2.maps;
        let old = maps.l1.range().clusters(geometry);
        let mut table = maps.l1.entries();
        table.resize(entries as usize, 0);
        self.write_table(&table, place).await?;
        self.queue.barrier().await?;
        let mut fields = [0; 12];
        fields[..4].copy_from_slice(&(entries as u32).to_be_bytes());
        fields[4..].copy_from_slice(&place.start.to_be_bytes());
        {
            let _structure = self.writer.structure.lock().await;
            self.switch_header(field::L1_SIZE, &fields).await?;
        }
        taken.keep();
        maps.l1.grow(place.start, entries);
        maps.metadata.insert(clusters);
        maps.metadata.remove(old);
        self.writer.alloc.lock().releasable.push(old);
        Ok(())
    }
}
