//! Header updates of an open image: always within one sector, so that a power cut leaves
//! either the old header or the new one (O5).

use gaur_block::{Errno, File};
use gaur_format::extension;
use gaur_format::feature::{Autoclear, Compatible};
use gaur_format::geometry::Version;
use gaur_format::header::{Header, field};

use crate::active::Active;
use crate::metadata::l1_table::SECTOR_BYTES;
use crate::queue::Queue;
use crate::sync::atomic::Ordering;

/// Incompatible feature bit of a corrupt image.
const CORRUPT: u64 = 1 << 1;

/// The feature bits that say that a process writes, and which log it keeps.
#[derive(Clone, Copy)]
pub(crate) struct Marks(Compatible, Autoclear);

impl Marks {
    /// The bytes at [`field::COMPATIBLE`], with those of the autoclear bits behind them.
    pub(crate) fn encode(self) -> [u8; 16] {
        (u128::from(self.0.0) << 64 | u128::from(self.1.0)).to_be_bytes()
    }
}

impl<F: File> Queue<F> {
    /// The log has another number now, and holds nothing: what the one before knew is durable.
    ///
    /// # Errors
    /// Those of the host; then the image refuses writes.
    pub async fn log_renamed(&self) -> Result<(), Errno> {
        match self.active() {
            Some(active) if active.writer.announced.load(Ordering::Acquire) => {
                let bitmaps = active.writer.bitmaps.exist();
                active.switch_marks(active.marks_of_writer(bitmaps)).await
            }
            _ => Ok(()),
        }
    }
}

impl<'q, F: File> Active<'q, F> {
    /// Replaces `bytes` at byte `at` of the header and flushes. What the new value refers to has
    /// been flushed before. The structure lock is held.
    pub(crate) async fn switch_header(&self, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.step(&[(at, bytes)]).await
    }

    /// Replaces bytes at several places of one sector of the header.
    async fn write_fields(&self, fields: &[(u64, &[u8])]) -> Result<(), Errno> {
        let file = self.queue.top_file();
        let mut sector = self.queue.pool.take(file, SECTOR_BYTES as usize);
        let first = fields.first().map_or(0, |(at, _)| at & !(SECTOR_BYTES - 1));
        self.read_file(first, &mut sector).await?;
        for (at, bytes) in fields {
            let at = at.checked_sub(first).ok_or(Errno::EIO)? as usize;
            let slot = sector.get_mut(at..at + bytes.len());
            slot.ok_or(Errno::EIO)?.copy_from_slice(bytes);
        }
        self.write_file(first, &sector).await
    }

    /// Before the first change: flushes, because the process that had the image before may have been killed before
    /// it could, and what is free by the tables that were read must be free by those on the disk (O3).
    /// And switches the header's features to those of a process that writes, with the number of its log. What
    /// other autoclear bits stand for is not kept up to date (O6), but for bitmaps; those go here if they are
    /// to be dropped.
    pub(crate) async fn announce(&self) -> Result<(), Errno> {
        if self.writer.announced.load(Ordering::Acquire) {
            return Ok(());
        }
        let _held = self.writer.structure.lock().await;
        if self.writer.announced.load(Ordering::Acquire) {
            return Ok(());
        }
        self.queue.barrier().await?;
        if let Some(header) = self.header()
            && header.version == Version::V3
        {
            let marks = self.marks_of_writer(self.writer.bitmaps.exist());
            self.switch_features(header, marks).await?;
        }
        if let Some(lost) = &self.writer.lost_bitmaps {
            let frees = lost.frees.iter().copied();
            self.writer.alloc.lock().releasable.extend(frees);
        }
        self.writer.announced.store(true, Ordering::Release);
        Ok(())
    }

    /// The last change: no process writes any more, and there is no log. What a process before this one may have
    /// leaked stays to be told until a repair clears the bits; with snapshots, whose bits no
    /// other program clears, it was told once.
    pub(crate) async fn withdraw(&self) -> Result<(), Errno> {
        if !self.writer.announced.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let has_leaked = self.image.unclosed().is_some();
        let leaked = match self.writer.snapshots.lock().all().is_empty() {
            true if has_leaked => Autoclear::IN_USE,
            _ => Autoclear(0),
        };
        let none = self.compatible().with_own(Autoclear(0));
        let kept = self.kept_autoclear(self.writer.bitmaps.exist());
        self.switch_marks(Marks(none, leaked.with(kept))).await
    }

    async fn switch_marks(&self, marks: Marks) -> Result<(), Errno> {
        match self.header() {
            Some(header) if header.version == Version::V3 => {
                let _held = self.writer.structure.lock().await;
                self.switch_header(field::COMPATIBLE, &marks.encode()).await
            }
            _ => Ok(()),
        }
    }

    /// The feature bits of a process that writes to an image with or without bitmaps.
    pub(crate) fn marks_of_writer(&self, bitmaps: bool) -> Marks {
        let snapshots = self.writer.snapshots.lock().all().len();
        self.marks_of(snapshots, bitmaps)
    }

    /// The feature bits of a process that writes to an image with so many snapshots.
    pub(crate) fn marks_with(&self, snapshots: usize) -> Marks {
        self.marks_of(snapshots, self.writer.bitmaps.exist())
    }

    /// With any snapshots there are no autoclear bits of our own: QEMU 10 deletes all internal snapshots when it
    /// repairs an image with such bits that it does not know. Then compatible ones say the same, to this engine alone.
    fn marks_of(&self, snapshots: usize, bitmaps: bool) -> Marks {
        let own = Autoclear::in_use(self.log_number());
        let kept = self.kept_autoclear(bitmaps);
        match snapshots {
            0 => Marks(self.compatible().with_own(Autoclear(0)), own.with(kept)),
            _ => Marks(self.compatible().with_own(own), kept),
        }
    }

    /// The autoclear bits of others that stay true.
    fn kept_autoclear(&self, bitmaps: bool) -> Autoclear {
        let bit = |set, bit| if set { bit } else { Autoclear(0) };
        let raw = bit(self.has_raw_data(), Autoclear::RAW_DATA_FILE);
        raw.with(bit(bitmaps, Autoclear::BITMAPS))
    }

    fn compatible(&self) -> Compatible {
        let header = self.header();
        header.map_or(Compatible::default(), |header| header.compatible)
    }

    /// The number of the log that commits are noted in, 0 if there is none.
    pub(crate) fn log_number(&self) -> u64 {
        let log = self.qcow2.maps.log.as_deref();
        log.map_or(0, |log| log.number()) & Autoclear::LOG_MAX
    }

    /// Sets the feature bits, and hides the extension that leads to bitmaps unless they are kept: in one step where both lie in
    /// one sector. Otherwise the extension goes before the bit of the bitmaps. What a power cut leaves in
    /// between has the bit and no bitmaps, and is the same to us; QEMU 10 does not write to it before a
    /// check. The other way round its repair of leaks would delete the snapshots.
    async fn switch_features(&self, header: &Header, wanted: Marks) -> Result<(), Errno> {
        let removed = extension::REMOVED.to_be_bytes();
        let extension = header.extension_at(extension::BITMAPS);
        let is_kept = self.writer.bitmaps.exist();
        let hide = extension.filter(|_| !is_kept);
        let hide = hide.map(|at| (at, &removed[..]));
        let bitmaps = header.autoclear.0 & Autoclear::BITMAPS.0;
        let first = Marks(wanted.0, Autoclear(wanted.1.0 | bitmaps)).encode();
        let last = wanted.encode();
        let [first, last] = [&first, &last].map(|bytes| (field::COMPATIBLE, &bytes[..]));
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
        self.queue.barrier().await
    }

    /// Corruption was found: says so in the header, so that no program writes before a check. Best
    /// effort; the image refuses writes already.
    ///
    /// Not where the host has failed to flush: tables that it has lost read as something else, and say
    /// nothing of the disk, which is as it was at the flush before.
    pub(crate) async fn mark_corrupt(&self) {
        let Some(header) = self.header() else { return };
        if header.version == Version::V3 {
            let _held = self.writer.structure.lock().await;
            let _flushing = self.image.flushing.lock().await;
            let failed = &self.image.flush_failed;
            if failed.load(Ordering::Acquire) || self.queue.flush_host().await.is_err() {
                return;
            }
            let bits = header.incompatible.0 | CORRUPT;
            let bytes = bits.to_be_bytes();
            let fields = [(field::INCOMPATIBLE, &bytes[..])];
            if self.write_fields(&fields).await.is_ok() {
                let _ = self.queue.flush_host().await;
            }
        }
    }

    fn header(&self) -> Option<&'q Header> {
        self.image.top.header()
    }
}
