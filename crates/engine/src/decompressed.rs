//! Cache of decompressed clusters, shared by the queues of an image.
//!
//! Without it every small read of a compressed cluster would decompress all of it again. An entry is found
//! by its layer and descriptor. The files below the top one do not change. In the top one the bytes at a
//! descriptor stay as they are while their host clusters are counted, so
//! [`DecompressedClusters::forget`] is called when counts have reached zero and before the clusters can be handed
//! out again. Nothing puts such an entry back: requests that may have seen the old mapping are over by
//! then (O3, `metadata/epochs.rs`), and no other mapping leads there.
//!
//! Bounded in bytes and in entries; second chance (CLOCK) chooses what goes. A hit allocates nothing, and copies
//! outside of the lock; a miss takes the memory of what it replaces, unless a reader has that still.

use std::sync::Arc;

use gaur_format::CompressedDescriptor;
use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::range::HostRange;
use crate::sync::Mutex;
use crate::waiters::KeyLocks;

/// Entries at most, whatever their size: looking through all of them is cheap.
const ENTRIES_MAX: usize = 4096;
/// Entries that are kept even if they are more than the budget.
const ENTRIES_MIN: usize = 2;

/// Which compressed cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ClusterKey {
    /// Index of the layer, 0 for the top.
    pub(crate) layer: usize,
    pub(crate) descriptor: CompressedDescriptor,
}

/// The decompressed clusters of an image.
#[derive(Debug)]
pub(crate) struct DecompressedClusters {
    budget_bytes: u64,
    state: Mutex<State>,
    /// Clusters being decompressed, by the host offset of their bytes.
    pub(crate) loads: KeyLocks,
}

#[derive(Debug, Default)]
struct State {
    entries: Vec<Entry>,
    /// Where in `entries` each is.
    index: HashMap<ClusterKey, usize, FxBuildHasher>,
    bytes: u64,
    /// Where the search for an entry to replace goes on.
    hand: usize,
}

#[derive(Debug)]
struct Entry {
    key: ClusterKey,
    bytes: Arc<Vec<u8>>,
    /// Read since the hand passed.
    used: bool,
    /// Read or added since the last [`DecompressedClusters::clean`].
    recent: bool,
}

impl DecompressedClusters {
    pub(crate) fn new(budget_bytes: u64) -> DecompressedClusters {
        DecompressedClusters {
            budget_bytes,
            state: Mutex::default(),
            loads: KeyLocks::default(),
        }
    }

    /// The bytes of a cluster, if they are here.
    pub(crate) fn get(&self, key: ClusterKey) -> Option<Arc<Vec<u8>>> {
        let mut state = self.state.lock();
        let at = *state.index.get(&key)?;
        let entry = state.entries.get_mut(at)?;
        (entry.used, entry.recent) = (true, true);
        Some(Arc::clone(&entry.bytes))
    }

    pub(crate) fn contains(&self, key: ClusterKey) -> bool {
        self.state.lock().index.contains_key(&key)
    }

    /// Memory of `len_bytes` for a cluster about to be decompressed: that of an entry whose turn it is to go, if
    /// the cache is full. It holds whatever was there.
    pub(crate) fn memory(&self, len_bytes: usize) -> Vec<u8> {
        let evicted = self.state.lock().make_room(len_bytes, self.budget_bytes);
        let mut bytes = evicted.unwrap_or_default();
        bytes.resize(len_bytes, 0);
        bytes
    }

    /// Adds a cluster, which may be here already.
    pub(crate) fn insert(&self, key: ClusterKey, bytes: Vec<u8>) -> Arc<Vec<u8>> {
        let bytes = Arc::new(bytes);
        let mut state = self.state.lock();
        let state = &mut *state;
        let known = state.index.get(&key);
        if let Some(entry) = known.and_then(|at| state.entries.get(*at)) {
            return Arc::clone(&entry.bytes);
        }
        state.make_room(bytes.len(), self.budget_bytes);
        state.bytes += bytes.len() as u64;
        state.index.insert(key, state.entries.len());
        state.entries.push(Entry {
            key,
            bytes: Arc::clone(&bytes),
            used: false,
            recent: true,
        });
        bytes
    }

    /// Drops every cluster of `layer` whose compressed bytes lie in a host range.
    pub(crate) fn forget(&self, layer: usize, range: HostRange) {
        let mut state = self.state.lock();
        let mut at = 0;
        while let Some(entry) = state.entries.get(at) {
            let (key, descriptor) = (entry.key, entry.key.descriptor);
            let packed = HostRange::new(descriptor.offset, descriptor.byte_len());
            if key.layer == layer && packed.overlaps(range) {
                // What was the last is here now.
                state.remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Drops what was not read since the last call.
    pub(crate) fn clean(&self) {
        let mut state = self.state.lock();
        let mut at = 0;
        while let Some(entry) = state.entries.get_mut(at) {
            if std::mem::take(&mut entry.recent) {
                at += 1;
            } else {
                state.remove(at);
            }
        }
    }

    /// Bytes of the clusters it has.
    #[cfg(test)]
    pub(crate) fn held_bytes(&self) -> u64 {
        self.state.lock().bytes
    }
}

impl State {
    /// Drops entries until one of `len_bytes` fits; the memory of one of them, if no reader has it.
    fn make_room(&mut self, len_bytes: usize, budget_bytes: u64) -> Option<Vec<u8>> {
        let mut memory = None;
        while self.entries.len() >= ENTRIES_MIN
            && (self.entries.len() >= ENTRIES_MAX
                || self.bytes.saturating_add(len_bytes as u64) > budget_bytes)
        {
            let at = self.next_to_go();
            let Some(entry) = self.remove(at) else { break };
            // That of a layer with larger clusters would be more than it is counted for.
            let own = Arc::try_unwrap(entry.bytes).ok();
            memory = own.filter(|bytes| bytes.capacity() == len_bytes).or(memory);
        }
        memory
    }

    /// The first from the hand on that was not read since the hand passed it last.
    fn next_to_go(&mut self) -> usize {
        loop {
            if self.hand >= self.entries.len() {
                self.hand = 0;
            }
            match self.entries.get_mut(self.hand) {
                Some(entry) if entry.used => entry.used = false,
                _ => return self.hand,
            }
            self.hand += 1;
        }
    }

    fn remove(&mut self, at: usize) -> Option<Entry> {
        if at >= self.entries.len() {
            return None;
        }
        let entry = self.entries.swap_remove(at);
        self.index.remove(&entry.key);
        self.bytes = self.bytes.saturating_sub(entry.bytes.len() as u64);
        if let Some(moved) = self.entries.get(at) {
            self.index.insert(moved.key, at);
        }
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(layer: usize, offset: u64) -> ClusterKey {
        ClusterKey {
            layer,
            descriptor: CompressedDescriptor { offset, sectors: 1 },
        }
    }

    #[test]
    fn cache_stays_in_its_budget_and_replaced_memory_is_used_again() {
        let cache = DecompressedClusters::new(4 * 4096);
        let mut pointers = Vec::new();
        for number in 0..100_u64 {
            let bytes = cache.memory(4096);
            pointers.push(bytes.as_ptr());
            cache.insert(key(0, number << 12), bytes);
            assert!(cache.held_bytes() <= 4 * 4096);
        }
        pointers.sort();
        pointers.dedup();
        assert!(pointers.len() <= 5, "{}", pointers.len());
        assert!(cache.get(key(0, 99 << 12)).is_some());
        assert!(cache.get(key(0, 0)).is_none());
        assert!(cache.get(key(1, 99 << 12)).is_none());
    }

    #[test]
    fn clusters_that_are_read_outlast_those_that_are_not() {
        let cache = DecompressedClusters::new(4 * 4096);
        cache.insert(key(0, 0), vec![7; 4096]);
        for number in 1..100_u64 {
            assert_eq!(cache.get(key(0, 0)).expect("in use")[0], 7);
            cache.insert(key(0, number << 12), cache.memory(4096));
        }
    }

    #[test]
    fn freed_host_clusters_are_forgotten_in_the_layer_that_is_written() {
        let cache = DecompressedClusters::new(1 << 20);
        for offset in [0x1000, 0x1ff0, 0x2100, 0x3000] {
            cache.insert(key(0, offset), vec![0; 512]);
            cache.insert(key(1, offset), vec![0; 512]);
        }
        cache.forget(0, HostRange::new(0x2000, 0x1000));
        let left = |layer| {
            let offsets = [0x1000, 0x1ff0, 0x2100, 0x3000].into_iter();
            let left = offsets.filter(|offset| cache.contains(key(layer, *offset)));
            left.collect::<Vec<u64>>()
        };
        // The second begins in the cluster before and ends in the freed one.
        assert_eq!(left(0), [0x1000, 0x3000]);
        assert_eq!(left(1), [0x1000, 0x1ff0, 0x2100, 0x3000]);
        assert_eq!(cache.held_bytes(), 6 * 512);
    }

    #[test]
    fn clusters_that_were_not_read_since_the_last_cleaning_are_dropped() {
        let cache = DecompressedClusters::new(1 << 20);
        for offset in [0x1000, 0x2000] {
            cache.insert(key(0, offset), vec![0; 512]);
        }
        cache.clean();
        assert!(cache.get(key(0, 0x2000)).is_some());
        cache.clean();
        assert!(!cache.contains(key(0, 0x1000)) && cache.contains(key(0, 0x2000)));
        cache.clean();
        assert_eq!(cache.held_bytes(), 0);
    }

    #[test]
    fn a_budget_smaller_than_a_cluster_keeps_two() {
        let cache = DecompressedClusters::new(0);
        for number in 0..5_u64 {
            cache.insert(key(0, number << 16), cache.memory(65536));
        }
        assert_eq!(cache.held_bytes(), 2 * 65536);
        assert!(cache.contains(key(0, 4 << 16)));
    }

    #[test]
    fn a_reader_keeps_its_bytes_while_the_entry_goes() {
        let cache = DecompressedClusters::new(0);
        let held = cache.insert(key(0, 0), vec![9; 4096]);
        for number in 1..5_u64 {
            let mut bytes = cache.memory(4096);
            bytes.fill(1);
            cache.insert(key(0, number << 12), bytes);
        }
        assert!(held.iter().all(|byte| *byte == 9));
    }
}
