//! Writing bitmaps: the flags before the first change of the disk, and everything at a close or when the list
//! changes.
//!
//! ```text
//! first change  load bits, write an empty write-intent map and a directory with flags set, pass, the header leads
//!               to it, FLUSH; only then change the disk. Without space for a map: flags in place, FLUSH
//! close, verbs  write bits and tables to new clusters, a new directory, pass (counts, guest data), FLUSH,
//!               the header leads to the new directory (one sector), FLUSH, count the old ones down
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;

use gaur_block::{Errno, File};
use gaur_format::bitmap::{self, BitmapCluster, BitmapShape};
use gaur_format::extension::BitmapsExtension;
use gaur_format::{HostOffset, limit};

use super::intent::{IntentMap, new_map};
use super::{BitmapList, KeptBitmap};
use crate::active::Active;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::range::{ClusterRange, GuestRange, HostRange};
use crate::sync::atomic::Ordering;
use crate::tables::Taken;

const DOING: &str = "cannot store the bitmaps";

/// Which bitmaps are loaded and marked in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loaded {
    /// Those that record.
    Enabled,
    /// All whose bits mean something.
    All,
}

impl Loaded {
    fn has(self, kept: &KeptBitmap) -> bool {
        kept.is_usable && (self == Loaded::All || kept.stored.has(bitmap::AUTO))
    }
}

impl<'q, F: File> Active<'q, F> {
    /// Whether the disk was changed, so that bitmaps that record are marked in use.
    pub(crate) fn is_recording(&self) -> bool {
        self.writer.bitmaps.in_use.load(Ordering::Acquire)
    }

    /// Before the first change of the disk: what [`Active::announce`] does, and from now on bitmaps record.
    pub(crate) async fn announce_change(&self) -> Result<(), Errno> {
        if self.is_recording() {
            return Ok(());
        }
        self.announce().await?;
        let _held = self.writer.bitmaps.opening.lock().await;
        if self.is_recording() {
            return Ok(());
        }
        // Once for each image: its memory is not every request's.
        Box::pin(self.open_bitmaps(Loaded::Enabled)).await?;
        self.writer.bitmaps.in_use.store(true, Ordering::Release);
        Ok(())
    }

    /// Loads bitmaps and marks them in use (O8), with a write-intent map if there is none yet.
    async fn open_bitmaps(&self, which: Loaded) -> Result<(), Errno> {
        let mut list = self.writer.bitmaps.list.lock().clone();
        let is_first = !list.all.iter().any(KeptBitmap::is_open);
        // Those that a process has left in use as well: its map goes.
        let opens = |kept: &KeptBitmap| {
            which.has(kept) || (kept.is_usable && kept.stored.has(bitmap::IN_USE))
        };
        for at in 0..list.all.len() {
            if opens(&list.all[at]) {
                let bits = self.queue.load_bits(&list, &list.all[at]).await;
                list.all[at].bits = Some(bits.map_err(|error| error.errno())?);
            }
        }
        #[cfg(feature = "broken-order")]
        let is_first = is_first && !self.image.breaks(crate::options::BrokenRule::O8);
        if is_first && list.all.iter().any(opens) {
            let job = Job::default();
            let replaced = self.replace_bitmaps(list.clone(), Some(which), &job);
            match (replaced.await, self.image.poisoned()) {
                (Ok(()), _) => {
                    let bitmaps = &self.writer.bitmaps;
                    bitmaps.track(&bitmaps.list.lock());
                    return Ok(());
                }
                (Err(_), Some(errno)) => return Err(errno),
                // There may be no space for a map. Then a crash makes the bitmaps useless.
                (Err(_), None) => list.live = None,
            }
        }
        self.set_flags(list, which).await
    }

    /// Marks bitmaps in use where the directory is.
    async fn set_flags(&self, mut list: BitmapList, which: Loaded) -> Result<(), Errno> {
        let bitmaps = &self.writer.bitmaps;
        let mut is_news = false;
        let opened = list.all.iter_mut();
        let opened = opened.filter(|kept| !kept.is_usable || which.has(kept));
        let unused_map = list.map.iter_mut().filter(|_| list.live.is_none());
        for kept in opened.chain(unused_map) {
            is_news |= !kept.stored.has(bitmap::IN_USE);
            kept.stored.flags |= bitmap::IN_USE;
        }
        #[cfg(feature = "broken-order")]
        let is_news = is_news && !self.image.breaks(crate::options::BrokenRule::O8);
        if is_news {
            let bytes = self.encode_directory(&list).map_err(|_| Errno::EIO)?;
            self.write_file(list.place.start, &bytes).await?;
            self.queue.barrier().await?;
        }
        bitmaps.track(&list);
        *bitmaps.list.lock() = list;
        Ok(())
    }

    /// Before the disk gets another size, or other contents: every bitmap has its bits in memory and is marked in
    /// use, because the tables on the disk will not fit, and the map has what will change. The lock on resizing is held.
    pub(crate) async fn announce_new_disk(
        &self,
        new_size_bytes: u64,
        changes: GuestRange,
    ) -> Result<(), Errno> {
        self.announce_change().await?;
        let bitmaps = &self.writer.bitmaps;
        let _held = bitmaps.opening.lock().await;
        self.open_bitmaps(Loaded::All).await?;
        let mut list = bitmaps.list.lock().clone();
        match list.live.clone() {
            None => Ok(()),
            Some(map) if map.fits(new_size_bytes) => self.store_marks(&map, changes).await,
            // It is made anew when the disk has its size.
            Some(_) => {
                list.live = None;
                self.set_flags(list, Loaded::All).await
            }
        }
    }

    /// Refuses a size that one of the bitmaps cannot have.
    pub(crate) fn check_bitmaps_fit(&self, size_bytes: u64) -> Result<(), ImageError> {
        let list = self.writer.bitmaps.list.lock();
        for kept in list.all.iter().filter(|kept| kept.is_usable) {
            if kept.shape(size_bytes, self.geometry()).is_none() {
                let name = kept.name();
                let text = format!(
                    "bitmap {name:?} would have more bits than are allowed; remove it first"
                );
                return Err(ImageError::new(ErrorKind::InvalidInput, text));
            }
        }
        Ok(())
    }

    /// All of the disk is another, of another size perhaps.
    pub(crate) async fn replace_disk_of_bitmaps(&self, old: u64, new: u64) {
        if old != new {
            let epochs = &self.writer.epochs;
            let _closed = epochs.gate.close(|| epochs.is_empty()).await;
            self.resize_bitmaps(old, new);
            self.writer.bitmaps.mark_known(GuestRange::new(0, new));
            self.renew_intent_map().await;
        }
        self.writer.bitmaps.mark_known(GuestRange::new(0, new));
    }

    /// The disk has another size. What it has gained counts as changed: it may have had other contents before.
    /// No request is inside.
    pub(crate) fn resize_bitmaps(&self, old: u64, new: u64) {
        let bitmaps = &self.writer.bitmaps;
        let mut list = bitmaps.list.lock();
        for kept in &mut list.all {
            let shape = kept.shape(new, self.geometry());
            let (Some(bits), Some(shape)) = (&kept.bits, shape) else {
                continue;
            };
            let resized = bits.copy_to(shape);
            if new > old && kept.stored.has(bitmap::AUTO) {
                resized.mark(GuestRange::between(old, new));
            }
            kept.set_bits(resized);
        }
        bitmaps.track(&list);
    }

    /// After the disk has got another size: bitmaps in use have a map again, if that is possible. No request is
    /// inside.
    pub(crate) async fn renew_intent_map(&self) {
        let list = self.writer.bitmaps.list.lock().clone();
        if list.live.is_none() && list.all.iter().any(KeptBitmap::is_open) {
            let open = Some(Loaded::Enabled);
            // Without one a crash makes them useless.
            let _ = Box::pin(self.replace_bitmaps(list, open, &Job::default())).await;
        }
    }

    /// At a close: bitmaps that were marked in use get their bits, and are in use no more.
    pub(crate) async fn store_bitmaps(&self) -> Result<(), ImageError> {
        if !self.is_recording() {
            return Ok(());
        }
        let _held = self.writer.resizing.lock().await;
        let list = self.writer.bitmaps.list.lock().clone();
        match list.all.iter().any(KeptBitmap::is_open) {
            true => self.replace_bitmaps(list, None, &Job::default()).await,
            false => Ok(()),
        }
    }

    /// Puts another list in place of the present one. What has changed is written. Those that `open` says stay in use,
    /// with a new write-intent map, or come to be so. If it fails nothing has changed. No request is inside that changes
    /// anything that bitmaps record.
    pub(super) async fn replace_bitmaps(
        &self,
        mut list: BitmapList,
        open: Option<Loaded>,
        job: &Job,
    ) -> Result<(), ImageError> {
        let fail = |errno| self.image.explain(errno, DOING);
        let mut taken = Vec::new();
        for at in 0..list.all.len() {
            let kept = &list.all[at];
            if kept.is_usable && kept.stored.has(bitmap::IN_USE) {
                // What is stored lacks changes, and the map that has them goes.
                let bits = self.queue.load_bits(&list, kept).await?;
                (list.all[at].bits, list.all[at].is_changed) = (Some(bits), true);
            }
        }
        (list.map, list.live) = (None, None);
        for kept in &mut list.all {
            if kept.is_changed {
                let stored = self.store_bitmap(kept, &mut taken, job).await;
                stored.map_err(fail)?;
            }
            let is_open = open.is_some_and(|open| open.has(kept)) && kept.bits.is_some();
            if is_open || kept.is_usable {
                kept.stored.flags &= !bitmap::IN_USE;
                kept.stored.flags |= if is_open { bitmap::IN_USE } else { 0 };
            } else if open.is_some() {
                kept.stored.flags |= bitmap::IN_USE;
            }
        }
        if list.all.iter().any(KeptBitmap::is_open) {
            let made = self.make_intent_map(&mut list, &mut taken, job).await;
            made.map_err(fail)?;
        }
        let pointer = self.store_directory(&mut list, &mut taken).await?;
        #[cfg(feature = "broken-order")]
        let is_durable = !self.image.breaks(crate::options::BrokenRule::O5);
        #[cfg(not(feature = "broken-order"))]
        let is_durable = true;
        if is_durable {
            self.flush_all().await.map_err(fail)?;
        }
        self.publish_bitmaps(pointer).await?;
        taken.into_iter().for_each(Taken::keep);
        self.bitmaps_are_replaced(list);
        Ok(())
    }

    /// Gives the list a write-intent map without marks, which vouches for the bitmaps in use that can be.
    async fn make_intent_map(
        &self,
        list: &mut BitmapList,
        taken: &mut Vec<Taken<'q>>,
        job: &Job,
    ) -> Result<(), Errno> {
        let shape = BitmapShape::of_write_intent_map(self.image.size_bytes(), self.geometry());
        let shape = shape.map_err(|_| Errno::EFBIG)?;
        let mut map = new_map(shape);
        self.store_bitmap(&mut map, taken, job).await?;
        list.all.sort_by_key(|kept| kept.is_usable);
        list.map_at = list.all.iter().filter(|kept| !kept.is_usable).count();
        list.live = Some(Arc::new(IntentMap::new(shape, &map.table)));
        list.map = Some(map);
        Ok(())
    }

    /// Writes bits and table of a bitmap to new clusters.
    async fn store_bitmap(
        &self,
        kept: &mut KeptBitmap,
        taken: &mut Vec<Taken<'q>>,
        job: &Job,
    ) -> Result<(), Errno> {
        let Some(bits) = kept.bits.clone() else {
            return Ok(());
        };
        let geometry = self.geometry();
        let size = geometry.cluster_size();
        let mut buffer = self.queue.pool.take(self.queue.top_file(), size as usize);
        let mut table = vec![0; bits.shape().table_entries() as usize];
        job.expect(table.len() as u64 * size);
        for (index, entry) in (0..).zip(&mut table) {
            let is_map = kept.stored.is_write_intent_map();
            if is_map {
                // It has no bits yet; they are set in place.
                buffer.fill(0);
            }
            if bits.store_piece(index, &mut buffer) || is_map {
                let run = self.take_clusters(1).await?;
                taken.push(self.taken(run.range()));
                let at = run.range().bytes(geometry).start;
                self.write_file(at, &buffer).await?;
                *entry = bitmap::encode_table_entry(BitmapCluster::Stored(HostOffset(at)));
            }
            job.step(size)?;
        }
        let clusters = geometry.clusters_for(table.len() as u64 * 8);
        let area = self.take_area(clusters, job).await?;
        let place = area.clusters.bytes(geometry);
        taken.push(area);
        self.write_table(&table, place).await?;
        kept.stored.table_offset = HostOffset(place.start);
        kept.stored.table_entries = bits.shape().table_entries();
        kept.table = table.into();
        kept.is_changed = false;
        Ok(())
    }

    /// Writes the directory to new clusters; the pointer to it.
    async fn store_directory(
        &self,
        list: &mut BitmapList,
        taken: &mut Vec<Taken<'q>>,
    ) -> Result<Option<BitmapsExtension>, ImageError> {
        let fail = |errno| self.image.explain(errno, DOING);
        list.place = HostRange::default();
        if list.all.is_empty() {
            return Ok(None);
        }
        let geometry = self.geometry();
        let mut bytes = self.encode_directory(list)?;
        let len = bytes.len() as u64;
        let clusters = geometry.clusters_for(len);
        let area = self.take_area(clusters, &Job::default()).await;
        let area = area.map_err(fail)?;
        let place = area.clusters.bytes(geometry);
        taken.push(area);
        bytes.resize(place.len as usize, 0);
        self.write_file(place.start, &bytes).await.map_err(fail)?;
        list.place = place.first(len);
        debug_assert!(
            len <= limit::BITMAP_DIRECTORY_BYTES_MAX,
            "checked by the encoder"
        );
        Ok(Some(BitmapsExtension {
            count: list.entries().count() as u32,
            directory_len_bytes: len,
            directory_offset: HostOffset(place.start),
        }))
    }

    fn encode_directory(&self, list: &BitmapList) -> Result<Vec<u8>, ImageError> {
        let entries: Vec<_> = list.entries().map(|kept| kept.stored.clone()).collect();
        bitmap::encode_directory(&entries, self.geometry()).map_err(ImageError::format)
    }

    /// The header leads to the new list, durably: what only the old one refers to is free.
    fn bitmaps_are_replaced(&self, list: BitmapList) {
        let (bitmaps, geometry) = (&self.writer.bitmaps, self.geometry());
        let mut present = bitmaps.list.lock();
        let tables = |list: &BitmapList| -> BTreeSet<HostOffset> {
            list.entries()
                .map(|kept| kept.stored.table_offset)
                .collect()
        };
        let only = |list: &BitmapList, other: &BTreeSet<HostOffset>| -> Vec<ClusterRange> {
            let gone = |kept: &&KeptBitmap| !other.contains(&kept.stored.table_offset);
            let tables = list.entries().filter(gone);
            let directory = list.place.clusters(geometry);
            tables
                .flat_map(|kept| kept.clusters(geometry))
                .chain((!list.place.is_empty()).then_some(directory))
                .collect()
        };
        let (added, removed) = (
            only(&list, &tables(&present)),
            only(&present, &tables(&list)),
        );
        let metadata = &self.qcow2.maps.metadata;
        added
            .into_iter()
            .for_each(|clusters| metadata.insert(clusters));
        for clusters in &removed {
            metadata.remove(*clusters);
        }
        self.writer.alloc.lock().releasable.extend(removed);
        if self.is_recording() {
            bitmaps.track(&list);
        }
        *present = list;
    }
}

impl KeptBitmap {
    /// Whether we have marked it in use.
    fn is_open(&self) -> bool {
        self.is_usable && self.stored.has(bitmap::IN_USE) && self.bits.is_some()
    }
}
