//! Layers of other programs' formats, for reading: VDI, VHD, VHDX and VMDK.
//!
//! `gaur-foreign` reads their headers and looks offsets up; here is what does input and output for it. Such a layer is the
//! last of its chain and never changes, so its table needs no order and no locks beyond that of the cache.
//!
//! Tables are read as requests need them, in pages that are kept up to [`PAGES_MAX`]: an image that claims a
//! huge table costs no more memory than another. A VMDK may lie in several files, one part of the disk behind the other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gaur_block::{Errno, File, SegmentsMut, Target};
use gaur_foreign::{Damage, Disk, vmdk};
use gaur_format::CompressedDescriptor;

use crate::align;
use crate::corruption::{Fault, Finding, Structure};
use crate::decompressed::ClusterKey;
use crate::metadata::maps::{Extent, Kind, Lookup};
use crate::queue::Queue;
use crate::range::GuestRange;
use crate::sync::Mutex;
use crate::waiters::KeyLocks;

mod open;

pub(crate) use open::open_extents;
pub use open::{ForeignInfo, foreign_info};

/// Bytes of a table that are read at once, at a multiple of that many.
const PAGE_BYTES: u64 = 64 << 10;
/// Pages that are kept: the table of 1 TiB in blocks of 1 MiB.
const PAGES_MAX: usize = 64;
/// Pages are numbered over all files of the layer, with so many for each.
const PAGES_OF_FILE: u64 = 1 << 48;

/// The mapping of a foreign layer.
#[derive(Debug, Default)]
pub(crate) struct Foreign {
    /// One behind the other; the guest finds them at their `start`.
    parts: Vec<Part>,
    /// Files besides that of the layer.
    pub(crate) files: Vec<PathBuf>,
    /// Which of the files of the top, or of those below it, is the first of those.
    pub(crate) first_file: usize,
    pages: Mutex<Pages>,
    /// Pages being read.
    loads: KeyLocks,
}

/// A part of the disk, in a file of its own, or the whole.
#[derive(Debug)]
struct Part {
    /// Guest offset.
    start: u64,
    len: u64,
    /// `None` where it is zeros.
    disk: Option<Disk>,
    /// 0 is the file of the layer, others come behind it.
    file: usize,
}

/// Parts of the tables, by their number.
#[derive(Debug, Default)]
struct Pages {
    kept: BTreeMap<u64, Arc<[u8]>>,
    /// Where the search for a page to replace goes on.
    hand: u64,
}

impl Part {
    /// The number of the page that has this host offset.
    fn page(&self, host: u64) -> u64 {
        self.file as u64 * PAGES_OF_FILE + host / PAGE_BYTES
    }
}

impl Foreign {
    /// A disk that lies in the file of the layer.
    fn of(disk: Disk) -> Foreign {
        let mut foreign = Foreign::default();
        foreign.add(disk.size_bytes, Some(disk), 0);
        foreign
    }

    /// Adds a part behind those that are there.
    fn add(&mut self, len: u64, disk: Option<Disk>, file: usize) {
        let last = self.parts.last();
        let start = last.map_or(0, |last| last.start + last.len);
        self.parts.push(Part {
            start,
            len,
            disk,
            file,
        });
    }

    /// The paths of the files that the parts are in, by the guest offsets where they begin; `own` is that of the layer.
    pub(crate) fn paths<'a>(&'a self, own: &'a Path) -> Vec<(u64, &'a Path)> {
        let path = |part: &Part| {
            let more = part.file.checked_sub(1);
            let path = more.and_then(|more| self.files.get(more));
            (part.start, path.map_or(own, PathBuf::as_path))
        };
        self.parts.iter().map(path).collect()
    }

    /// The part that has a guest offset.
    fn part(&self, at: u64) -> Option<&Part> {
        let behind = self.parts.partition_point(|part| part.start <= at);
        self.parts.get(behind.checked_sub(1)?)
    }

    /// Whether the disk lies in one piece where a guest offset is.
    pub(crate) fn is_flat(&self, at: u64) -> bool {
        let disk = self.part(at).and_then(|part| part.disk.as_ref());
        disk.is_some_and(Disk::is_flat)
    }

    /// Which of those files has a guest offset of the layer at `depth`.
    pub(crate) fn file_index(&self, depth: usize, at: u64) -> usize {
        self.index(depth, self.part(at).map_or(0, |part| part.file))
    }

    fn index(&self, depth: usize, file: usize) -> usize {
        match file.checked_sub(1) {
            None => depth.saturating_sub(1),
            Some(more) => self.first_file + more,
        }
    }

    /// Drops what it keeps of the tables.
    pub(crate) fn clean(&self) {
        self.pages.lock().kept.clear();
    }

    /// The run at the start of a range inside the disk; a miss names the page that is needed.
    pub(crate) fn extent(&self, range: GuestRange) -> Result<Lookup, Fault> {
        let found = |len, kind| {
            let layer = 0;
            Ok(Lookup::Extent(Extent { layer, len, kind }))
        };
        let Some(part) = self.part(range.start) else {
            return found(range.len, Kind::Unallocated { host: None });
        };
        let at = range.start - part.start;
        let len = range.len.min(part.len.saturating_sub(at)).max(1);
        let Some(disk) = &part.disk else {
            return found(len, Kind::Zero { host: None });
        };
        let pages = self.pages.lock();
        let looked_up = disk.extent(at, len, |host, entry| {
            let page = pages.kept.get(&part.page(host));
            let start = (host % PAGE_BYTES) as usize;
            let bytes = page.and_then(|page| page.get(start..start + entry.len()));
            bytes
                .inspect(|bytes| entry.copy_from_slice(bytes))
                .is_some()
        });
        let run = match looked_up {
            Ok(gaur_foreign::Lookup::Need(host)) => return Ok(Lookup::Miss(part.page(host))),
            Ok(gaur_foreign::Lookup::Found(run)) => run,
            Err(bad) => {
                return Err(Fault {
                    structure: Structure::BlockTable,
                    host: bad.at,
                    finding: Finding::Foreign(bad.damage),
                });
            }
        };
        let kind = match run.kind {
            gaur_foreign::Kind::Absent => Kind::Unallocated { host: None },
            gaur_foreign::Kind::Zero => Kind::Zero { host: None },
            gaur_foreign::Kind::Data(host) => Kind::Data { host, copied: true },
            gaur_foreign::Kind::Compressed(offset) => Kind::Compressed {
                descriptor: CompressedDescriptor { offset, sectors: 0 },
            },
        };
        found(run.len.min(len), kind)
    }

    /// Makes a page that was read what it is to be.
    fn patch(&self, number: u64, start: u64, page: &mut [u8]) {
        let file = (number / PAGES_OF_FILE) as usize;
        let mut disks = self.parts.iter().filter(|part| part.file == file);
        if let Some(disk) = disks.find_map(|part| part.disk.as_ref()) {
            disk.patch(start, page);
        }
    }

    fn keep(&self, number: u64, page: Arc<[u8]>) {
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
        pages.kept.insert(number, page);
    }
}

impl<F: File> Queue<F> {
    /// Reads a page of the tables of the foreign layer at `depth`.
    pub(crate) async fn load_page(&self, depth: usize, number: u64) -> Result<(), Errno> {
        let layer = self.image.layers().get(depth);
        let foreign = layer.and_then(|layer| layer.foreign.as_ref());
        let foreign = foreign.ok_or(Errno::EIO)?;
        let index = foreign.index(depth, (number / PAGES_OF_FILE) as usize);
        let file = self.files.of(depth).get(index).ok_or(Errno::EIO)?;
        let Some(_loading) = foreign.loads.lock_or_wait(number).await else {
            return Ok(());
        };
        if foreign.pages.lock().kept.contains_key(&number) {
            return Ok(());
        }
        let start = number % PAGES_OF_FILE * PAGE_BYTES;
        let mut page = self.pool.take(file, PAGE_BYTES as usize);
        align::read(file, &self.pool, start, Target::memory(&mut page)).await?;
        foreign.patch(number, start, &mut page);
        foreign.keep(number, Arc::from(&*page));
        Ok(())
    }

    /// Fills `out` with what is at guest offset `at`, in the compressed grain whose marker is at host offset `marker`.
    pub(crate) async fn fetch_grain(
        &self,
        depth: usize,
        foreign: &Foreign,
        marker: u64,
        at: u64,
        out: SegmentsMut<'_>,
    ) -> Result<(), Errno> {
        let part = foreign.part(at).ok_or(Errno::EIO)?;
        let disk = part.disk.as_ref().ok_or(Errno::EIO)?;
        let unit = disk.block_bytes.ok_or(Errno::EIO)?;
        let start = (at - part.start) % unit;
        let bytes = self
            .grain(depth, marker, at - part.start - start, disk)
            .await?;
        let start = start as usize;
        out.copy_from(bytes.get(start..start + out.len()).ok_or(Errno::EIO)?);
        Ok(())
    }

    /// The bytes of the grain at `at` of `disk`. Of several tasks that want them one decompresses.
    async fn grain(
        &self,
        depth: usize,
        marker: u64,
        at: u64,
        disk: &Disk,
    ) -> Result<Arc<Vec<u8>>, Errno> {
        let key = ClusterKey {
            layer: depth,
            descriptor: CompressedDescriptor {
                offset: marker,
                sectors: 0,
            },
        };
        let cache = self.image.decompressed(depth);
        let unit = disk.block_bytes.unwrap_or_default();
        loop {
            if let Some(bytes) = cache.get(key) {
                return Ok(bytes);
            }
            let Some(_loading) = cache.loads.lock_or_wait(marker).await else {
                continue;
            };
            if let Some(bytes) = cache.get(key) {
                return Ok(bytes);
            }
            let file = self.file_of(depth).ok_or(Errno::EIO)?;
            let mut head = [0; vmdk::GRAIN_MARKER_BYTES as usize];
            align::read(file, &self.pool, marker, Target::memory(&mut head)).await?;
            let broken = || {
                let fault = Fault {
                    structure: Structure::BlockTable,
                    host: marker,
                    finding: Finding::Foreign(Damage::Grain),
                };
                self.image.corrupt(depth, fault)
            };
            let len = vmdk::grain_len(&head, at, unit).ok_or_else(broken)?;
            let mut input = self.pool.take(file, len as usize);
            let from = marker + vmdk::GRAIN_MARKER_BYTES;
            align::read(file, &self.pool, from, Target::memory(&mut input)).await?;
            let mut bytes = cache.memory(unit as usize);
            let filled = self.decompressor.inflate_zlib(&input, &mut bytes);
            // The last may end with the disk.
            let filled = filled.filter(|filled| *filled as u64 >= unit.min(disk.size_bytes - at));
            let rest = filled.and_then(|filled| bytes.get_mut(filled..));
            rest.ok_or_else(broken)?.fill(0);
            return Ok(cache.insert(key, bytes));
        }
    }
}

#[cfg(test)]
mod tests;
