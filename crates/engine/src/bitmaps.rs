//! Persistent bitmaps: which blocks of the disk were written since a moment that the user chose.
//!
//! An image that is open for writing has a list of them ([`BitmapList`]): the entries of the directory and the
//! entries of their tables. The bits of those that record are loaded with the first change of the disk and
//! marked by every request that changes something, before it does. A close writes them to new clusters and
//! switches the header to a new directory; so do the verbs that add, remove and change bitmaps.
//!
//! Crash rules. Tables, bits and directory lie in new clusters whose counts are durable before the header leads
//! to them (O1, O5). A bitmap that may miss a change is marked in use, durably, before that change (O8). What it
//! misses lies in the regions of the write-intent map ([`intent`]), durably, before they change (O9).

use std::sync::Arc;

use gaur_format::bitmap::{self, Bitmap, BitmapShape};
use gaur_format::{Geometry, HostOffset};

use crate::metadata::cluster_set::ClusterSet;
use crate::range::{ClusterRange, GuestRange, HostRange};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, RwLock};
use crate::waiters::AsyncLock;

mod bits;
mod change;
mod extension;
mod intent;
mod load;
mod lost;
mod store;
#[cfg(test)]
mod tests;

pub use bits::BitmapBits;
pub use change::{BitmapAction, BitmapSource};
use intent::IntentMap;
pub use load::BitmapFacts;
pub use lost::LostBitmaps;

/// Most bytes of bits that the bitmaps of an image may have together, when all that record are loaded.
const MEMORY_BYTES_MAX: u64 = 1 << 30;
/// Most entries that all their tables may have together; they are kept in memory.
const TABLE_ENTRIES_MAX: u64 = 1 << 24;

/// The bitmaps of an image that is open for writing.
#[derive(Debug, Default)]
pub(crate) struct Bitmaps {
    pub(crate) list: Mutex<BitmapList>,
    /// Held while bitmaps are loaded and marked in use.
    opening: AsyncLock,
    tracked: RwLock<Tracked>,
    is_tracking: AtomicBool,
    /// The disk was changed or is about to be: those that record are marked in use on the disk.
    in_use: AtomicBool,
}

/// What requests mark.
#[derive(Debug, Default)]
struct Tracked {
    bits: Vec<Arc<BitmapBits>>,
    map: Option<Arc<IntentMap>>,
}

impl Bitmaps {
    pub(crate) fn new(list: BitmapList) -> Bitmaps {
        Bitmaps {
            list: Mutex::new(list),
            ..Bitmaps::default()
        }
    }

    /// Whether the image has any, so that its autoclear bit has to stay.
    pub(crate) fn exist(&self) -> bool {
        !self.list.lock().all.is_empty()
    }

    /// Notes that a request changes this range of the disk; before it does. Answers with the map that has to
    /// have the range first, if it does not.
    #[inline]
    fn mark(&self, range: GuestRange) -> Option<Arc<IntentMap>> {
        if !self.is_tracking.load(Ordering::Acquire) {
            return None;
        }
        let tracked = self.tracked.read();
        for bits in &tracked.bits {
            bits.mark(range);
        }
        let map = tracked.map.as_ref();
        map.filter(|map| !map.has(range)).cloned()
    }

    /// The same for a range whose marks the map has.
    pub(crate) fn mark_known(&self, range: GuestRange) {
        self.mark(range);
    }

    /// Has requests mark what the list says. None is inside that changes something.
    fn track(&self, list: &BitmapList) {
        let records = |kept: &&KeptBitmap| kept.is_usable && kept.stored.has(bitmap::AUTO);
        let tracked = list.all.iter().filter(records);
        let tracked = Tracked {
            bits: tracked.filter_map(|kept| kept.bits.clone()).collect(),
            map: list.live.clone(),
        };
        let any = !tracked.bits.is_empty();
        *self.tracked.write() = tracked;
        self.is_tracking.store(any, Ordering::Release);
    }
}

/// What the directory says, and what is known of each bitmap.
#[derive(Clone, Debug, Default)]
pub(crate) struct BitmapList {
    pub(crate) all: Vec<KeptBitmap>,
    /// The write-intent map of the directory. It may be that of an earlier process.
    map: Option<KeptBitmap>,
    /// How many of the bitmaps are before it; it says nothing of those.
    map_at: usize,
    /// The map that requests of this process mark.
    live: Option<Arc<IntentMap>>,
    /// Where the directory is; empty if there are no bitmaps.
    pub(crate) place: HostRange,
}

/// A bitmap of an image that is open for writing.
#[derive(Clone, Debug)]
pub(crate) struct KeptBitmap {
    /// The entry of the directory.
    pub(crate) stored: Bitmap,
    /// Its bits mean something. Those of a bitmap that a process left in use do if the write-intent map says
    /// what they lack.
    is_usable: bool,
    /// Entries of its table; empty if they are damaged: what they refer to may have other owners.
    table: Arc<[u64]>,
    /// Its bits, once they are loaded.
    bits: Option<Arc<BitmapBits>>,
    /// The bits are not those that are stored.
    is_changed: bool,
}

impl KeptBitmap {
    /// The clusters that it refers to.
    fn clusters(&self, geometry: &Geometry) -> Vec<ClusterRange> {
        let mut clusters = Vec::new();
        if self.table.is_empty() {
            return clusters;
        }
        let len = self.table.len() as u64 * 8;
        let table = HostRange::new(self.stored.table_offset.0, len);
        clusters.push(table.clusters(geometry));
        for raw in self.table.iter() {
            if let Ok(bitmap::BitmapCluster::Stored(offset)) =
                bitmap::decode_table_entry(*raw, geometry)
            {
                ClusterRange::new(geometry.cluster_of(offset).0, 1).join(&mut clusters);
            }
        }
        clusters
    }

    fn shape(&self, size_bytes: u64, geometry: &Geometry) -> Option<BitmapShape> {
        BitmapShape::new(size_bytes, self.stored.granularity_bits, geometry).ok()
    }

    fn name(&self) -> String {
        String::from_utf8_lossy(&self.stored.name).into_owned()
    }
}

impl BitmapList {
    /// Adds the clusters of directory, tables and bits; whether none of them was there.
    pub(crate) fn add_clusters(&self, set: &mut ClusterSet, geometry: &Geometry) -> bool {
        let mut is_clean = self.place.is_empty() || set.insert(self.place.clusters(geometry));
        for kept in self.entries() {
            for clusters in kept.clusters(geometry) {
                is_clean &= set.insert(clusters);
            }
        }
        is_clean
    }

    /// The entries of the directory, in its order.
    fn entries(&self) -> impl Iterator<Item = &KeptBitmap> {
        let (before, behind) = self.all.split_at(self.map_at.min(self.all.len()));
        before.iter().chain(&self.map).chain(behind)
    }
}

/// No place yet.
const NOWHERE: HostOffset = HostOffset(0);
