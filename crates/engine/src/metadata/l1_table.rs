//! The L1 table in memory.
//!
//! Entries are read on every lookup, by all threads and without a lock, so they stay where they are
//! in memory: the table grows by segments, each twice as long as the one before. A thread that changes
//! entries holds the engine's lock on tables.

use gaur_format::l1::{self, L1Ref};
use gaur_format::limit;

use crate::metadata::tracker::Tracker;
use crate::range::HostRange;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, OnceLock};

/// Bytes of a disk sector: the unit in which the L1 table is written back, and in which a write is
/// atomic.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// Entries of the first segment. In a model every entry costs time.
const SEGMENT_ENTRIES: u64 = if cfg!(loom) { 2 } else { 512 };
const SEGMENTS: usize = 14;

const _: () = assert!(
    cfg!(loom) || (SEGMENT_ENTRIES << SEGMENTS) - SEGMENT_ENTRIES >= limit::L1_BYTES_MAX / 8,
    "the longest table fits"
);

/// The table, and which of its sectors the disk does not have yet.
#[derive(Debug)]
pub(crate) struct L1Table {
    offset: AtomicU64,
    len: AtomicU64,
    segments: [OnceLock<Box<[AtomicU64]>>; SEGMENTS],
    dirty_sectors: Mutex<Vec<u64>>,
    /// Who wants to know what changes in the active mapping.
    pub(crate) tracker: Tracker,
}

impl L1Table {
    /// A table as read from disk.
    pub(crate) fn new(offset: u64, entries: &[u64]) -> L1Table {
        let table = L1Table {
            offset: AtomicU64::new(offset),
            len: AtomicU64::new(0),
            segments: Default::default(),
            dirty_sectors: Mutex::default(),
            tracker: Tracker::default(),
        };
        table.grow(offset, entries.len() as u64);
        for (index, entry) in (0..).zip(entries) {
            if let Some(slot) = table.slot(index) {
                slot.store(*entry, Ordering::Relaxed);
            }
        }
        table
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Where it is in the image file.
    pub(crate) fn offset(&self) -> u64 {
        self.offset.load(Ordering::Acquire)
    }

    /// Its bytes in the image file.
    pub(crate) fn range(&self) -> HostRange {
        HostRange::new(self.offset(), self.len() * 8)
    }

    /// Entry `index` as on disk; 0 beyond the end.
    #[inline]
    pub(crate) fn get(&self, index: u64) -> u64 {
        self.slot(index)
            .map_or(0, |slot| slot.load(Ordering::Acquire))
    }

    /// A copy of all entries.
    pub(crate) fn entries(&self) -> Vec<u64> {
        (0..self.len()).map(|index| self.get(index)).collect()
    }

    #[inline]
    fn slot(&self, index: u64) -> Option<&AtomicU64> {
        let (segment, at) = place(index);
        self.segments.get(segment)?.get()?.get(at)
    }

    /// The table is at `offset` from now on and has `len` entries, at least as many as before.
    pub(crate) fn grow(&self, offset: u64, len: u64) {
        if len > 0 {
            let (last, _) = place(len - 1);
            for (number, segment) in self.segments.iter().enumerate().take(last + 1) {
                let entries = SEGMENT_ENTRIES << number;
                segment.get_or_init(|| (0..entries).map(|_| AtomicU64::new(0)).collect());
            }
        }
        self.offset.store(offset, Ordering::Release);
        self.len.store(len, Ordering::Release);
    }

    /// The table is at `offset` from now on and holds `entries`, all of which the disk has.
    pub(crate) fn replace(&self, offset: u64, entries: &[u64]) {
        let old = self.len();
        self.dirty_sectors.lock().clear();
        self.grow(offset, entries.len() as u64);
        let entries = entries.iter().copied().chain(std::iter::repeat(0));
        for (index, entry) in (0..old.max(self.len())).zip(entries) {
            if let Some(slot) = self.slot(index) {
                slot.store(entry, Ordering::Release);
            }
        }
    }

    /// Changes one entry; its sector is dirty from now on.
    pub(crate) fn set(&self, index: u64, entry: Option<L1Ref>) {
        let mut dirty = self.dirty_sectors.lock();
        if let Some(slot) = self.slot(index) {
            slot.store(l1::encode(entry), Ordering::Release);
            let sector = index * 8 / SECTOR_BYTES;
            if !dirty.contains(&sector) {
                dirty.push(sector);
            }
        }
        self.tracker.table(index);
    }

    /// Whether the disk has the whole table.
    pub(crate) fn is_clean(&self) -> bool {
        self.dirty_sectors.lock().is_empty()
    }

    /// Hands every dirty sector to `stage` with its host offset.
    pub(crate) fn stage_dirty(&self, mut stage: impl FnMut(u64, &[u8])) {
        let mut dirty = self.dirty_sectors.lock();
        dirty.sort_unstable();
        for sector in dirty.drain(..) {
            let mut bytes = [0; SECTOR_BYTES as usize];
            let first = sector * SECTOR_BYTES / 8;
            for (index, out) in (first..self.len()).zip(bytes.chunks_exact_mut(8)) {
                out.copy_from_slice(&self.get(index).to_be_bytes());
            }
            stage(self.offset() + sector * SECTOR_BYTES, &bytes);
        }
    }
}

/// The segment of an entry, and where it is in it.
#[inline]
fn place(index: u64) -> (usize, usize) {
    let shifted = index.saturating_add(SEGMENT_ENTRIES);
    let segment = shifted.ilog2() - SEGMENT_ENTRIES.ilog2();
    let start = SEGMENT_ENTRIES << segment.min(SEGMENTS as u32);
    (segment as usize, (shifted - start) as usize)
}

#[cfg(test)]
mod tests {
    use gaur_format::addr::HostOffset;

    use super::*;

    #[test]
    fn entries_stay_when_the_table_grows() {
        let entries: Vec<u64> = (0..600).map(|index| index << 16).collect();
        let table = L1Table::new(1 << 20, &entries);
        assert_eq!(table.entries(), entries);
        assert_eq!((table.get(600), table.get(u64::MAX)), (0, 0));
        table.grow(2 << 20, 5000);
        assert_eq!((table.len(), table.offset()), (5000, 2 << 20));
        assert_eq!(table.entries()[..600], entries);
        assert!(table.entries()[600..].iter().all(|entry| *entry == 0));
        let own = L1Ref {
            offset: HostOffset(7 << 16),
            copied: true,
        };
        table.set(4999, Some(own));
        let mut staged = Vec::new();
        table.stage_dirty(|offset, bytes| staged.push((offset, bytes.to_vec())));
        assert_eq!(staged.len(), 1);
        let (offset, bytes) = &staged[0];
        assert_eq!(*offset, (2 << 20) + 4999 * 8 / 512 * 512);
        let within = 4999 * 8 % 512;
        assert_eq!(
            bytes[within..within + 8],
            l1::encode(Some(own)).to_be_bytes()
        );
        assert!(table.is_clean());
    }

    #[test]
    fn the_longest_table_fits() {
        let (segment, at) = place(limit::L1_BYTES_MAX / 8 - 1);
        assert!(segment < SEGMENTS && at < (SEGMENT_ENTRIES << segment) as usize);
        assert_eq!(place(511), (0, 511));
        assert_eq!(place(512), (1, 0));
    }
}

#[cfg(all(test, loom))]
mod loom_model;
