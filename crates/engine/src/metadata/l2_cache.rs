//! The cache of L2 slices of one layer, in parts with a lock each.
//!
//! A slice is a piece of an L2 table, known by where it lies in the image file. Neighbouring slices
//! are in different parts, so threads that work in different places seldom meet, and a lookup takes
//! its part's lock shared. The budget is shared out evenly.

use super::l2_shard::{Shard, View};
use super::packed::{Entry, Shape};
use crate::range::HostRange;
use crate::statistics::CacheStatistics;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, RwLock};

/// The cache.
#[derive(Debug)]
pub(crate) struct L2Cache {
    slice_bytes: u64,
    cluster_bits: u32,
    parts: Vec<Part>,
    /// Some part wants to be written back.
    pressed: AtomicBool,
    /// Offsets of dirty slices while a pass stages them; kept for its memory.
    order: Mutex<Vec<u64>>,
}

/// A part on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Part(RwLock<Shard>);

/// A part has this many bytes at least if there is more than one.
const PART_BYTES_MIN: u64 = 128 << 10;
/// Most parts.
const PARTS_MAX: u64 = 16;

impl L2Cache {
    /// A cache of slices of `shape`, `slice_bytes` each on disk, of `budget_bytes` at most.
    pub(crate) fn new(shape: Shape, slice_bytes: u64, budget_bytes: u64) -> L2Cache {
        // A part must have room for some slices in raw form.
        let part_bytes = PART_BYTES_MIN.max(16 * slice_bytes);
        let count = (budget_bytes / part_bytes).clamp(1, PARTS_MAX);
        let count = 1 << count.ilog2();
        let part = || {
            Part(RwLock::new(Shard::new(
                shape,
                (budget_bytes / count) as usize,
            )))
        };
        L2Cache {
            slice_bytes,
            cluster_bits: shape.cluster_bits,
            parts: (0..count).map(|_| part()).collect(),
            pressed: AtomicBool::new(false),
            order: Mutex::default(),
        }
    }

    /// Length of a slice in bytes.
    pub(crate) fn slice_bytes(&self) -> u64 {
        self.slice_bytes
    }

    /// Start of the slice that holds host offset `at`.
    #[inline]
    pub(crate) fn slice_of(&self, at: u64) -> u64 {
        at & !(self.slice_bytes - 1)
    }

    #[inline]
    fn part(&self, slice: u64) -> &RwLock<Shard> {
        // The slices of a table go to parts in turn. Where a table begins is mixed in: all tables may
        // begin at offsets with the same low bits.
        let table = slice >> self.cluster_bits;
        let start = table.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
        let number = (slice / self.slice_bytes).wrapping_add(start);
        let mask = self.parts.len() - 1;
        // There is at least one part, and their number is a power of two.
        &self.parts[number as usize & mask].0
    }

    /// What `look` makes of the slice at host offset `slice`; `None` if it is not cached.
    #[inline]
    pub(crate) fn look<T>(&self, slice: u64, look: impl FnOnce(View<'_>) -> T) -> Option<T> {
        self.part(slice).read().get(slice).map(look)
    }

    /// Whether the slice is cached.
    pub(crate) fn contains(&self, slice: u64) -> bool {
        self.part(slice).read().contains(slice)
    }

    /// Keeps the slice in the cache until `unpin`; false if it is not cached.
    pub(crate) fn pin(&self, slice: u64) -> bool {
        self.part(slice).read().pin(slice)
    }

    /// Takes one pin back.
    pub(crate) fn unpin(&self, slice: u64) {
        self.part(slice).read().unpin(slice);
    }

    /// Puts a slice as read from disk into the cache; one that is there already wins. An `optional`
    /// slice is left out unless it is a few runs. Returns whether it is.
    pub(crate) fn insert(&self, slice: u64, bytes: &[u8], optional: bool) -> bool {
        let mut part = self.part(slice).write();
        let few = part.insert(slice, bytes, optional);
        self.note_pressure(&part);
        few
    }

    /// Changes entry `index` of the slice, which is dirty from now on; false if it is not cached.
    pub(crate) fn update(
        &self,
        slice: u64,
        index: usize,
        change: impl FnOnce(Entry) -> Entry,
    ) -> bool {
        let mut part = self.part(slice).write();
        let done = part.update(slice, index, change);
        self.note_pressure(&part);
        done
    }

    fn note_pressure(&self, part: &Shard) {
        if part.pressed() && !self.pressed.load(Ordering::Relaxed) {
            self.pressed.store(true, Ordering::Relaxed);
        }
    }

    /// Whether writing back is due: nearly all of some part is dirty, or its budget is exceeded.
    #[inline]
    pub(crate) fn pressed(&self) -> bool {
        self.pressed.load(Ordering::Relaxed)
    }

    /// Forgets every slice in these bytes, dirty or not: the cluster there begins a new life, or ends one.
    pub(crate) fn invalidate(&self, range: HostRange) {
        for slice in range.pieces(self.slice_bytes) {
            self.part(slice.start).write().remove(slice.start);
        }
    }

    /// Number of dirty slices.
    pub(crate) fn dirty(&self) -> usize {
        self.parts.iter().map(|part| part.0.read().dirty()).sum()
    }

    /// Hands every dirty slice, in host order, to `stage`, which calls its second argument to have
    /// its bytes filled in. A slice stays until [`L2Cache::written`], because the disk does not have
    /// it yet.
    pub(crate) fn stage_dirty(
        &self,
        mut stage: impl FnMut(u64, &mut dyn FnMut(&mut [u8]) -> bool),
    ) {
        self.pressed.store(false, Ordering::Relaxed);
        let mut order = self.order.lock();
        order.clear();
        for part in &self.parts {
            part.0.read().list_dirty(&mut order);
        }
        order.sort_unstable();
        for slice in order.drain(..) {
            // One that is gone meanwhile needs no write; one changed once more is written as it is.
            stage(slice, &mut |bytes| {
                self.part(slice).write().stage(slice, bytes)
            });
        }
    }

    /// Fills `bytes` with the slice if it is cached, and changes nothing.
    pub(crate) fn peek(&self, slice: u64, bytes: &mut [u8]) -> bool {
        let copied = self.look(slice, |view| {
            let entry_bytes = bytes.len() / view.len().max(1);
            let entries = bytes.chunks_exact_mut(entry_bytes.max(8));
            for (index, out) in entries.enumerate() {
                let (raw, bitmap) = view.get(index);
                let (first, second) = out.split_at_mut(8);
                first.copy_from_slice(&raw.to_be_bytes());
                if let Some(second) = second.first_chunk_mut::<8>() {
                    *second = bitmap.to_be_bytes();
                }
            }
        });
        copied.is_some()
    }

    /// Host offsets of the slices that are dirty.
    pub(crate) fn dirty_slices(&self) -> Vec<u64> {
        let mut list = Vec::new();
        for part in &self.parts {
            part.0.read().list_dirty(&mut list);
        }
        list
    }

    /// The staged slice is on disk as staged.
    pub(crate) fn written(&self, slice: u64) {
        self.part(slice).write().written(slice);
    }

    /// Goes back to the budget where it was exceeded; after a pass.
    pub(crate) fn settle(&self) {
        for part in &self.parts {
            part.0.write().settle();
        }
    }

    /// Evicts what was not used since the last call, and gives the memory back.
    pub(crate) fn clean(&self) {
        for part in &self.parts {
            part.0.write().clean();
        }
    }

    /// How the cache is doing.
    pub(crate) fn statistics(&self) -> CacheStatistics {
        let mut sum = CacheStatistics::default();
        for part in &self.parts {
            part.0.read().add_statistics(&mut sum);
        }
        sum
    }
}

#[cfg(all(test, loom))]
mod loom_model;
