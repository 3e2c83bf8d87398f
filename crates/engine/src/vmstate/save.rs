//! What all who write one state share: its chunks, its clusters, and how far it has come.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use gaur_block::File;
use gaur_format::limit;

use super::chunk::{Chunk, Ended};
use super::memory::Memory;
use super::places::{Place, Places};
use super::ranges::Ranges;
use super::writer::VmStateWriter;
use crate::active::Active;
use crate::error::{ErrorKind, ImageError};
use crate::image::{Image, Qcow2};
use crate::metadata::alloc::Run;
use crate::queue::Queue;
use crate::range::ClusterRange;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::waiters::Waiters;

/// A chunk is this long, or one cluster if that is more.
const CHUNK_BYTES: u64 = 1 << 20;
/// Most chunks that wait in memory for the rest of their bytes.
const OPEN_MAX: usize = 32;
/// Memory of chunks that is kept for the next ones.
const SPARE_MAX: usize = 16;
/// Space that is taken at once: so much at first, twice as much each time, up to this.
const RESERVE_BYTES: u64 = 2 << 20;
const RESERVE_BYTES_MAX: u64 = 16 << 20;

/// The state of a virtual machine on its way into an image, see the [module](self).
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
    pub(super) waiters: Waiters,
}

pub(super) struct Shared {
    pub(super) phase: Phase,
    pub(super) slots: BTreeMap<u64, Slot>,
    pub(super) places: Places,
    /// Clusters that were taken ahead, first to be used first.
    pub(super) reserve: VecDeque<Run>,
    /// So many clusters are taken next time.
    pub(super) reserve_next: u64,
    spare: Vec<Memory>,
    /// Reads and writes of its clusters under way.
    in_flight: usize,
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

/// A chunk that is not only in the file.
pub(super) enum Slot {
    Open(Arc<Chunk>),
    /// Somebody reads it back, or writes all of it from memory of his own.
    Busy,
}

/// What looking for a chunk gave.
pub(super) enum Opened {
    Ready(Arc<Chunk>),
    /// It is in the file; whoever has the hold reads it back.
    Load(Hold),
    /// Wait until somebody else is done with it.
    Busy,
    /// Too many are open; write this one first.
    Crowded(Arc<Chunk>),
}

impl VmStateSave {
    /// Begins to save a state into a qcow2 image that is open for writing.
    pub fn begin(image: &Arc<Image>) -> Result<Arc<VmStateSave>, ImageError> {
        let refuse = |kind, text: &str| Err(ImageError::new(kind, text));
        let layer = image.layers().first();
        let Some(qcow2) = layer.and_then(|layer| layer.qcow2.as_ref()) else {
            return refuse(ErrorKind::Unsupported, "a raw image has no snapshots");
        };
        if image.writer.is_none() {
            return refuse(ErrorKind::ReadOnly, "the image is not open for writing");
        }
        if let Some(errno) = image.poisoned() {
            return Err(ImageError::io(
                errno,
                "the image takes no writes after an error",
            ));
        }
        let geometry = &qcow2.geometry;
        if geometry.refcount_max() < 2 {
            let text = "snapshots need refcounts of 2 bits or more; this image has refcount_bits=1";
            return refuse(ErrorKind::Unsupported, text);
        }
        let cluster_bytes = geometry.cluster_size();
        Ok(Arc::new(VmStateSave {
            limit_bytes: limit_bytes(image, qcow2),
            image: Arc::clone(image),
            chunk_bytes: CHUNK_BYTES.max(cluster_bytes),
            cluster_bytes,
            end_bytes: AtomicU64::new(0),
            shared: Mutex::new(Shared {
                phase: Phase::Open,
                slots: BTreeMap::new(),
                places: Places::default(),
                reserve: VecDeque::new(),
                reserve_next: RESERVE_BYTES / cluster_bytes,
                spare: Vec::new(),
                in_flight: 0,
                clock: 0,
            }),
            waiters: Waiters::default(),
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
        self.return_reserve(queue).await;
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

    /// Looks for chunk `index`, to write some of it, or `whole`.
    pub(super) fn open(self: &Arc<Self>, index: u64, whole: bool) -> Result<Opened, ImageError> {
        let mut guard = self.shared.lock();
        let shared = &mut *guard;
        shared.check_open()?;
        shared.clock += 1;
        match shared.slots.get(&index) {
            Some(Slot::Busy) => return Ok(Opened::Busy),
            Some(Slot::Open(chunk)) => {
                chunk.touch(shared.clock);
                return Ok(Opened::Ready(Arc::clone(chunk)));
            }
            None => {}
        }
        if shared.slots.len() >= OPEN_MAX
            && let Some(chunk) = shared.crowded()
        {
            return Ok(Opened::Crowded(chunk));
        }
        let first = index * self.chunk_clusters();
        let mut stored = shared.places.inside(first..first + self.chunk_clusters());
        if !whole && stored.next().is_some() {
            drop(stored);
            return Ok(Opened::Load(self.hold(shared, index)));
        }
        drop(stored);
        let memory = shared.memory(self.chunk_bytes);
        let chunk = Chunk::new(index, memory, Ranges::default(), shared.clock);
        let chunk = Arc::new(chunk);
        shared.slots.insert(index, Slot::Open(Arc::clone(&chunk)));
        Ok(Opened::Ready(chunk))
    }

    /// Claims chunk `index` for a write of all of it; `None` if bytes of it are in memory.
    pub(super) fn claim(self: &Arc<Self>, index: u64) -> Result<Option<Hold>, ImageError> {
        let mut shared = self.shared.lock();
        shared.check_open()?;
        let vacant = !shared.slots.contains_key(&index);
        Ok(vacant.then(|| self.hold(&mut shared, index)))
    }

    fn hold(self: &Arc<Self>, shared: &mut Shared, index: u64) -> Hold {
        shared.slots.insert(index, Slot::Busy);
        shared.in_flight += 1;
        Hold {
            index,
            flight: Flight(Arc::clone(self)),
        }
    }

    /// Something of its clusters is on its way.
    pub(super) fn flight(self: &Arc<Self>) -> Flight {
        self.shared.lock().in_flight += 1;
        Flight(Arc::clone(self))
    }

    /// Takes a chunk out that `end` says is over.
    pub(super) fn retire(&self, chunk: &Chunk, end: impl FnOnce(&Chunk) -> Ended) {
        let mut shared = self.shared.lock();
        if let Ended::Closed(memory) = end(chunk) {
            if matches!(shared.slots.get(&chunk.index), Some(Slot::Open(_))) {
                shared.slots.remove(&chunk.index);
            }
            shared.spare(memory);
        }
    }

    /// Chunks that have bytes in memory.
    pub(super) fn open_chunks(&self) -> Vec<Arc<Chunk>> {
        let shared = self.shared.lock();
        let open = shared.slots.values().filter_map(|slot| match slot {
            Slot::Open(chunk) => Some(Arc::clone(chunk)),
            Slot::Busy => None,
        });
        open.collect()
    }

    /// Memory for a chunk.
    pub(super) fn memory(&self) -> Memory {
        self.shared.lock().memory(self.chunk_bytes)
    }

    /// No more bytes. What has a place is given back as soon as nothing is under way.
    pub(super) fn end(&self) {
        let mut shared = self.shared.lock();
        shared.phase = Phase::Ended;
        self.settle(&mut shared);
        drop(shared);
        self.waiters.notify();
    }

    /// Gives back what an ended save still has, once nobody is using it.
    fn settle(&self, shared: &mut Shared) {
        if shared.phase != Phase::Ended || shared.in_flight > 0 {
            return;
        }
        for slot in std::mem::take(&mut shared.slots).into_values() {
            if let Slot::Open(chunk) = slot {
                chunk.discard();
            }
        }
        shared.spare.clear();
        let places = shared.places.take();
        self.release(
            places
                .iter()
                .map(|place| ClusterRange::new(place.host, place.len)),
        );
        self.release(
            shared
                .reserve
                .drain(..)
                .map(|run| ClusterRange::new(run.start, run.len)),
        );
    }

    /// Gives back what was taken ahead and not used, so that what comes next takes its place.
    pub(super) async fn return_reserve<F: File>(&self, queue: &Queue<F>) {
        // Counts change, as they do for a request: not while the whole image is switched.
        let _epoch = queue.enter_open().await;
        if let Some(writer) = &self.image.writer {
            let mut shared = self.shared.lock();
            let mut alloc = writer.alloc.lock();
            for run in shared.reserve.drain(..).rev() {
                alloc.take_back_ahead(run);
            }
        }
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

    /// The idle chunk that was used least recently, if too many are idle.
    fn crowded(&self) -> Option<Arc<Chunk>> {
        let idle = self.slots.values().filter_map(|slot| match slot {
            Slot::Open(chunk) if chunk.is_idle() => Some(chunk),
            _ => None,
        });
        let idle: Vec<_> = idle.collect();
        let oldest = idle.iter().min_by_key(|chunk| chunk.used())?;
        (idle.len() >= OPEN_MAX).then(|| Arc::clone(oldest))
    }

    fn memory(&mut self, len: u64) -> Memory {
        let spare = self.spare.pop();
        spare.unwrap_or_else(|| Memory::new(len as usize))
    }

    fn spare(&mut self, memory: Option<Memory>) {
        if self.spare.len() < SPARE_MAX {
            self.spare.extend(memory);
        }
    }

    /// Whether anything of its clusters is under way.
    pub(super) fn is_flying(&self) -> bool {
        self.in_flight > 0
    }

    /// Takes up to `want` clusters in a row of those that were taken ahead.
    pub(super) fn take_reserved(&mut self, want: u64) -> Option<Run> {
        let run = self.reserve.front_mut()?;
        let taken = Run {
            len: want.min(run.len),
            ..*run
        };
        run.start += taken.len;
        run.len -= taken.len;
        if run.len == 0 {
            self.reserve.pop_front();
        }
        Some(taken)
    }

    /// Clusters for later.
    pub(super) fn add_reserved(&mut self, run: Run, cluster_bytes: u64) {
        let most = (RESERVE_BYTES_MAX / cluster_bytes).max(1);
        self.reserve_next = (self.reserve_next * 2).clamp(1, most);
        match self.reserve.back_mut() {
            Some(last) if last.start + last.len == run.start && last.zeroed == run.zeroed => {
                last.len += run.len;
            }
            _ => self.reserve.push_back(run),
        }
    }
}

/// Counts a read or write of the state's clusters while it is under way.
pub(super) struct Flight(Arc<VmStateSave>);

impl Drop for Flight {
    fn drop(&mut self) {
        let mut shared = self.0.shared.lock();
        shared.in_flight -= 1;
        self.0.settle(&mut shared);
    }
}

/// A chunk that is busy; it is only in the file again when this is dropped.
pub(super) struct Hold {
    pub(super) index: u64,
    flight: Flight,
}

impl Hold {
    /// It is in memory now, with these bytes.
    pub(super) fn open(self, memory: Memory, valid: Ranges) -> Arc<Chunk> {
        let save = &self.flight.0;
        let mut shared = save.shared.lock();
        let chunk = Arc::new(Chunk::new(self.index, memory, valid, shared.clock));
        let slot = Slot::Open(Arc::clone(&chunk));
        shared.slots.insert(self.index, slot);
        drop(shared);
        chunk
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let save = &self.flight.0;
        let mut shared = save.shared.lock();
        if let Some(Slot::Busy) = shared.slots.get(&self.index) {
            shared.slots.remove(&self.index);
        }
        drop(shared);
        save.waiters.notify();
    }
}

/// Clusters that were taken for bytes of the state that are not there yet; given back if nobody says
/// `keep`.
pub(super) struct Taken {
    save: Arc<VmStateSave>,
    pub(super) places: Vec<Place>,
}

impl Taken {
    pub(super) fn new(save: &Arc<VmStateSave>) -> Taken {
        Taken {
            save: Arc::clone(save),
            places: Vec::new(),
        }
    }

    /// Their bytes are written: they are where the state is.
    pub(super) fn keep(mut self) {
        let mut shared = self.save.shared.lock();
        for place in self.places.drain(..) {
            shared.places.insert(place);
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.save.release(
            self.places
                .drain(..)
                .map(|place| ClusterRange::new(place.host, place.len)),
        );
    }
}

impl Drop for VmStateSave {
    fn drop(&mut self) {
        self.end();
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
