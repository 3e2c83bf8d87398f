//! Adding, removing and changing bitmaps: all that one call asks for happens, or nothing.

use std::sync::Arc;

use gaur_block::File;
use gaur_format::bitmap::{self, Bitmap, BitmapShape};
use gaur_format::geometry::Version;
use gaur_format::limit;

use super::store::Loaded;
use super::{BitmapBits, BitmapList, KeptBitmap, MEMORY_BYTES_MAX, NOWHERE};
use crate::active::Active;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::queue::Queue;

/// What is done to a bitmap.
#[derive(Clone, Debug)]
pub enum BitmapAction {
    /// Make it; it records from now on.
    Add {
        /// Bytes of the disk for each bit, a power of two; `None` is a cluster, but 4 to 64 KiB.
        granularity_bytes: Option<u64>,
    },
    /// Remove it. The only one for bitmaps that are inconsistent.
    Remove,
    /// Set all bits to zero.
    Clear,
    /// Record from now on.
    Enable,
    /// Do not record any more.
    Disable,
    /// Set the bits that another has, too.
    Merge(BitmapSource),
}

/// The bitmap that is merged into another.
#[derive(Clone, Debug)]
pub enum BitmapSource {
    /// One of the same image.
    Named(String),
    /// One of another image, whose disk has the same size ([`Queue::bitmap_bits`]).
    Bits(Arc<BitmapBits>),
}

const DOING: &str = "cannot change the bitmaps";

impl<F: File> Queue<F> {
    /// Does these things to the bitmap called `name`, one after another, and makes them durable. Requests of
    /// all queues wait meanwhile. If it fails, or is cancelled, nothing has changed.
    pub async fn change_bitmap(
        &self,
        name: &str,
        actions: &[BitmapAction],
        job: &Job,
    ) -> Result<(), ImageError> {
        if self.image.read_only {
            let text = "the image is open read-only";
            return Err(ImageError::new(ErrorKind::ReadOnly, text));
        }
        if let Some(errno) = self.image.poisoned() {
            let text = "an earlier failure left the image unwritable";
            return Err(self.image.explain(errno, text));
        }
        let active = self.active().ok_or_else(|| {
            let text = "a raw image has no bitmaps; convert it to qcow2";
            ImageError::new(ErrorKind::Unsupported, text)
        })?;
        active.change_bitmap(name, actions, job).await
    }
}

impl<F: File> Active<'_, F> {
    async fn change_bitmap(
        &self,
        name: &str,
        actions: &[BitmapAction],
        job: &Job,
    ) -> Result<(), ImageError> {
        if self.geometry().version() == Version::V2 {
            let text = "a version 2 image has no bitmaps";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        let fail = |errno| self.image.explain(errno, DOING);
        let _held = self.writer.resizing.lock().await;
        let epochs = &self.writer.epochs;
        let mut list = self.writer.bitmaps.list.lock().clone();
        // Whatever can be refused is, before anything of the image changes.
        for action in actions {
            self.apply(&mut list, name, action).await?;
        }
        self.announce().await.map_err(fail)?;
        let _closed = epochs.gate.close(|| epochs.is_empty()).await;
        let mut list = self.writer.bitmaps.list.lock().clone();
        for action in actions {
            self.apply(&mut list, name, action).await?;
        }
        let open = self.is_recording().then_some(Loaded::Enabled);
        self.replace_bitmaps(list, open, job).await
    }

    async fn apply(
        &self,
        list: &mut BitmapList,
        name: &str,
        action: &BitmapAction,
    ) -> Result<(), ImageError> {
        match action {
            BitmapAction::Add { granularity_bytes } => {
                let kept = self.new_bitmap(list, name, *granularity_bytes)?;
                list.all.push(kept);
                return Ok(());
            }
            BitmapAction::Remove => {
                let at = list.find(name)?;
                list.all.remove(at);
                return Ok(());
            }
            _ => {}
        }
        let mut kept = list.usable(name)?.clone();
        // Later marks go to the bits that are loaded, so they are those of today.
        let bits = self.queue.load_bits(list, &kept).await?;
        match action {
            BitmapAction::Clear => {
                kept.set_bits(BitmapBits::new(bits.shape()));
            }
            BitmapAction::Enable => {
                kept.stored.flags |= bitmap::AUTO;
                kept.bits = Some(bits);
            }
            BitmapAction::Disable => {
                kept.stored.flags &= !bitmap::AUTO;
                kept.bits = Some(bits);
            }
            BitmapAction::Merge(source) => {
                let other = match source {
                    BitmapSource::Bits(other) => Arc::clone(other),
                    BitmapSource::Named(other) => {
                        self.queue.load_bits(list, list.usable(other)?).await?
                    }
                };
                check_sizes(&bits, &other)?;
                let merged = bits.copy_to(bits.shape());
                merged.merge(&other);
                kept.set_bits(merged);
            }
            BitmapAction::Add { .. } | BitmapAction::Remove => {}
        }
        let at = list.find(name)?;
        list.all[at] = kept;
        Ok(())
    }

    fn new_bitmap(
        &self,
        list: &BitmapList,
        name: &str,
        granularity_bytes: Option<u64>,
    ) -> Result<KeptBitmap, ImageError> {
        let invalid = |text: String| Err(ImageError::new(ErrorKind::InvalidInput, text));
        if name.is_empty() || name.len() > usize::from(limit::BITMAP_NAME_BYTES_MAX) {
            return invalid("the name of a bitmap has 1 to 1023 bytes".to_owned());
        }
        if name.as_bytes() == bitmap::WRITE_INTENT_MAP {
            return invalid(format!("{name:?} is the name of Gaur's write-intent map"));
        }
        if list.find(name).is_ok() {
            return invalid(format!("there is a bitmap named {name:?} already"));
        }
        // One more is the write-intent map.
        let most = limit::BITMAPS_MAX - 1;
        if list.all.len() as u64 >= u64::from(most) {
            return invalid(format!("an image has at most {most} bitmaps"));
        }
        let geometry = self.geometry();
        let granularity_bits = match granularity_bytes {
            None => BitmapShape::default_granularity_bits(geometry),
            Some(bytes) if bytes.is_power_of_two() => bytes.trailing_zeros() as u8,
            Some(bytes) => {
                return invalid(format!("granularity {bytes} is not a power of two"));
            }
        };
        let size_bytes = self.image.size_bytes();
        let shape = BitmapShape::new(size_bytes, granularity_bits, geometry);
        let shape = shape.map_err(ImageError::format)?;
        let bytes = |entries: u64| entries * geometry.cluster_size();
        let others: u64 = list.all.iter().map(|kept| kept.table.len() as u64).sum();
        if bytes(others + u64::from(shape.table_entries())) > MEMORY_BYTES_MAX {
            let most = MEMORY_BYTES_MAX >> 20;
            return invalid(format!(
                "the bitmaps of an image have at most {most} MiB of bits"
            ));
        }
        Ok(KeptBitmap {
            stored: Bitmap {
                table_offset: NOWHERE,
                table_entries: shape.table_entries(),
                flags: bitmap::AUTO,
                granularity_bits,
                name: name.as_bytes().to_vec(),
                extra: Vec::new(),
            },
            is_usable: true,
            table: Arc::default(),
            bits: Some(Arc::new(BitmapBits::new(shape))),
            is_changed: true,
        })
    }
}

impl KeptBitmap {
    pub(super) fn set_bits(&mut self, bits: BitmapBits) {
        self.bits = Some(Arc::new(bits));
        self.is_changed = true;
    }
}

fn check_sizes(own: &BitmapBits, other: &BitmapBits) -> Result<(), ImageError> {
    let (own, other) = (own.shape().size_bytes(), other.shape().size_bytes());
    if own == other {
        return Ok(());
    }
    let text = format!("the bitmaps are for disks of different sizes, {own} and {other} bytes");
    Err(ImageError::new(ErrorKind::InvalidInput, text))
}
