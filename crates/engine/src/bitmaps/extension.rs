//! The header extension that leads to the bitmaps: shown, changed and hidden by writes of one sector each (O5).
//!
//! An extension cannot be put between others without moving them. So a new one goes where one was removed, or
//! behind the last, where its bytes mean nothing until the eight that begin it are written. Behind the list
//! there may be the name of the backing file, which moves further back first.
//!
//! The autoclear bit is set before the extension shows, and cleared after it is hidden, where both do not lie in
//! one sector: an extension without the bit has QEMU 10 delete all snapshots when it repairs leaks.

use gaur_block::{Errno, File};
use gaur_format::extension::{self, BitmapsExtension};
use gaur_format::header::{Header, field};

use crate::active::Active;
use crate::error::{ErrorKind, ImageError};
use crate::metadata::l1_table::SECTOR_BYTES;

/// Bytes of the extension's data.
const DATA_BYTES: u64 = 24;

/// A place for the extension. What `rest` says goes there first and means nothing; `first` makes it mean
/// something.
#[derive(Debug, PartialEq, Eq)]
struct Slot {
    at: u64,
    first: [u8; 8],
    rest: Vec<u8>,
}

fn start_of(kind: u32, len: u32) -> [u8; 8] {
    (u64::from(kind) << 32 | u64::from(len)).to_be_bytes()
}

fn sector(at: u64) -> u64 {
    at / SECTOR_BYTES
}

/// Whether the data of an extension at `at` can be changed by a write of one sector.
fn is_in_one_sector(at: u64) -> bool {
    sector(at + 8) == sector(at + 8 + DATA_BYTES - 1)
}

impl Slot {
    /// Where one was removed, or behind the last.
    fn find(header: &Header, data: &[u8]) -> Slot {
        let mut end = 0;
        for (at, other) in header.extension_places() {
            end = at;
            let is_free = other.is_some_and(|other| {
                other.kind == extension::REMOVED && other.data.len() as u64 == DATA_BYTES
            });
            if is_free && is_in_one_sector(at) {
                return Slot {
                    at,
                    first: start_of(extension::BITMAPS, DATA_BYTES as u32),
                    rest: data.to_vec(),
                };
            }
        }
        let mut bytes = Vec::new();
        if !is_in_one_sector(end) {
            // One that means nothing, up to the next sector.
            let filler = SECTOR_BYTES - (end + 8) % SECTOR_BYTES;
            bytes.extend_from_slice(&start_of(extension::REMOVED, filler as u32 - 8));
            bytes.resize(filler as usize, 0);
        }
        bytes.extend_from_slice(&start_of(extension::BITMAPS, DATA_BYTES as u32));
        bytes.extend_from_slice(data);
        bytes.extend_from_slice(&start_of(extension::END, 0));
        let rest = bytes.split_off(8);
        let first = start_of(extension::END, 0);
        Slot {
            at: end,
            first: bytes.try_into().unwrap_or(first),
            rest,
        }
    }

    fn end(&self) -> u64 {
        self.at + 8 + self.rest.len() as u64
    }
}

impl<F: File> Active<'_, F> {
    /// The header leads to another directory, or to none. What it leads to is durable.
    pub(super) async fn publish_bitmaps(
        &self,
        pointer: Option<BitmapsExtension>,
    ) -> Result<(), ImageError> {
        let fail = |errno| self.image.explain(errno, "cannot change the header");
        let _held = self.writer.structure.lock().await;
        let bytes = self.read_header().await.map_err(fail)?;
        let header = Header::parse(&bytes).map_err(ImageError::format)?;
        let live = header.extension_at(extension::BITMAPS);
        let Some(pointer) = pointer else {
            return match live {
                Some(at) => self.hide_bitmaps(at).await.map_err(fail),
                None => Ok(()),
            };
        };
        let data = pointer.encode().data;
        if let Some(at) = live.filter(|at| is_in_one_sector(*at)) {
            return self.step(&[(at + 8, &data)]).await.map_err(fail);
        }
        let slot = Slot::find(&header, &data);
        self.make_room(&header, &bytes, &slot).await?;
        self.show_bitmaps(&slot, live).await.map_err(fail)
    }

    async fn read_header(&self) -> Result<Vec<u8>, Errno> {
        let len = self.queue.top_file().len().await?;
        let mut bytes = vec![0; len.min(self.geometry().cluster_size()) as usize];
        self.read_file(0, &mut bytes).await?;
        Ok(bytes)
    }

    async fn hide_bitmaps(&self, at: u64) -> Result<(), Errno> {
        let removed = extension::REMOVED.to_be_bytes();
        let marks = self.marks_of_writer(false).encode();
        let (hide, clear) = ((at, &removed[..]), (field::COMPATIBLE, &marks[..]));
        if sector(at) == sector(field::COMPATIBLE) {
            return self.step(&[hide, clear]).await;
        }
        self.step(&[hide]).await?;
        self.step(&[clear]).await
    }

    async fn show_bitmaps(&self, slot: &Slot, live: Option<u64>) -> Result<(), Errno> {
        self.write_file(slot.at + 8, &slot.rest).await?;
        self.queue.barrier().await?;
        let show = (slot.at, &slot.first[..]);
        let removed = extension::REMOVED.to_be_bytes();
        let marks = self.marks_of_writer(true).encode();
        let before = match live {
            // It could not be changed where it is. A power cut in between leaves no bitmaps, and their clusters
            // leaked.
            Some(at) => (at, &removed[..]),
            None => (field::COMPATIBLE, &marks[..]),
        };
        if sector(before.0) == sector(slot.at) {
            return self.step(&[before, show]).await;
        }
        self.step(&[before]).await?;
        self.step(&[show]).await
    }

    /// Has the name of the backing file out of the way.
    async fn make_room(
        &self,
        header: &Header,
        bytes: &[u8],
        slot: &Slot,
    ) -> Result<(), ImageError> {
        let fail = |errno| {
            self.image
                .explain(errno, "cannot move the name of the backing file")
        };
        let at = field::BACKING_FILE_OFFSET as usize;
        let name_at = bytes.get(at..).and_then(|bytes| bytes.first_chunk());
        let name_at = name_at.map_or(0, |raw| u64::from_be_bytes(*raw));
        let name = header.backing_file().unwrap_or(&[]);
        let (limit, len) = (self.geometry().cluster_size(), name.len() as u64);
        let new_at = match name_at {
            0 => return self.fits(slot.end(), limit),
            at if slot.end() <= at => return Ok(()),
            at => slot.end().max(at + len).next_multiple_of(8),
        };
        self.fits(new_at + len, limit)?;
        self.write_file(new_at, name).await.map_err(fail)?;
        self.queue.barrier().await.map_err(fail)?;
        self.switch_header(field::BACKING_FILE_OFFSET, &new_at.to_be_bytes())
            .await
            .map_err(fail)
    }

    fn fits(&self, end: u64, limit: u64) -> Result<(), ImageError> {
        if end <= limit {
            return Ok(());
        }
        let text = "the header has no room for bitmaps; larger clusters have more";
        Err(ImageError::new(ErrorKind::Unsupported, text))
    }
}
