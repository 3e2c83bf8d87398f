//! Reading bitmaps: the directory and the tables when an image is opened for writing, bits when they are
//! needed.
//!
//! All of it is hostile. A bitmap whose table does not fit the disk, or that has data of a kind this engine
//! does not know, is as useless as one that a process left in use: it is kept, shown, and never believed.

use std::sync::Arc;

use gaur_block::File;
use gaur_format::bitmap::{self, Bitmap, BitmapCluster};
use gaur_format::header::Header;

use super::{BitmapBits, BitmapList, KeptBitmap, MEMORY_BYTES_MAX, NOWHERE, TABLE_ENTRIES_MAX};
use crate::error::{ErrorKind, ImageError};
use crate::image::Image;
use crate::layer::LayerReader;
use crate::queue::Queue;
use crate::range::HostRange;

/// Bytes of a table read at once.
const PIECE_BYTES: u64 = 1 << 20;

/// What a list of bitmaps shows of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapFacts {
    /// Its name; bytes that are not UTF-8 as U+FFFD.
    pub name: String,
    /// Bytes of the disk that one bit stands for.
    pub granularity_bytes: u64,
    /// It records what is written.
    pub is_enabled: bool,
    /// A process that wrote to the image left it in use, or it is damaged: its bits mean nothing.
    pub is_inconsistent: bool,
}

impl KeptBitmap {
    fn facts(&self) -> BitmapFacts {
        BitmapFacts {
            name: self.name(),
            granularity_bytes: 1 << self.stored.granularity_bits,
            is_enabled: self.stored.has(bitmap::AUTO),
            is_inconsistent: !self.is_usable,
        }
    }
}

impl Image {
    /// The bits of a bitmap as they are in memory, if they are there: because it records, or because they have changed.
    pub fn bitmap_bits_in_memory(&self, name: &str) -> Option<Arc<BitmapBits>> {
        let list = self.writer.as_ref()?.bitmaps.list.lock();
        list.all.get(list.find(name).ok()?)?.bits.clone()
    }
}

impl<F: File> Queue<F> {
    /// The persistent bitmaps of the image, in the order of its directory.
    pub async fn bitmaps(&self) -> Result<Vec<BitmapFacts>, ImageError> {
        let list = self.bitmap_list().await?;
        Ok(list.all.iter().map(KeptBitmap::facts).collect())
    }

    /// The bits of the bitmap with this name as they are now.
    pub async fn bitmap_bits(&self, name: &str) -> Result<Arc<BitmapBits>, ImageError> {
        let list = self.bitmap_list().await?;
        self.load_bits(&list, list.usable(name)?).await
    }

    async fn bitmap_list(&self) -> Result<BitmapList, ImageError> {
        if let Some(writer) = &self.image.writer {
            return Ok(writer.bitmaps.list.lock().clone());
        }
        let header = self.image.top.header();
        match header {
            None => Ok(BitmapList::default()),
            Some(header) => {
                let reader = LayerReader::new(self.top_file()).await?;
                reader.kept_bitmaps(header).await
            }
        }
    }

    /// The bits of a bitmap of the list that can be used, from memory if they are there. One that a process has left
    /// in use has the regions of the map besides, if it recorded.
    pub(super) async fn load_bits(
        &self,
        list: &BitmapList,
        kept: &KeptBitmap,
    ) -> Result<Arc<BitmapBits>, ImageError> {
        if let Some(bits) = &kept.bits {
            return Ok(Arc::clone(bits));
        }
        let bits = self.stored_bits(kept).await?;
        if kept.stored.has(bitmap::IN_USE)
            && kept.stored.has(bitmap::AUTO)
            && let Some(map) = &list.map
        {
            bits.merge(&self.stored_bits(map).await?);
        }
        Ok(Arc::new(bits))
    }

    async fn stored_bits(&self, kept: &KeptBitmap) -> Result<BitmapBits, ImageError> {
        let header = self.image.top.header();
        let geometry = header.map(Header::geometry);
        let shape = geometry.and_then(|all| kept.shape(self.image.size_bytes(), &all));
        let (Some(geometry), Some(shape)) = (geometry, shape) else {
            return Err(ImageError::new(ErrorKind::Corrupt, unfit(kept)));
        };
        let reader = LayerReader::new(self.top_file()).await?;
        let bits = BitmapBits::new(shape);
        for (index, raw) in (0..).zip(kept.table.iter()) {
            let cluster = bitmap::decode_table_entry(*raw, &geometry);
            match cluster.map_err(|what| ImageError::corrupt(what, "table of a bitmap"))? {
                BitmapCluster::Zeros => {}
                BitmapCluster::Ones => bits.fill_piece(index),
                BitmapCluster::Stored(offset) => {
                    let len = geometry.cluster_size();
                    let bytes = reader.bytes("bits of a bitmap", offset.0, len).await?;
                    bits.load_piece(index, &bytes);
                }
            }
        }
        Ok(bits)
    }
}

fn unfit(kept: &KeptBitmap) -> String {
    format!("bitmap {:?} does not fit the disk", kept.name())
}

impl BitmapList {
    pub(super) fn find(&self, name: &str) -> Result<usize, ImageError> {
        let mut names = self.all.iter().map(|kept| &kept.stored.name);
        names.position(|own| own == name.as_bytes()).ok_or_else(|| {
            let text = format!("the image has no bitmap named {name:?}");
            ImageError::new(ErrorKind::NotFound, text)
        })
    }

    /// The bitmap with this name, if its bits mean something.
    pub(super) fn usable(&self, name: &str) -> Result<&KeptBitmap, ImageError> {
        let kept = &self.all[self.find(name)?];
        if kept.is_usable {
            return Ok(kept);
        }
        let text = format!(
            "bitmap {name:?} is inconsistent: a program that wrote to the image did not close it; \
             it can only be removed"
        );
        Err(ImageError::new(ErrorKind::Corrupt, text))
    }
}

impl<F: File> LayerReader<'_, F> {
    /// The bitmaps of the image, with their tables.
    ///
    /// # Errors
    /// [`HasBitmaps`](ErrorKind::HasBitmaps) when they need more memory than they may have.
    pub(crate) async fn kept_bitmaps(&self, header: &Header) -> Result<BitmapList, ImageError> {
        let Some(pointer) = header.bitmaps() else {
            return Ok(BitmapList::default());
        };
        let mut directory = self.bitmap_directory(header, pointer).await?;
        let mut list = BitmapList {
            all: Vec::with_capacity(directory.len()),
            place: HostRange::new(pointer.directory_offset.0, pointer.directory_len_bytes),
            ..BitmapList::default()
        };
        let (mut entries, mut bytes) = (0_u64, 0_u64);
        let mut vouched = usize::MAX;
        if let Some((at, map)) = bitmap::take_write_intent_map(&mut directory) {
            let is_kept = map.is_kept();
            let mut map = self.kept_bitmap(header, map, (entries, false)).await?;
            map.is_usable &= is_kept;
            entries += map.table.len() as u64;
            vouched = if map.is_usable { at } else { vouched };
            (list.map, list.map_at) = (Some(map), at);
        }
        for (number, stored) in directory.into_iter().enumerate() {
            let place = (entries, number >= vouched);
            let kept = self.kept_bitmap(header, stored, place).await?;
            entries += kept.table.len() as u64;
            if kept.is_usable {
                bytes += kept.table.len() as u64 * header.geometry().cluster_size();
            }
            if bytes > MEMORY_BYTES_MAX {
                let text = format!(
                    "the persistent bitmaps of the image may need more than {} MiB of memory",
                    MEMORY_BYTES_MAX >> 20
                );
                return Err(ImageError::new(ErrorKind::HasBitmaps, text));
            }
            list.all.push(kept);
        }
        Ok(list)
    }

    /// A bitmap, when the tables of those before it have so many entries. A write-intent map may vouch for it.
    async fn kept_bitmap(
        &self,
        header: &Header,
        stored: Bitmap,
        (entries, is_vouched): (u64, bool),
    ) -> Result<KeptBitmap, ImageError> {
        let geometry = header.geometry();
        let is_known = stored.extra.is_empty() || stored.has(bitmap::EXTRA_DATA_COMPATIBLE);
        let mut kept = KeptBitmap {
            is_usable: (!stored.has(bitmap::IN_USE) || is_vouched) && is_known,
            stored,
            table: Arc::default(),
            bits: None,
            is_changed: false,
        };
        let shape = kept.shape(header.size_bytes, &geometry);
        // The size of the disk may have changed while it was in use: the map has what was added.
        let any_size = is_vouched && kept.stored.has(bitmap::IN_USE);
        let fits = shape
            .is_some_and(|shape| any_size || shape.table_entries() == kept.stored.table_entries);
        kept.is_usable &= fits;
        let wanted = u64::from(kept.stored.table_entries);
        if entries + wanted > TABLE_ENTRIES_MAX {
            if kept.is_usable {
                let text = "the tables of its persistent bitmaps are too long";
                return Err(ImageError::new(ErrorKind::HasBitmaps, text));
            }
            return Ok(kept);
        }
        match self.bitmap_table(&kept.stored).await {
            Ok(table) => {
                let is_sound = |raw: &u64| match bitmap::decode_table_entry(*raw, &geometry) {
                    Ok(BitmapCluster::Stored(at)) => self.has_cluster(at.0, &geometry),
                    other => other.is_ok(),
                };
                match table.iter().all(is_sound) {
                    true => kept.table = table.into(),
                    false => kept.is_usable = false,
                }
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => kept.is_usable = false,
            Err(error) => return Err(error),
        }
        debug_assert!(kept.stored.table_offset != NOWHERE, "checked by the parser");
        Ok(kept)
    }

    async fn bitmap_table(&self, stored: &Bitmap) -> Result<Vec<u64>, ImageError> {
        let len = u64::from(stored.table_entries) * 8;
        let mut table = Vec::new();
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(PIECE_BYTES);
            let at = stored.table_offset.0 + done;
            let bytes = self.bytes("table of a bitmap", at, piece).await?;
            table.extend(
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|raw| u64::from_be_bytes(*raw)),
            );
            done += piece;
        }
        Ok(table)
    }
}
