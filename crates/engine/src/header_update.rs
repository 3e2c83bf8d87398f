//! Changes of the header of an open image: always within one sector, so that a power cut leaves
//! either the old header or the new one (O5).

use gaur_block::{Errno, File, Source, Target};
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
        let result = self.write_header(at, bytes).await;
        result.inspect_err(|errno| self.image.poison(*errno))?;
        self.barrier().await
    }

    async fn write_header(&self, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        let file = self.top_file();
        let mut sector = self.pool.take(file, SECTOR_BYTES as usize);
        align::read(file, &self.pool, 0, Target::Memory(&mut sector)).await?;
        let at = at as usize;
        let slot = sector.get_mut(at..at + bytes.len());
        slot.ok_or(Errno::EIO)?.copy_from_slice(bytes);
        align::write(
            file,
            &self.pool,
            &self.image.locks,
            0,
            Source::Memory(&sector),
        )
        .await
    }

    /// Before the first change: flushes, because whoever had the image before may have been killed before
    /// he could, and what is free by the tables that were read must be free by those on the disk (O3).
    /// And clears the autoclear bits, because this engine does not keep what they stand for (persistent
    /// bitmaps) up to date (O6).
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
            && header.autoclear.0 != 0
        {
            self.switch_header(field::AUTOCLEAR, &0_u64.to_be_bytes())
                .await?;
        }
        writer.announced.store(true, Ordering::Release);
        Ok(())
    }

    /// Corruption was found: says so in the header, so that nobody writes before a check. Best
    /// effort; the image refuses writes already.
    pub(crate) async fn mark_corrupt(&self) {
        let Some(writer) = &self.image.writer else {
            return;
        };
        let Some(header) = self.header() else { return };
        if header.version == Version::V3 {
            let _held = writer.structure.lock().await;
            let bits = header.incompatible.0 | CORRUPT;
            let bytes = bits.to_be_bytes();
            if self.write_header(field::INCOMPATIBLE, &bytes).await.is_ok() {
                let _ = self.top_file().flush().await;
            }
        }
    }

    fn header(&self) -> Option<&Header> {
        self.image.layers.first()?.header()
    }
}
