//! The cache of refcount blocks, in slices, keyed by where they lie in the image file.
//!
//! A slice is a piece of a refcount block: 4 KiB, or a cluster if that is smaller. The bytes are kept
//! as they are on disk, so that loading and writing back copy and do not convert. A slice that is
//! dirty or being written stays; the others are evicted by a clock. When nothing can be evicted the cache grows past its budget for a while and
//! reports pressure, which makes the caller write back.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::range::HostRange;
use crate::statistics::CacheStatistics;

/// The cache.
#[derive(Debug)]
pub(crate) struct SliceCache {
    slice_bytes: usize,
    capacity: usize,
    slots: Vec<CachedSlice>,
    index: HashMap<u64, u32, FxBuildHasher>,
    vacant: Vec<u32>,
    hand: usize,
    dirty: usize,
    /// Dirty slices while they are staged; kept for its memory.
    order: Vec<(u64, usize)>,
    /// Slices that were changed since a switch began to watch.
    changed: Option<BTreeSet<u64>>,
}

#[derive(Debug)]
struct CachedSlice {
    offset: u64,
    data: Box<[u8]>,
    present: bool,
    dirty: bool,
    writing: bool,
    used: AtomicBool,
}

/// Fewest slices a cache holds, whatever its budget.
const SLICES_MIN: usize = 16;

impl SliceCache {
    /// A cache of slices of `slice_bytes` each, of about `budget_bytes`.
    pub(crate) fn new(slice_bytes: u64, budget_bytes: u64) -> SliceCache {
        let slice_bytes = slice_bytes as usize;
        let capacity = (budget_bytes as usize / slice_bytes).max(SLICES_MIN);
        SliceCache {
            slice_bytes,
            capacity,
            slots: Vec::new(),
            index: HashMap::default(),
            vacant: Vec::new(),
            hand: 0,
            dirty: 0,
            order: Vec::new(),
            changed: None,
        }
    }

    /// Length of a slice in bytes.
    pub(crate) fn slice_bytes(&self) -> u64 {
        self.slice_bytes as u64
    }

    /// Bytes of the slice at host offset `offset`, if cached.
    pub(crate) fn get(&self, offset: u64) -> Option<&[u8]> {
        let slot = self.slot(offset)?;
        slot.used.store(true, Ordering::Relaxed);
        Some(&slot.data)
    }

    /// Bytes of the slice at `offset` to be changed; it counts as dirty from now on.
    pub(crate) fn get_dirty(&mut self, offset: u64) -> Option<&mut [u8]> {
        let at = *self.index.get(&offset)? as usize;
        let slot = self.slots.get_mut(at)?;
        if !slot.dirty {
            slot.dirty = true;
            self.dirty += 1;
        }
        if let Some(changed) = &mut self.changed {
            changed.insert(offset);
        }
        Some(&mut slot.data)
    }

    /// Begins to note which slices are changed, or ends that.
    pub(crate) fn watch(&mut self, on: bool) {
        self.changed = on.then(BTreeSet::new);
    }

    /// The slices that were changed since the last call, while a switch watches.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<u64> {
        self.changed
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Puts a slice read from disk into the cache; one that is there already wins.
    pub(crate) fn insert(&mut self, offset: u64, bytes: &[u8]) {
        if self.index.contains_key(&offset) {
            return;
        }
        let at = self.vacate();
        if let Some(slot) = self.slots.get_mut(at as usize) {
            slot.offset = offset;
            slot.data.copy_from_slice(bytes);
            slot.present = true;
            slot.dirty = false;
            slot.writing = false;
            slot.used.store(true, Ordering::Relaxed);
        }
        self.index.insert(offset, at);
    }

    /// Forgets every slice in these bytes, dirty or not: the cluster there begins a new life, or ends one.
    pub(crate) fn invalidate(&mut self, range: HostRange) {
        for slice in range.pieces(self.slice_bytes as u64) {
            if let Some(at) = self.index.remove(&slice.start)
                && let Some(slot) = self.slots.get_mut(at as usize)
            {
                self.dirty -= usize::from(slot.dirty);
                slot.present = false;
                slot.dirty = false;
                slot.writing = false;
                self.vacant.push(at);
            }
        }
    }

    /// Number of dirty slices.
    pub(crate) fn dirty(&self) -> usize {
        self.dirty
    }

    /// Whether writing back is due: most of the budget is dirty, or the budget is exceeded.
    pub(crate) fn pressure(&self) -> bool {
        self.dirty * 8 > self.capacity * 7 || (self.slots.len() > self.capacity && self.dirty > 0)
    }

    /// Hands every dirty slice, in host order, to `stage`; each is clean afterwards, but stays
    /// until [`SliceCache::written`], because the disk does not have it yet.
    pub(crate) fn stage_dirty(&mut self, mut stage: impl FnMut(u64, &[u8])) {
        if self.dirty == 0 {
            return;
        }
        let mut order = std::mem::take(&mut self.order);
        for (at, slot) in self.slots.iter().enumerate() {
            if slot.present && slot.dirty {
                order.push((slot.offset, at));
            }
        }
        order.sort_unstable();
        for (offset, at) in order.drain(..) {
            if let Some(slot) = self.slots.get_mut(at) {
                slot.dirty = false;
                slot.writing = true;
                stage(offset, &slot.data);
            }
        }
        self.order = order;
        self.dirty = 0;
    }

    /// The staged slice at `offset` is on disk as staged.
    pub(crate) fn written(&mut self, offset: u64) {
        if let Some(at) = self.index.get(&offset)
            && let Some(slot) = self.slots.get_mut(*at as usize)
        {
            slot.writing = false;
        }
    }

    /// How the cache is doing.
    pub(crate) fn statistics(&self) -> CacheStatistics {
        let slices = self.index.len() as u64;
        CacheStatistics {
            budget_bytes: (self.capacity * self.slice_bytes) as u64,
            held_bytes: (self.slots.len() * self.slice_bytes) as u64,
            covered_bytes: slices * self.slice_bytes as u64,
            slices,
            ..CacheStatistics::default()
        }
    }

    /// Evicts what was not used since the last call.
    pub(crate) fn clean(&mut self) {
        for at in 0..self.slots.len() {
            let Some(slot) = self.slots.get_mut(at) else {
                return;
            };
            let busy = slot.dirty || slot.writing;
            if slot.present && !busy && !std::mem::take(slot.used.get_mut()) {
                slot.present = false;
                let offset = slot.offset;
                self.index.remove(&offset);
                self.vacant.push(at as u32);
            }
        }
    }

    fn slot(&self, offset: u64) -> Option<&CachedSlice> {
        let at = *self.index.get(&offset)?;
        self.slots.get(at as usize)
    }

    /// A slot to fill: a vacant one, a new one within the budget, an evicted one, or one too many.
    fn vacate(&mut self) -> u32 {
        if let Some(at) = self.vacant.pop() {
            return at;
        }
        if self.slots.len() >= self.capacity
            && let Some(at) = self.evict()
        {
            return at;
        }
        self.slots.push(CachedSlice {
            offset: 0,
            data: vec![0; self.slice_bytes].into_boxed_slice(),
            present: false,
            dirty: false,
            writing: false,
            used: AtomicBool::new(false),
        });
        (self.slots.len() - 1) as u32
    }

    fn evict(&mut self) -> Option<u32> {
        for _ in 0..2 * self.slots.len() {
            let at = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            let slot = self.slots.get_mut(at)?;
            let busy = slot.dirty || slot.writing;
            if !slot.present || busy || std::mem::take(slot.used.get_mut()) {
                continue;
            }
            slot.present = false;
            let offset = slot.offset;
            self.index.remove(&offset);
            return Some(at as u32);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(slices: u64) -> SliceCache {
        SliceCache::new(4096, slices * 4096)
    }

    #[test]
    fn eviction_spares_dirty_and_unwritten_slices() {
        let mut cache = cache(16);
        for n in 0..16_u64 {
            cache.insert(n * 4096, &[n as u8; 4096]);
        }
        assert!(cache.get_dirty(0).is_some());
        cache.stage_dirty(|offset, _| assert_eq!(offset, 0));
        assert!(cache.get_dirty(4096).is_some());
        for n in 16..64_u64 {
            cache.insert(n * 4096, &[n as u8; 4096]);
        }
        for kept in [0, 4096] {
            assert_eq!(
                cache.get(kept).map(|bytes| bytes[0]),
                Some((kept / 4096) as u8)
            );
        }
        assert_eq!(cache.slots.len(), 16, "the others made room");
        cache.written(0);
        for n in 64..128_u64 {
            cache.insert(n * 4096, &[n as u8; 4096]);
        }
        assert!(cache.get(0).is_none());
        assert!(cache.get(4096).is_some(), "dirty stays");
    }

    #[test]
    fn invalidated_slices_lose_their_dirt() {
        let mut cache = cache(16);
        cache.insert(0, &[1; 4096]);
        assert!(cache.get_dirty(0).is_some());
        cache.invalidate(HostRange::new(0, 65536));
        assert_eq!(cache.dirty(), 0);
        cache.stage_dirty(|_, _| panic!("nothing is dirty"));
        assert!(cache.get(0).is_none());
    }
}
