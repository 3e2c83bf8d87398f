//! The end of a save: what is in memory goes to the file, L2 tables are made, and a snapshot refers
//! to them.

use std::ops::Range;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use gaur_block::{File, Source};
use gaur_format::addr::HostOffset;
use gaur_format::geometry::Version;
use gaur_format::l2::L2Entry;

use super::save::{Phase, VmStateSave, top_of};
use super::spill::{Spill, failed};
use super::state_map::StateMap;
use super::writer::IN_FLIGHT_MAX;
use crate::align;
use crate::error::{ErrorKind, ImageError};
use crate::image::{Image, Qcow2};
use crate::job::Job;
use crate::queue::Queue;
use crate::range::{ClusterRange, HostRange};
use crate::snapshot::{NewSnapshot, SavedState, Snapshot};

/// Tables next to each other are written so many bytes at a time.
const TABLES_BYTES: u64 = 1 << 20;

impl VmStateSave {
    /// Ends the save: makes a snapshot of the disk as it is now, with this state. Both become visible
    /// together, by one sector, and are durable when this returns. Every writer has been flushed or
    /// dropped before.
    ///
    /// If it fails the image is as it was, and the state still there: finish it once more (with a
    /// name that is not taken, say), or give it up.
    ///
    /// # Panics
    /// If the queue is one of another image.
    pub async fn finish<F: File>(
        self: &Arc<Self>,
        queue: &Queue<F>,
        new: &NewSnapshot,
        job: &Job,
    ) -> Result<Snapshot, ImageError> {
        self.assert_image(queue);
        let finishing = Finishing::begin(self)?;
        self.spill_all(queue).await?;
        let mut tables = self.build_tables(queue, job).await?;
        // Somewhere in here the snapshot gets the clusters. If the caller drops this future, they
        // are leaked rather than given back.
        finishing.commit(true);
        let taken = std::mem::take(&mut tables.taken);
        let created = queue.create_with_state(new, Some(&tables.state), job).await;
        if created.is_err() {
            finishing.commit(false);
            tables.taken = taken;
        }
        created
    }

    /// Writes what is still in memory.
    async fn spill_all<F: File>(self: &Arc<Self>, queue: &Queue<F>) -> Result<(), ImageError> {
        let spills = self.open_chunks().into_iter();
        let spills = spills.map(|index| self.spill(queue, index));
        let spills = stream::iter(spills).buffer_unordered(IN_FLIGHT_MAX);
        spills.try_collect().await
    }

    async fn spill<F: File>(
        self: &Arc<Self>,
        queue: &Queue<F>,
        index: u64,
    ) -> Result<(), ImageError> {
        match Spill::begin(self, queue, index).await? {
            Some(spill) => spill.run(queue).await,
            None => Ok(()),
        }
    }

    /// Writes the L2 tables of the state, in new clusters.
    pub(super) async fn build_tables<F: File>(
        self: &Arc<Self>,
        queue: &Queue<F>,
        job: &Job,
    ) -> Result<Tables, ImageError> {
        let qcow2 = top_of(queue)?.qcow2;
        self.check_size(qcow2)?;
        let shape = Shape::of(&self.image, qcow2, self.size_bytes());
        self.fill_holes(queue, &shape).await?;
        self.shared.lock().in_flight += 1;
        let mut tables = Tables {
            state: SavedState {
                size_bytes: self.size_bytes(),
                tables: Vec::new(),
            },
            taken: Vec::new(),
            save: Arc::clone(self),
        };
        let wanted = {
            let shared = self.shared.lock();
            shape.tables(&shared.map)
        };
        job.expect(wanted.len() as u64 * self.cluster_bytes);
        let most = (TABLES_BYTES / self.cluster_bytes).max(1);
        let mut rest = wanted.as_slice();
        while !rest.is_empty() {
            let run = self.take_run(queue, most.min(rest.len() as u64)).await?;
            tables.taken.push(ClusterRange::new(run.start, run.len));
            let (now, later) = rest.split_at(rest.len().min(run.len as usize));
            self.write_tables(queue, &shape, now, run.start).await?;
            let hosts = run.start..run.start + run.len;
            let placed = now.iter().zip(hosts);
            let placed = placed.map(|(table, host)| (*table, host * self.cluster_bytes));
            tables.state.tables.extend(placed);
            job.step(now.len() as u64 * self.cluster_bytes)
                .map_err(|errno| failed(queue, errno))?;
            rest = later;
        }
        Ok(tables)
    }

    /// Writes these tables one after the other, the first into cluster `host`.
    async fn write_tables<F: File>(
        &self,
        queue: &Queue<F>,
        shape: &Shape,
        tables: &[u64],
        host: u64,
    ) -> Result<(), ImageError> {
        let qcow2 = top_of(queue)?.qcow2;
        let file = queue.top_file();
        let size = self.cluster_bytes as usize;
        let mut bytes = queue.pool.take(file, tables.len() * size);
        {
            let shared = self.shared.lock();
            for (table, out) in tables.iter().zip(bytes.chunks_exact_mut(size)) {
                shape.fill(&shared.map, *table, out);
            }
        }
        let offset = host * self.cluster_bytes;
        for cluster in 0..tables.len() as u64 {
            // Some other table may have been there once.
            let at = offset + cluster * self.cluster_bytes;
            let table = HostRange::new(at, self.cluster_bytes);
            qcow2.maps.slices.invalidate(table);
        }
        let (locks, source) = (&self.image.locks, Source::memory(&bytes));
        let written = align::write(file, &queue.pool, locks, offset, source).await;
        written.map_err(|errno| failed(queue, errno))
    }

    /// Where an entry cannot say "zeros" and the backing file reaches, holes become clusters of zeros.
    async fn fill_holes<F: File>(
        self: &Arc<Self>,
        queue: &Queue<F>,
        shape: &Shape,
    ) -> Result<(), ImageError> {
        let gaps = self.shared.lock().map.gaps(0..shape.written);
        let (size, per_chunk) = (self.cluster_bytes, self.chunk_clusters());
        for gap in gaps {
            for index in gap.start / per_chunk..gap.end.div_ceil(per_chunk) {
                let base = index * per_chunk;
                let start = gap.start.max(base) - base;
                let end = gap.end.min(base + per_chunk) - base;
                self.store_zeros(index, (start * size) as usize..(end * size) as usize);
                self.spill(queue, index).await?;
            }
        }
        Ok(())
    }
}

/// The save takes no bytes while this is there.
struct Finishing<'a> {
    save: &'a VmStateSave,
}

impl<'a> Finishing<'a> {
    fn begin(save: &'a VmStateSave) -> Result<Finishing<'a>, ImageError> {
        let mut shared = save.shared.lock();
        let text = match shared.phase {
            Phase::Ended => "the state is finished or given up already",
            Phase::Finishing | Phase::Committed => "the state is being finished already",
            Phase::Open if shared.in_flight > 0 => {
                "a writer of the state has writes under way: flush it first"
            }
            Phase::Open => {
                shared.phase = Phase::Finishing;
                return Ok(Finishing { save });
            }
        };
        Err(ImageError::new(ErrorKind::InvalidInput, text))
    }

    /// Whether a snapshot may have the clusters from now on.
    fn commit(&self, begins: bool) {
        let mut shared = self.save.shared.lock();
        shared.phase = if begins {
            Phase::Committed
        } else {
            Phase::Finishing
        };
    }
}

impl Drop for Finishing<'_> {
    fn drop(&mut self) {
        let mut shared = self.save.shared.lock();
        match shared.phase {
            Phase::Finishing => shared.phase = Phase::Open,
            Phase::Committed => {
                // Not ours to give back.
                shared.map.take();
                drop(shared);
                self.save.end();
            }
            Phase::Open | Phase::Ended => {}
        }
    }
}

/// The L2 tables of a state; given back when dropped, unless a snapshot has them.
pub(super) struct Tables {
    pub(super) state: SavedState,
    taken: Vec<ClusterRange>,
    save: Arc<VmStateSave>,
}

impl Drop for Tables {
    fn drop(&mut self) {
        self.save.release(self.taken.drain(..));
        self.save.end_flight(self.save.shared.lock());
    }
}

/// What the tables of a state are made of.
struct Shape {
    geometry: gaur_format::geometry::Geometry,
    /// Tables of a state of that length.
    tables: u64,
    /// Where the backing file reaches, entries say that a hole is zeros: over so many tables. `None` where a
    /// hole needs no entries, because nothing below could show.
    flagged: Option<u64>,
    /// Version 2 has no such entries: holes in so many clusters become clusters of zeros.
    written: u64,
}

impl Shape {
    fn of(image: &Image, qcow2: &Qcow2, size_bytes: u64) -> Shape {
        let geometry = qcow2.geometry;
        let start = geometry.l1_entries_for(image.size_bytes()) * geometry.guest_bytes_per_l2();
        let backing = image.layers().get(1).map(|layer| layer.size_bytes());
        let reach = backing.map(|len| len.saturating_sub(start).min(size_bytes));
        let v2 = geometry.version() == Version::V2;
        Shape {
            geometry,
            tables: geometry.l1_entries_for(size_bytes),
            flagged: reach
                .filter(|_| !v2)
                .map(|reach| geometry.l1_entries_for(reach)),
            written: reach
                .filter(|_| v2)
                .map_or(0, |reach| geometry.clusters_for(reach)),
        }
    }

    /// Numbers of the tables that have to be there.
    fn tables(&self, map: &StateMap) -> Vec<u64> {
        let entries = self.geometry.l2_entries();
        let covered = self.flagged.unwrap_or(0);
        let mut tables: Vec<u64> = (0..covered).collect();
        let mut next = covered;
        while let Some(cluster) = map.next_from(next * entries) {
            tables.push(cluster / entries);
            next = cluster / entries + 1;
        }
        // The last is always there: then the L1 table is as long as the state says that it is.
        if let Some(last) = self.tables.checked_sub(1)
            && tables.last() != Some(&last)
        {
            tables.push(last);
        }
        debug_assert!(
            tables.is_sorted(),
            "no place is beyond the end of the state"
        );
        tables
    }

    /// Puts table number `table` into `out`.
    fn fill(&self, map: &StateMap, table: u64, out: &mut [u8]) {
        let entries = self.geometry.l2_entries();
        let clusters = table * entries..(table + 1) * entries;
        let nothing = match self.flagged {
            Some(_) => L2Entry::Cluster {
                host: None,
                copied: false,
                alloc: 0,
                zero: self.geometry.subcluster_mask(),
            },
            None => L2Entry::UNALLOCATED,
        };
        self.put(out, 0..entries, |_| nothing);
        for place in map.inside(clusters.clone()) {
            let first = place.first - clusters.start;
            self.put(out, first..first + place.len, |number| L2Entry::Cluster {
                host: Some(HostOffset(
                    (place.host + number) * self.geometry.cluster_size(),
                )),
                copied: false,
                alloc: self.geometry.subcluster_mask(),
                zero: 0,
            });
        }
    }

    /// Encodes the entries in `range`; `entry` makes the nth of them.
    fn put(&self, out: &mut [u8], range: Range<u64>, entry: impl Fn(u64) -> L2Entry) {
        let size = self.geometry.l2_entry_size() as usize;
        let at = range.start as usize * size..range.end as usize * size;
        let slots = out.get_mut(at).unwrap_or_default().chunks_exact_mut(size);
        for (number, slot) in (0..).zip(slots) {
            let (first, second) = entry(number).encode(&self.geometry);
            let both = [first.to_be_bytes(), second.to_be_bytes()].concat();
            slot.copy_from_slice(both.get(..size).unwrap_or_default());
        }
    }
}
