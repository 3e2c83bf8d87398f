//! What all writers of one state share: its chunks, its clusters, and how far it has come.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use gaur_block::File;
use gaur_format::limit;

use super::chunk::Chunk;
use super::memory::Memory;
use super::spill::Spill;
use super::state_map::StateMap;
use super::writer::VmStateWriter;
use crate::active::Active;
use crate::data_file::NO_SNAPSHOTS;
use crate::error::{ErrorKind, ImageError};
use crate::image::{Image, Qcow2};
use crate::queue::Queue;
use crate::range::ClusterRange;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};

/// A chunk is this long, or one cluster if that is more.
const CHUNK_BYTES: u64 = 1 << 20;
/// Most chunks that wait in memory for the rest of their bytes.
const OPEN_MAX: usize = 32;
/// Memory of chunks that is kept for the next ones.
const SPARE_MAX: usize = 16;

/// The state of a virtual machine on its way into an image.
///
/// Any number of threads write to it, each through a [`VmStateWriter`] of its own. Nothing of it is part of
/// the image before [`VmStateSave::finish`]. Dropping it gives it up, as [`VmStateSave::abort`] does; do
/// one or the other before the image is closed, or its clusters leak.
pub struct VmStateSave {
    pub(super) image: Arc<Image>,
    pub(super) chunk_bytes: u64,
    pub(super) cluster_bytes: u64,
    /// The format allows no byte from here on.
    limit_bytes: u64,
    end_bytes: AtomicU64,
    pub(super) shared: Mutex<Shared>,
}

pub(super) struct Shared {
    pub(super) phase: Phase,
    /// Bytes in memory that are not on their way to the file.
    chunks: BTreeMap<u64, Chunk>,
    /// Chunks on their way to the file.
    writing: BTreeSet<u64>,
    pub(super) map: StateMap,
    spare: Vec<Memory>,
    /// Writes to its clusters under way, and sets of its tables.
    pub(super) in_flight: usize,
    clock: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Open,
    Finishing,
    /// A snapshot is being made of it.
    Committed,
    Ended,
}

impl VmStateSave {
    /// Begins to save a state into a qcow2 image that is open for writing.
    pub fn begin(image: &Arc<Image>) -> Result<Arc<VmStateSave>, ImageError> {
        let refuse = |kind, text: &str| Err(ImageError::new(kind, text));
        let Some(qcow2) = image.top.qcow2.as_ref() else {
            return refuse(ErrorKind::Unsupported, "a raw image has no snapshots");
        };
        let Some(writer) = &image.writer else {
            return refuse(ErrorKind::ReadOnly, "the image is not open for writing");
        };
        if let Some(errno) = image.poisoned() {
            return Err(image.explain(errno, "the image takes no writes after an error"));
        }
        let geometry = &qcow2.geometry;
        if geometry.data_file() {
            return refuse(ErrorKind::Unsupported, NO_SNAPSHOTS);
        }
        if geometry.refcount_max() < 2 {
            let text = "snapshots need refcounts of 2 bits or more; this image has refcount_bits=1";
            return refuse(ErrorKind::Unsupported, text);
        }
        let cluster_bytes = geometry.cluster_size();
        writer.saves.fetch_add(1, Ordering::SeqCst);
        Ok(Arc::new(VmStateSave {
            limit_bytes: limit_bytes(image, qcow2),
            image: Arc::clone(image),
            chunk_bytes: CHUNK_BYTES.max(cluster_bytes),
            cluster_bytes,
            end_bytes: AtomicU64::new(0),
            shared: Mutex::new(Shared {
                phase: Phase::Open,
                chunks: BTreeMap::new(),
                writing: BTreeSet::new(),
                map: StateMap::default(),
                spare: Vec::new(),
                in_flight: 0,
                clock: 0,
            }),
        }))
    }

    /// A handle for the thread of `queue`. It begins at byte 0.
    ///
    /// # Panics
    /// If the queue is one of another image.
    pub fn writer<'q, F: File>(self: &Arc<Self>, queue: &'q Queue<F>) -> VmStateWriter<'q, F> {
        self.assert_image(queue);
        VmStateWriter::new(Arc::clone(self), queue)
    }

    /// Length of the state in bytes so far: up to the last byte that was written.
    pub fn size_bytes(&self) -> u64 {
        self.end_bytes.load(Ordering::Acquire)
    }

    /// Makes the state at least `size_bytes` long; what is not written reads as zeros.
    pub fn extend_to(&self, size_bytes: u64) -> Result<(), ImageError> {
        self.check_range(0, size_bytes)?;
        self.reaches(size_bytes);
        Ok(())
    }

    /// Gives the state up. The image stays as it was, and the space is free again as soon as no
    /// writer has a write under way.
    ///
    /// # Panics
    /// If the queue is one of another image.
    pub async fn abort<F: File>(&self, queue: &Queue<F>) {
        self.assert_image(queue);
        self.end();
        // Counts the clusters down. If it fails the image takes no more writes and says so.
        let _ = queue.flush_all().await;
    }

    pub(super) fn assert_image<F: File>(&self, queue: &Queue<F>) {
        assert!(
            Arc::ptr_eq(&self.image, queue.image()),
            "a state is saved through queues of its image"
        );
    }

    /// The state has a byte before `end`.
    pub(super) fn reaches(&self, end: u64) {
        self.end_bytes.fetch_max(end, Ordering::AcqRel);
    }

    pub(super) fn check_range(&self, offset: u64, len: u64) -> Result<(), ImageError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.limit_bytes => Ok(()),
            _ => Err(self.too_long()),
        }
    }

    fn too_long(&self) -> ImageError {
        let most = self.limit_bytes;
        let text = format!(
            "the state is too long: this image has room for {most} bytes of it in a snapshot's L1 table"
        );
        ImageError::new(ErrorKind::InvalidInput, text)
    }

    /// Once more with the size that the disk has now.
    pub(super) fn check_size(&self, qcow2: &Qcow2) -> Result<(), ImageError> {
        if self.size_bytes() > limit_bytes(&self.image, qcow2) {
            return Err(self.too_long());
        }
        Ok(())
    }

    /// Number of its clusters in a chunk.
    pub(super) fn chunk_clusters(&self) -> u64 {
        self.chunk_bytes / self.cluster_bytes
    }

    /// Takes bytes for chunk `index`, at `at` in it. Answers with a chunk that is to be written: this one
    /// if it is full, or the least recently used one if there are too many.
    pub(super) fn store(
        &self,
        index: u64,
        at: usize,
        bytes: &[u8],
    ) -> Result<Option<u64>, ImageError> {
        let mut shared = self.shared.lock();
        shared.check_open()?;
        shared.clock += 1;
        let now = shared.clock;
        let is_new = !shared.chunks.contains_key(&index);
        let chunk = shared.chunk(index, self.chunk_bytes);
        chunk.used = now;
        chunk.store(at, bytes);
        Ok(match chunk.is_full() {
            true => Some(index),
            false if is_new => shared.crowded(),
            false => None,
        })
    }

    /// Makes bytes of chunk `index` zeros that were not written.
    pub(super) fn store_zeros(&self, index: u64, range: std::ops::Range<usize>) {
        let mut shared = self.shared.lock();
        shared.chunk(index, self.chunk_bytes).zero_gaps(range);
    }

    /// Numbers of the chunks that have bytes in memory.
    pub(super) fn open_chunks(&self) -> Vec<u64> {
        self.shared.lock().chunks.keys().copied().collect()
    }

    /// Takes chunk `index` out to be written, unless it is being written.
    pub(super) fn begin_write(self: &Arc<Self>, index: u64) -> Option<Spill> {
        let mut shared = self.shared.lock();
        if shared.writing.contains(&index) {
            return None;
        }
        let chunk = shared.chunks.remove(&index)?;
        shared.writing.insert(index);
        shared.in_flight += 1;
        Some(Spill::new(self, index, chunk))
    }

    /// A chunk is in the file.
    pub(super) fn written(&self, chunk: Option<Chunk>) {
        let mut shared = self.shared.lock();
        if shared.spare.len() < SPARE_MAX {
            shared.spare.extend(chunk.map(|chunk| chunk.memory));
        }
    }

    /// The write of a chunk is over. If it is given back it is still to be written.
    pub(super) fn end_write(&self, index: u64, chunk: Option<Chunk>) {
        let mut shared = self.shared.lock();
        shared.writing.remove(&index);
        if let Some(older) = chunk {
            match shared.chunks.get_mut(&index) {
                Some(newer) => newer.absorb(&older),
                None => drop(shared.chunks.insert(index, older)),
            }
        }
        self.end_flight(shared);
    }

    /// Something that kept its clusters from being given back is over.
    pub(super) fn end_flight(&self, mut shared: MutexGuard<'_, Shared>) {
        shared.in_flight -= 1;
        self.settle(&mut shared);
    }

    /// No more bytes. What has a place is given back as soon as nothing is under way.
    pub(super) fn end(&self) {
        let mut shared = self.shared.lock();
        shared.phase = Phase::Ended;
        self.settle(&mut shared);
    }

    /// Gives back what an ended save still has, once nothing is under way.
    fn settle(&self, shared: &mut Shared) {
        if shared.phase != Phase::Ended || shared.in_flight > 0 {
            return;
        }
        shared.chunks.clear();
        shared.spare.clear();
        let map = shared.map.take();
        let runs = map.iter().map(|run| ClusterRange::new(run.host, run.len));
        self.release(runs);
    }

    /// Nothing refers to these clusters: the next pass gives them back.
    pub(super) fn release(&self, frees: impl Iterator<Item = ClusterRange>) {
        if let Some(writer) = &self.image.writer {
            writer.alloc.lock().releasable.extend(frees);
        }
    }
}

/// How long a state may be: a snapshot has one L1 table for disk and state.
fn limit_bytes(image: &Image, qcow2: &Qcow2) -> u64 {
    let geometry = &qcow2.geometry;
    let disk = geometry.l1_entries_for(image.size_bytes());
    let entries = limit::L1_ENTRIES_MAX.saturating_sub(disk);
    entries.saturating_mul(geometry.guest_bytes_per_l2())
}

/// The image that the queue writes to; a save was begun on it, so it has one.
pub(super) fn top_of<F: File>(queue: &Queue<F>) -> Result<Active<'_, F>, ImageError> {
    let closed = || ImageError::new(ErrorKind::ReadOnly, "the image is not open for writing");
    queue.active().ok_or_else(closed)
}

impl Shared {
    fn check_open(&self) -> Result<(), ImageError> {
        let text = match self.phase {
            Phase::Open => return Ok(()),
            Phase::Finishing | Phase::Committed => {
                "the state is being finished: it takes no more bytes"
            }
            Phase::Ended => "the state is finished or given up: it takes no more bytes",
        };
        Err(ImageError::new(ErrorKind::InvalidInput, text))
    }

    /// Chunk `index`, made if it is not in memory.
    fn chunk(&mut self, index: u64, len: u64) -> &mut Chunk {
        let spare = &mut self.spare;
        self.chunks.entry(index).or_insert_with(|| {
            let memory = spare.pop();
            Chunk::new(memory.unwrap_or_else(|| Memory::new(len as usize)))
        })
    }

    /// The chunk that was used least recently, if too many could be written.
    fn crowded(&self) -> Option<u64> {
        let idle = |index: &u64| !self.writing.contains(index);
        let idle = self.chunks.iter().filter(|(index, _)| idle(index));
        if self.chunks.len() <= OPEN_MAX || idle.clone().count() <= OPEN_MAX {
            return None;
        }
        idle.min_by_key(|(_, chunk)| chunk.used)
            .map(|(index, _)| *index)
    }
}

impl Drop for VmStateSave {
    fn drop(&mut self) {
        self.end();
        if let Some(writer) = &self.image.writer {
            writer.saves.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl fmt::Debug for VmStateSave {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("VmStateSave")
            .field("image", &self.image)
            .field("size_bytes", &self.size_bytes())
            .finish_non_exhaustive()
    }
}
