//! Cache of decompressed clusters, shared by the queues of an image.
//!
//! Without it every small read of a compressed cluster would decompress all of it again. An entry is found
//! by its layer and descriptor. The files below the top one do not change. In the top one the bytes at a
//! descriptor stay as they are while their host clusters are counted, so
//! [`DecompressedClusters::forget`] is called when counts have reached zero and before the clusters can be handed
//! out again. Nothing puts such an entry back: requests that may have seen the old mapping are over by
//! then (O3, `metadata/epochs.rs`), and no other mapping leads there.
//!
//! Bounded in bytes and in entries. A hit allocates nothing, and copies
//! outside of the lock; a miss takes the memory of what it replaces, unless a reader has that still.

use std::sync::Arc;

use gaur_format::CompressedDescriptor;

use crate::clock::Clock;
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
    clusters: Mutex<Clock<ClusterKey, Arc<Vec<u8>>>>,
    /// Clusters being decompressed, by the host offset of their bytes.
    pub(crate) loads: KeyLocks,
}

impl DecompressedClusters {
    pub(crate) fn new(budget_bytes: u64) -> DecompressedClusters {
        DecompressedClusters {
            budget_bytes,
            clusters: Mutex::default(),
            loads: KeyLocks::default(),
        }
    }

    /// The bytes of a cluster, if they are here.
    pub(crate) fn get(&self, key: ClusterKey) -> Option<Arc<Vec<u8>>> {
        self.clusters.lock().get(key).map(Arc::clone)
    }

    pub(crate) fn contains(&self, key: ClusterKey) -> bool {
        self.clusters.lock().contains(key)
    }

    /// Memory of `len_bytes` for a cluster about to be decompressed: that of an entry whose turn it is to go, if
    /// the cache is full. It holds whatever was there.
    pub(crate) fn memory(&self, len_bytes: usize) -> Vec<u8> {
        let evicted = self.make_room(&mut self.clusters.lock(), len_bytes);
        let mut bytes = evicted.unwrap_or_default();
        bytes.resize(len_bytes, 0);
        bytes
    }

    /// Adds a cluster, which may be here already.
    pub(crate) fn insert(&self, key: ClusterKey, bytes: Vec<u8>) -> Arc<Vec<u8>> {
        let bytes = Arc::new(bytes);
        let mut clusters = self.clusters.lock();
        if let Some(known) = clusters.get(key) {
            return Arc::clone(known);
        }
        self.make_room(&mut clusters, bytes.len());
        clusters.insert(key, Arc::clone(&bytes), bytes.len() as u64);
        bytes
    }

    /// Drops every cluster of `layer` whose compressed bytes lie in a host range.
    pub(crate) fn forget(&self, layer: usize, range: HostRange) {
        self.clusters.lock().remove_if(|key| {
            let packed = HostRange::new(key.descriptor.offset, key.descriptor.byte_len());
            key.layer == layer && packed.overlaps(range)
        });
    }

    /// Drops what was not read since the last call.
    pub(crate) fn clean(&self) {
        self.clusters.lock().clean();
    }

    /// Bytes of the clusters it has.
    #[cfg(test)]
    pub(crate) fn held_bytes(&self) -> u64 {
        self.clusters.lock().held_bytes()
    }

    /// Drops entries until one of `len_bytes` fits; the memory of one of them, if no reader has it.
    fn make_room(
        &self,
        clusters: &mut Clock<ClusterKey, Arc<Vec<u8>>>,
        len_bytes: usize,
    ) -> Option<Vec<u8>> {
        let mut memory = None;
        while clusters.len() >= ENTRIES_MIN
            && (clusters.len() >= ENTRIES_MAX
                || clusters.held_bytes().saturating_add(len_bytes as u64) > self.budget_bytes)
        {
            let Some(bytes) = clusters.evict() else { break };
            // That of a layer with larger clusters would be more than it is counted for.
            let own = Arc::try_unwrap(bytes).ok();
            memory = own.filter(|bytes| bytes.capacity() == len_bytes).or(memory);
        }
        memory
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
