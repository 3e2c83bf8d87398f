//! Changes of the header of an open image: always within one sector, so that a power cut leaves
//! either the old header or the new one (O5).

use gaur_block::{Errno, File, Source, Target};
use gaur_format::extension;
use gaur_format::feature::Autoclear;
use gaur_format::geometry::Version;
use gaur_format::header::{Header, field};

use crate::align;
use crate::image::Writer;
use crate::metadata::l1_table::SECTOR_BYTES;
use crate::queue::Queue;
use crate::sync::atomic::Ordering;

/// Incompatible feature bit of a corrupt image.
const CORRUPT: u64 = 1 << 1;

impl<F: File> Queue<F> {
    /// Replaces `bytes` at byte `at` of the header and flushes. What the new value refers to has
    /// been flushed before. The structure lock is held.
    pub(crate) async fn switch_header(&self, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.step(&[(at, bytes)]).await
    }

    async fn write_header(&self, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.write_fields(&[(at, bytes)]).await
    }

    /// Replaces bytes at several places of one sector of the header.
    async fn write_fields(&self, fields: &[(u64, &[u8])]) -> Result<(), Errno> {
        let file = self.top_file();
        let mut sector = self.pool.take(file, SECTOR_BYTES as usize);
        let first = fields.first().map_or(0, |(at, _)| at & !(SECTOR_BYTES - 1));
        align::read(file, &self.pool, first, Target::Memory(&mut sector)).await?;
        for (at, bytes) in fields {
            let at = at.checked_sub(first).ok_or(Errno::EIO)? as usize;
            let slot = sector.get_mut(at..at + bytes.len());
            slot.ok_or(Errno::EIO)?.copy_from_slice(bytes);
        }
        let (locks, source) = (&self.image.locks, Source::Memory(&sector));
        align::write(file, &self.pool, locks, first, source).await
    }

    /// Before the first change: flushes, because whoever had the image before may have been killed before
    /// he could, and what is free by the tables that were read must be free by those on the disk (O3).
    /// And switches the autoclear bits to those of a process that writes, with the number of its log. This
    /// engine does not keep what the others stand for (persistent bitmaps) up to date (O6); the bitmaps
    /// go with them.
    pub(crate) async fn announce(&self, writer: &Writer) -> Result<(), Errno> {
        if writer.announced.load(Ordering::Acquire) {
            return Ok(());
        }
        let _held = writer.structure.lock().await;
        if writer.announced.load(Ordering::Acquire) {
            return Ok(());
        }
        self.barrier().await?;
        if let Some(header) = self.header()
            && header.version == Version::V3
        {
            self.switch_features(header, self.bits_of_writer(writer))
                .await?;
        }
        if let Some(lost) = &writer.lost_bitmaps {
            let frees = lost.frees.iter().copied();
            writer.alloc.lock().releasable.extend(frees);
        }
        writer.announced.store(true, Ordering::Release);
        Ok(())
    }

    /// The log has another number now, and holds nothing: what the one before knew is durable.
    ///
    /// # Errors
    /// Those of the host; then the image refuses writes.
    pub async fn log_renamed(&self) -> Result<(), Errno> {
        match self.top() {
            Some((_, writer)) if writer.announced.load(Ordering::Acquire) => {
                self.switch_autoclear(writer, self.bits_of_writer(writer))
                    .await
            }
            _ => Ok(()),
        }
    }

    /// The last change: nobody writes any more, and there is no log. What a process before this one may have
    /// leaked stays to be told until somebody repairs it, which clears the bits.
    pub(crate) async fn withdraw(&self, writer: &Writer) -> Result<(), Errno> {
        if !writer.announced.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let leaked = match writer.snapshots.lock().all().is_empty() {
            true => writer.opened_with.0 & Autoclear::IN_USE.0,
            false => 0,
        };
        self.switch_autoclear(writer, Autoclear(leaked)).await
    }

    async fn switch_autoclear(&self, writer: &Writer, bits: Autoclear) -> Result<(), Errno> {
        match self.header() {
            Some(header) if header.version == Version::V3 => {
                let _held = writer.structure.lock().await;
                let bytes = bits.0.to_be_bytes();
                self.switch_header(field::AUTOCLEAR, &bytes).await
            }
            _ => Ok(()),
        }
    }

    fn bits_of_writer(&self, writer: &Writer) -> Autoclear {
        let snapshots = writer.snapshots.lock().all().len();
        self.bits_with(snapshots)
    }

    /// The autoclear bits of a process that writes to an image with so many snapshots. With any there are
    /// none: QEMU 10 deletes all internal snapshots when it repairs an image with bits that it does not know.
    pub(crate) fn bits_with(&self, snapshots: usize) -> Autoclear {
        match snapshots {
            0 => Autoclear::in_use(self.log_number()),
            _ => Autoclear(0),
        }
    }

    /// The number of the log that commits are noted in, 0 if there is none.
    pub(crate) fn log_number(&self) -> u64 {
        let log = self.top().and_then(|(qcow2, _)| qcow2.maps.log.as_deref());
        log.map_or(0, |log| log.number()) & Autoclear::LOG_MAX
    }

    /// Sets the autoclear bits and hides the extension that leads to bitmaps: in one step where both lie in
    /// one sector. Otherwise the extension goes before the bit of the bitmaps. What a power cut leaves in
    /// between has the bit and no bitmaps, and is the same to us; QEMU 10 does not write to it before a
    /// check. The other way round its repair of leaks would delete the snapshots.
    async fn switch_features(&self, header: &Header, wanted: Autoclear) -> Result<(), Errno> {
        let removed = extension::REMOVED.to_be_bytes();
        let extension = header.extension_at(extension::BITMAPS);
        let hide = extension.map(|at| (at, &removed[..]));
        let bitmaps = header.autoclear.0 & Autoclear::BITMAPS.0;
        let bits = [wanted.0 | bitmaps, wanted.0].map(u64::to_be_bytes);
        let [first, last] = bits.each_ref().map(|bits| (field::AUTOCLEAR, &bits[..]));
        let sector = |at: u64| at / SECTOR_BYTES;
        match hide {
            None => self.step(&[last]).await,
            Some(hide) if sector(hide.0) == sector(last.0) => self.step(&[hide, last]).await,
            Some(hide) => {
                self.step(&[first]).await?;
                self.step(&[hide]).await?;
                self.step(&[last]).await
            }
        }
    }

    /// Replaces bytes at several places of one sector of the header and flushes.
    pub(crate) async fn step(&self, fields: &[(u64, &[u8])]) -> Result<(), Errno> {
        let written = self.write_fields(fields).await;
        written.inspect_err(|errno| self.image.poison(*errno))?;
        self.barrier().await
    }

    /// Corruption was found: says so in the header, so that nobody writes before a check. Best
    /// effort; the image refuses writes already.
    ///
    /// Not where the host has failed to flush: tables that it has lost read as something else, and say
    /// nothing of the disk, which is as it was at the flush before.
    pub(crate) async fn mark_corrupt(&self) {
        let Some(writer) = &self.image.writer else {
            return;
        };
        let Some(header) = self.header() else { return };
        if header.version == Version::V3 {
            let _held = writer.structure.lock().await;
            let _flushing = self.image.flushing.lock().await;
            let failed = &self.image.flush_failed;
            if failed.load(Ordering::Acquire) || self.flush_host().await.is_err() {
                return;
            }
            let bits = header.incompatible.0 | CORRUPT;
            let bytes = bits.to_be_bytes();
            if self.write_header(field::INCOMPATIBLE, &bytes).await.is_ok() {
                let _ = self.flush_host().await;
            }
        }
    }

    pub(crate) fn header(&self) -> Option<&Header> {
        self.image.layers.first()?.header()
    }
}
