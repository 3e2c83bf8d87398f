//! The cache of refcount blocks, in slices, keyed by where they lie in the image file.
//!
//! A slice is a piece of a refcount block: 4 KiB, or a cluster if that is smaller. The bytes are kept
//! as they are on disk, so that loading and writing back copy and do not convert. A slice that is
//! dirty or being written stays; the others are evicted by a clock. When nothing can be evicted the cache
//! grows past its budget for a while and reports pressure, which makes the caller write back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::range::HostRange;
use crate::statistics::CacheStatistics;

/// The cache.
#[derive(Debug)]
pub(crate) struct SliceCache {
    slice_bytes: usize,
    capacity: usize,
    /// By host offset.
    slices: BTreeMap<u64, CachedSlice>,
    /// Where the clock is: the next slice at or after this offset is looked at for eviction.
    hand: u64,
    dirty: usize,
    /// Slices that were changed since a switch began to watch.
    changed: Option<BTreeSet<u64>>,
}

#[derive(Debug)]
struct CachedSlice {
    data: Box<[u8]>,
    dirty: bool,
    writing: bool,
    used: AtomicBool,
}

impl CachedSlice {
    /// Whether it may go: it was not used since this was asked last, and the disk has it.
    fn is_idle(&mut self) -> bool {
        !self.dirty && !self.writing && !std::mem::take(self.used.get_mut())
    }
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
            slices: BTreeMap::new(),
            hand: 0,
            dirty: 0,
            changed: None,
        }
    }

    /// Length of a slice in bytes.
    pub(crate) fn slice_bytes(&self) -> u64 {
        self.slice_bytes as u64
    }

    /// Bytes of the slice at host offset `offset`, if cached.
    pub(crate) fn get(&self, offset: u64) -> Option<&[u8]> {
        let slice = self.slices.get(&offset)?;
        slice.used.store(true, Ordering::Relaxed);
        Some(&slice.data)
    }

    /// Bytes of the slice at `offset` to be changed; it counts as dirty from now on.
    pub(crate) fn get_dirty(&mut self, offset: u64) -> Option<&mut [u8]> {
        let slice = self.slices.get_mut(&offset)?;
        if !slice.dirty {
            slice.dirty = true;
            self.dirty += 1;
        }
        if let Some(changed) = &mut self.changed {
            changed.insert(offset);
        }
        Some(&mut slice.data)
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
        if self.slices.contains_key(&offset) {
            return;
        }
        let mut data = None;
        while self.slices.len() >= self.capacity
            && let Some(evicted) = self.evict()
        {
            data = Some(evicted.data);
        }
        let mut data = data.unwrap_or_else(|| vec![0; self.slice_bytes].into_boxed_slice());
        data.copy_from_slice(bytes);
        let slice = CachedSlice {
            data,
            dirty: false,
            writing: false,
            used: AtomicBool::new(true),
        };
        self.slices.insert(offset, slice);
    }

    /// Forgets every slice in these bytes, dirty or not: the cluster there begins a new life, or ends one.
    pub(crate) fn invalidate(&mut self, range: HostRange) {
        for slice in range.pieces(self.slice_bytes as u64) {
            if let Some(gone) = self.slices.remove(&slice.start) {
                self.dirty -= usize::from(gone.dirty);
            }
        }
    }

    /// Number of dirty slices.
    pub(crate) fn dirty(&self) -> usize {
        self.dirty
    }

    /// Whether writing back is due: most of the budget is dirty, or the budget is exceeded.
    pub(crate) fn pressure(&self) -> bool {
        self.dirty * 8 > self.capacity * 7 || (self.slices.len() > self.capacity && self.dirty > 0)
    }

    /// Hands every dirty slice, in host order, to `stage`; each is clean afterwards, but stays
    /// until [`SliceCache::written`], because the disk does not have it yet.
    pub(crate) fn stage_dirty(&mut self, mut stage: impl FnMut(u64, &[u8])) {
        if self.dirty == 0 {
            return;
        }
        for (offset, slice) in self.slices.iter_mut().filter(|(_, slice)| slice.dirty) {
            slice.dirty = false;
            slice.writing = true;
            stage(*offset, &slice.data);
        }
        self.dirty = 0;
    }

    /// The staged slice at `offset` is on disk as staged.
    pub(crate) fn written(&mut self, offset: u64) {
        if let Some(slice) = self.slices.get_mut(&offset) {
            slice.writing = false;
        }
    }

    /// How the cache is doing.
    pub(crate) fn statistics(&self) -> CacheStatistics {
        let slices = self.slices.len() as u64;
        CacheStatistics {
            budget_bytes: (self.capacity * self.slice_bytes) as u64,
            held_bytes: slices * self.slice_bytes as u64,
            covered_bytes: slices * self.slice_bytes as u64,
            slices,
            ..CacheStatistics::default()
        }
    }

    /// Evicts what was not used since the last call.
    pub(crate) fn clean(&mut self) {
        self.slices.retain(|_, slice| !slice.is_idle());
    }

    /// Takes out a slice that may go, the next that the clock comes by.
    fn evict(&mut self) -> Option<CachedSlice> {
        // Those that were used since go in the second round at the latest.
        let found = [self.hand, 0, 0].into_iter().find_map(|from| {
            let mut slices = self.slices.range_mut(from..);
            slices.find_map(|(offset, slice)| slice.is_idle().then_some(*offset))
        })?;
        self.hand = found + 1;
        self.slices.remove(&found)
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
        assert_eq!(cache.slices.len(), 16, "the others made room");
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
