//! Layers of other programs' formats, for reading: VDI, VHD and VHDX.
//!
//! `gaur-foreign` reads their headers and looks offsets up; here is what does input and output for it. Such a layer is the
//! last of its chain and never changes, so its table needs no order and no locks beyond that of the cache.
//!
//! Tables are read as requests need them, in pages that are kept up to [`PAGES_MAX`]: an image that claims a
//! huge table costs no more memory than another.

use std::collections::BTreeMap;
use std::sync::Arc;

use gaur_block::{Errno, File, Target};
use gaur_foreign::{Disk, Error, Format, vdi, vhd, vhdx};

use crate::align;
use crate::corruption::{Fault, Finding, Structure};
use crate::error::{ErrorKind, ImageError};
use crate::layer::{LayerParts, LayerReader, Use};
use crate::metadata::maps::{Extent, Kind, Lookup};
use crate::queue::Queue;
use crate::range::GuestRange;
use crate::sync::Mutex;
use crate::waiters::KeyLocks;

/// Bytes of a table that are read at once, at a multiple of that many.
const PAGE_BYTES: u64 = 64 << 10;
/// Pages that are kept: the table of 1 TiB in blocks of 1 MiB.
const PAGES_MAX: usize = 64;

/// The mapping of a foreign layer.
#[derive(Debug)]
pub(crate) struct Foreign {
    disk: Disk,
    pages: Mutex<Pages>,
    /// Pages being read, by host offset.
    loads: KeyLocks,
}

/// Parts of the table, by host offset.
#[derive(Debug, Default)]
struct Pages {
    kept: BTreeMap<u64, Arc<[u8]>>,
    /// Where the search for a page to replace goes on.
    hand: u64,
}

impl Foreign {
    pub(crate) fn new(disk: Disk) -> Foreign {
        Foreign {
            disk,
            pages: Mutex::default(),
            loads: KeyLocks::default(),
        }
    }

    /// Whether its disk lies in one piece.
    pub(crate) fn is_flat(&self) -> bool {
        self.disk.is_flat()
    }

    /// Drops what it keeps of the table.
    pub(crate) fn clean(&self) {
        self.pages.lock().kept.clear();
    }

    /// The run at the start of a range inside the disk; a miss names the page that is needed.
    pub(crate) fn extent(&self, range: GuestRange) -> Result<Lookup, Fault> {
        let pages = self.pages.lock();
        let found = self.disk.extent(range.start, range.len, |host, entry| {
            let page = pages.kept.get(&(host - host % PAGE_BYTES));
            let start = (host % PAGE_BYTES) as usize;
            let bytes = page.and_then(|page| page.get(start..start + entry.len()));
            bytes
                .inspect(|bytes| entry.copy_from_slice(bytes))
                .is_some()
        });
        let found = found.map_err(|bad| Fault {
            structure: Structure::BlockTable,
            host: bad.at,
            finding: Finding::Foreign(bad.damage),
        })?;
        Ok(match found {
            gaur_foreign::Lookup::Need(host) => Lookup::Miss(host - host % PAGE_BYTES),
            gaur_foreign::Lookup::Found(run) => Lookup::Extent(Extent {
                layer: 0,
                len: run.len,
                kind: match run.kind {
                    gaur_foreign::Kind::Zero => Kind::Zero { host: None },
                    gaur_foreign::Kind::Data(host) => Kind::Data { host, copied: true },
                },
            }),
        })
    }

    fn keep(&self, start: u64, page: Arc<[u8]>) {
        let mut pages = self.pages.lock();
        let pages = &mut *pages;
        while pages.kept.len() >= PAGES_MAX {
            // One after the other: what is read in sequence is not needed again.
            let next = pages.kept.range(pages.hand..).next();
            let Some((gone, _)) = next.or(pages.kept.first_key_value()) else {
                break;
            };
            let gone = *gone;
            pages.kept.remove(&gone);
            pages.hand = gone + 1;
        }
        pages.kept.insert(start, page);
    }
}

impl<F: File> Queue<F> {
    /// Reads a page of the table of the foreign layer at `depth`.
    pub(crate) async fn load_page(&self, depth: usize, start: u64) -> Result<(), Errno> {
        let layer = self.image.layers.get(depth);
        let foreign = layer.and_then(|layer| layer.foreign.as_ref());
        let (foreign, file) = foreign.zip(self.files.get(depth)).ok_or(Errno::EIO)?;
        let Some(_loading) = foreign.loads.lock_or_wait(start).await else {
            return Ok(());
        };
        if foreign.pages.lock().kept.contains_key(&start) {
            return Ok(());
        }
        let mut page = self.pool.take(file, PAGE_BYTES as usize);
        align::read(file, &self.pool, start, Target::memory(&mut page)).await?;
        foreign.keep(start, Arc::from(&*page));
        Ok(())
    }
}

impl<F: File> LayerReader<'_, F> {
    /// Reads what is needed to use the file as a layer of a foreign format.
    pub(crate) async fn load_foreign(
        &self,
        parts: &mut LayerParts,
        format: Format,
        purpose: Use<'_>,
    ) -> Result<(), ImageError> {
        if purpose.writable {
            let (kind, word) = match purpose.format {
                Some(_) => (ErrorKind::Unsupported, "is"),
                // A raw disk may look like it.
                None => (ErrorKind::ForeignFormat, "looks like"),
            };
            let text = format!(
                "{word} a {} image, which can only be read; 'gaur convert -O qcow2' makes one that \
                 can be written",
                format.shown()
            );
            return Err(ImageError::new(kind, text));
        }
        let disk = self.foreign_disk(format).await?;
        parts.layer.size_bytes = disk.size_bytes;
        parts.layer.foreign = Some(Foreign::new(disk));
        Ok(())
    }

    /// The disk in a file of a foreign format.
    async fn foreign_disk(&self, format: Format) -> Result<Disk, ImageError> {
        let disk = match format {
            Format::Vdi => vdi::parse(&self.head(vdi::HEADER_BYTES).await?, self.len_bytes),
            Format::Vhd => return self.vhd_disk().await,
            Format::Vhdx => return self.vhdx_disk().await,
        };
        disk.map_err(refused)
    }

    async fn vhd_disk(&self) -> Result<Disk, ImageError> {
        let first = self.head(vhd::FOOTER_BYTES).await?;
        let end = self.len_bytes.saturating_sub(vhd::FOOTER_BYTES);
        let last = self.padded(end, vhd::FOOTER_BYTES).await?;
        let footer = vhd::Footer::find(&first, &last).map_err(refused)?;
        let header = match footer.dynamic_header() {
            None => None,
            Some(at) => Some(self.bytes("header", at, vhd::DYNAMIC_BYTES).await?),
        };
        footer
            .disk(header.as_deref(), self.len_bytes)
            .map_err(refused)
    }

    async fn vhdx_disk(&self) -> Result<Disk, ImageError> {
        let headers = self
            .pair("header", vhdx::HEADERS, vhdx::HEADER_BYTES)
            .await?;
        vhdx::check_headers(headers.each_ref().map(Vec::as_slice)).map_err(refused)?;
        let len = vhdx::REGION_TABLE_BYTES;
        let tables = self.pair("region table", vhdx::REGION_TABLES, len).await?;
        let regions = vhdx::find_regions(tables.each_ref().map(Vec::as_slice)).map_err(refused)?;
        let (at, len) = (regions.metadata.offset, regions.metadata_bytes());
        let metadata = self.bytes("metadata", at, len).await?;
        regions.disk(&metadata, self.len_bytes).map_err(refused)
    }

    /// A structure that is there twice.
    async fn pair(
        &self,
        what: &str,
        offsets: [u64; 2],
        len_bytes: u64,
    ) -> Result<[Vec<u8>; 2], ImageError> {
        let [first, second] = offsets;
        let first = self.bytes(what, first, len_bytes).await?;
        Ok([first, self.bytes(what, second, len_bytes).await?])
    }

    /// The first bytes of the file; fewer if it is shorter.
    async fn head(&self, len_bytes: u64) -> Result<Vec<u8>, ImageError> {
        self.bytes("header", 0, len_bytes.min(self.len_bytes)).await
    }
}

/// A header that was refused.
fn refused(error: Error) -> ImageError {
    let kind = match error {
        Error::Damaged(_) => ErrorKind::Corrupt,
        Error::Unsupported(_) => ErrorKind::Unsupported,
    };
    ImageError::new(kind, error.to_string())
}

/// What a foreign image says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignInfo {
    /// Length for the guest, in bytes.
    pub size_bytes: u64,
    /// Bytes that are allocated together; `None` where the disk lies in one piece.
    pub block_bytes: Option<u64>,
}

/// Reads what the image in `file` says of itself, and no other file.
///
/// # Errors
/// When it cannot be read, is damaged, or has something that is not supported.
pub async fn foreign_info<F: File>(file: &F, format: Format) -> Result<ForeignInfo, ImageError> {
    let disk = LayerReader::new(file).await?.foreign_disk(format).await?;
    Ok(ForeignInfo {
        size_bytes: disk.size_bytes,
        block_bytes: disk.block_bytes,
    })
}

#[cfg(test)]
mod tests;
