//! The write-intent map: the regions of the disk that may have changed since the bitmaps in use were stored. After a crash a
//! bitmap is what was stored and these regions.
//!
//! On the disk it is a bitmap of the directory like any other, with large blocks and not in use. So a program that
//! keeps bitmaps keeps it, or marks it in use, or clears the autoclear bit: each tells what was written since.
//!
//! Crash rule: the mark of a region is durable before the region changes (O9). Requests that wait for marks share a
//! flush, and a sequential writer marks twice as far ahead each time.

use std::sync::Arc;

use gaur_block::{Errno, File};
use gaur_format::HostOffset;
use gaur_format::bitmap::{self, Bitmap, BitmapShape};

use super::{BitmapBits, KeptBitmap, NOWHERE};
use crate::active::Active;
use crate::metadata::l1_table::SECTOR_BYTES;
use crate::range::GuestRange;
use crate::waiters::AsyncLock;

/// Most regions that are marked ahead of a sequential writer.
const AHEAD_MAX: u64 = 64;

/// The map of an image whose bitmaps are in use.
#[derive(Debug)]
pub(crate) struct IntentMap {
    /// Regions that are to be marked.
    wanted: BitmapBits,
    /// Regions whose marks are durable.
    durable: BitmapBits,
    /// Where the bits are, by entry of the table.
    clusters: Vec<HostOffset>,
    /// Held while marks are written.
    marking: AsyncLock,
}

impl IntentMap {
    /// The map as it was written, without marks.
    pub(super) fn new(shape: BitmapShape, table: &[u64]) -> IntentMap {
        // A disk that grows may need the bits behind its end.
        let shape = shape.with_all_bits();
        let clusters = table.iter().map(|raw| HostOffset(*raw));
        IntentMap {
            wanted: BitmapBits::new(shape),
            durable: BitmapBits::new(shape),
            clusters: clusters.collect(),
            marking: AsyncLock::default(),
        }
    }

    /// Whether the disk may change there.
    pub(super) fn has(&self, range: GuestRange) -> bool {
        self.durable.has(range)
    }

    /// Whether its table is one for a disk of this size.
    pub(super) fn fits(&self, size_bytes: u64) -> bool {
        let size_bytes = size_bytes.max(1);
        let shape = self.wanted.shape();
        let bytes_per_cluster = shape.bits_per_cluster() << shape.granularity_bits();
        size_bytes.div_ceil(bytes_per_cluster) == self.clusters.len() as u64
    }

    /// Asks for the marks of a range, and for as many regions behind it as are marked right before it.
    fn want(&self, range: GuestRange, size_bytes: u64) {
        let region = 1_u64 << self.wanted.shape().granularity_bits();
        let first = range.start / region;
        let is_marked = |before: &u64| {
            *before <= first
                && self
                    .durable
                    .has(GuestRange::new((first - before) * region, 1))
        };
        let ahead = (1..=AHEAD_MAX).take_while(is_marked).count() as u64 * region;
        let end = range.end().saturating_add(ahead).min(size_bytes);
        self.wanted
            .mark(GuestRange::between(range.start, end.max(range.end())));
    }
}

/// The entry of a directory for a map of this shape.
pub(super) fn new_map(shape: BitmapShape) -> KeptBitmap {
    KeptBitmap {
        stored: Bitmap {
            table_offset: NOWHERE,
            table_entries: shape.table_entries(),
            flags: bitmap::AUTO,
            granularity_bits: shape.granularity_bits(),
            name: bitmap::WRITE_INTENT_MAP.to_vec(),
            extra: Vec::new(),
        },
        is_usable: true,
        table: Arc::default(),
        bits: Some(Arc::new(BitmapBits::new(shape))),
        is_changed: true,
    }
}

impl<F: File> Active<'_, F> {
    /// Before a request changes this range of the disk: bitmaps have it, and so has the map on the disk.
    #[inline]
    pub(crate) async fn mark_change(&self, range: GuestRange) -> Result<(), Errno> {
        match self.writer.bitmaps.mark(range) {
            None => Ok(()),
            // Once for each region: its memory is not every request's.
            Some(map) => Box::pin(self.store_marks(&map, range)).await,
        }
    }

    /// Makes the marks of a range durable.
    pub(super) async fn store_marks(
        &self,
        map: &IntentMap,
        range: GuestRange,
    ) -> Result<(), Errno> {
        map.want(range, self.image.size_bytes());
        let _held = map.marking.lock().await;
        // Another request has written what this one asked for.
        if map.has(range) {
            return Ok(());
        }
        let (file, size) = (self.queue.top_file(), self.geometry().cluster_size());
        let mut wanted = self.queue.pool.take(file, size as usize);
        let mut durable = self.queue.pool.take(file, size as usize);
        for (index, at) in (0..).zip(&map.clusters) {
            if !map.wanted.store_piece(index, &mut wanted) {
                continue;
            }
            durable.fill(0);
            map.durable.store_piece(index, &mut durable);
            if wanted[..] == durable[..] {
                continue;
            }
            self.write_changed(*at, &wanted, &durable).await?;
            self.marks_are_written().await?;
            map.durable.load_piece(index, &wanted);
        }
        Ok(())
    }

    /// Writes the sectors of `new` that differ from those of `old`.
    async fn write_changed(&self, at: HostOffset, new: &[u8], old: &[u8]) -> Result<(), Errno> {
        const SECTOR: usize = SECTOR_BYTES as usize;
        let sectors = new.chunks(SECTOR).zip(old.chunks(SECTOR));
        for (offset, (new, old)) in (at.0..).step_by(SECTOR).zip(sectors) {
            if new != old {
                self.write_file(offset, new).await?;
            }
        }
        Ok(())
    }

    async fn marks_are_written(&self) -> Result<(), Errno> {
        #[cfg(feature = "broken-order")]
        if self.image.breaks(crate::options::BrokenRule::O9) {
            return Ok(());
        }
        self.queue.metadata_barrier().await
    }
}
