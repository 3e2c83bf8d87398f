//! The external data file of the image that is written to: what goes to it, apart from writes of mapped data.
//!
//! A guest cluster has one place in it, its guest offset, which no refcount counts and no other cluster
//! ever gets. So what a mapping gave up needs no count to go down; its space becomes a hole after the pass that made
//! that durable, as holes inside clusters do (`punch`). Its other bytes are whatever they were: a part of
//! a cluster that gets its first data is always filled. It gets it in the same place again, so a mapping is given up only when
//! writes in place are over, which are noted for that (`Claims::note_in_place`).
//!
//! A *raw* data file is the disk by itself. Zeros and discards go to the file then, and mappings stay. One that is
//! encrypted is nobody's disk by itself, whatever the header says, and is treated like any other.
//!
//! The space of an encrypted data file stays: a hole may be made when the mapping on the disk has data there again, that
//! is zeroed in memory, and after a power cut it would be noise.
//!
//! The file ends where the disk does, encrypted ones with the sector, so nothing behind the end of the disk is written.

use gaur_block::{Errno, File};
use gaur_luks::SECTOR_BYTES;

use crate::active::Active;
use crate::align;
use crate::error::ImageError;
use crate::image::DataFile;
use crate::options::FreedBy;
use crate::queue::Unmap;
use crate::range::GuestRange;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Why there are no snapshots of an image with a data file.
pub(crate) const NO_SNAPSHOTS: &str =
    "the image has an external data file, of which there are no internal snapshots";

/// A growth of the disk, which is over when this is dropped.
pub(crate) struct Growing<'a>(&'a AtomicU64);

impl Drop for Growing<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl<F: File> Active<'_, F> {
    /// Whether the data file is the disk by itself.
    pub(crate) fn has_raw_data(&self) -> bool {
        self.image.data_file().is_some_and(DataFile::is_raw) && !self.is_encrypted()
    }

    /// Where the data file of a disk of `size` bytes ends.
    fn data_file_end(&self, size: u64) -> u64 {
        match self.is_encrypted() {
            true => size.next_multiple_of(SECTOR_BYTES as u64),
            false => size,
        }
    }

    /// Where data that would end at guest offset `end` ends: in a data file with the disk, and while that grows with
    /// what it will be.
    pub(crate) fn data_end(&self, end: u64) -> u64 {
        let image = self.image;
        match self.geometry().data_file() {
            true => end.min(
                image
                    .size_bytes()
                    .max(image.growing_to.load(Ordering::Acquire)),
            ),
            false => end,
        }
    }

    /// From now on requests write to the data file up to the end of a disk of `new` bytes. Those that left out what is
    /// behind today's end are over: who looks at the mapping finds what they have written.
    pub(crate) async fn begin_growth(&self, new: u64) -> Growing<'_> {
        let epochs = &self.writer.epochs;
        let _closed = epochs.gate.close(|| epochs.is_empty()).await;
        self.image.growing_to.store(new, Ordering::Release);
        Growing(&self.image.growing_to)
    }

    /// Writes zeros to a raw data file, whatever is mapped.
    pub(crate) async fn zero_raw_data(&self, range: GuestRange, unmap: Unmap) -> Result<(), Errno> {
        let (file, pool) = (self.queue.data_file(), &self.queue.pool);
        let may_unmap = unmap == Unmap::Allowed && self.image.options.gives_back(FreedBy::Request);
        let range = range.start..range.end();
        align::write_zeroes(file, pool, self.image.data_locks(), range, may_unmap).await
    }

    /// Gives space of a raw data file back, where the file reads as zeros then: what is not mapped does too.
    pub(crate) async fn discard_raw_data(&self, range: GuestRange) -> Result<(), Errno> {
        let file = self.queue.data_file();
        let wanted = self.image.options.gives_back(FreedBy::Request);
        if !wanted || !file.limits().discard_zeroes {
            return Ok(());
        }
        let range = range.start..range.end();
        match align::discard(file, self.image.data_locks(), range).await {
            // A discard is a hint.
            Err(Errno::EOPNOTSUPP) => Ok(()),
            done => done,
        }
    }

    /// Makes the data file long enough for a disk of `new` bytes, and zero behind the end of today's as far as that
    /// is not left to the mapping.
    pub(crate) async fn grow_data_file(&self, new: u64) -> Result<(), Errno> {
        if !self.geometry().data_file() {
            return Ok(());
        }
        let (file, pool, locks) = (
            self.queue.data_file(),
            &self.queue.pool,
            self.image.data_locks(),
        );
        let (old, len) = (self.image.size_bytes(), file.len().await?);
        if len < new {
            if !file.limits().resizable {
                return Err(Errno::ENOSPC);
            }
            file.set_len(self.data_file_end(new)).await?;
        }
        if self.is_encrypted() {
            // Zeros in the file would be noise; the mapping says what is zero.
            return Ok(());
        }
        let cluster_end = old.next_multiple_of(self.geometry().cluster_size());
        let upto = match self.has_raw_data() {
            true => new,
            false => cluster_end.min(new),
        };
        // What the file did not have before reads as zeros.
        let stale = old..upto.min(len).max(old);
        align::write_zeroes(file, pool, locks, stale, true).await
    }

    /// Cuts the data file off behind the end of a disk of `new` bytes. The disk has that size already, so what
    /// cannot be cut off stays.
    pub(crate) async fn shrink_data_file(&self, new: u64) {
        let file = self.queue.data_file();
        if !self.geometry().data_file() || !file.limits().resizable {
            return;
        }
        let end = self.data_file_end(new);
        if file.len().await.is_ok_and(|len| len > end) {
            let _ = file.set_len(end).await;
        }
    }

    /// Cuts the data file back to the size of the disk: where only whole blocks can be written, the last
    /// one may have lengthened it.
    pub(crate) async fn trim_data_file(&self) -> Result<(), ImageError> {
        let fail = |errno| ImageError::io(errno, "cannot trim the end of the data file");
        let file = self.queue.data_file();
        let end = self.data_file_end(self.image.size_bytes());
        let limits = file.limits();
        let block = u64::from(limits.request_alignment).max(1);
        if !self.geometry().data_file() || !limits.resizable || block == 1 {
            return Ok(());
        }
        let len = file.len().await.map_err(fail)?;
        if len > end && len <= end.next_multiple_of(block) {
            file.set_len(end).await.map_err(fail)?;
            file.flush().await.map_err(fail)?;
        }
        Ok(())
    }
}
