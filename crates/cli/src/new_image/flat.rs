//! Files in which a disk lies in one piece: raw ones, and LUKS containers with their header before it.

use gaur_block::File;
use gaur_engine::{Format, Job};
use gaur_format::plan::{LuksArea, Preallocation};
use gaur_reactor::{BlockingFile, block_on};

use super::NewImage;
use crate::failure::Failure;
use crate::interrupt;
use crate::new_luks::LuksChoice;
use crate::notice::is_qemu;

/// The unit in which a container is encrypted.
const SECTOR_BYTES: u64 = 512;

impl NewImage {
    /// A container has whole sectors, and so has what QEMU's program makes.
    pub(super) fn round_flat_size(&mut self) {
        if self.format == Format::Luks || is_qemu() {
            let size = &mut self.plan.size_bytes;
            // A size without a multiple is refused as too large.
            *size = size.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(*size);
        }
    }

    /// Bytes of a file in which a disk of this size lies in one piece.
    pub fn flat_bytes(&self, size_bytes: u64) -> u64 {
        let header = self.luks.as_ref().map(LuksChoice::measured);
        size_bytes.saturating_add(header.map_or(0, |header| header.len_bytes))
    }

    /// Makes a file in which the disk lies in one piece, behind its header if it has one.
    pub(super) fn make_flat(
        &self,
        file: &BlockingFile,
        header: Option<&LuksArea>,
        job: &Job,
    ) -> Result<(), Failure> {
        let fail = |what: &str, errno| Failure::system(&self.name, what, errno);
        let bytes = self.flat_bytes(self.plan.size_bytes);
        if !file.limits().resizable {
            let len = block_on(file.len()).map_err(|errno| fail("cannot tell its size", errno))?;
            if len < bytes {
                let message = format!("the device has {len} bytes, {bytes} are needed");
                return Err(Failure::about(&self.name, message));
            }
            return header.map_or(Ok(()), |header| self.write_header(file, header));
        }
        block_on(file.set_len(bytes)).map_err(|errno| fail("cannot set its length", errno))?;
        match self.plan.preallocation {
            Preallocation::Falloc => block_on(file.write_zeroes_at(0, bytes, false))
                .map_err(|errno| fail("cannot allocate its space", errno))?,
            Preallocation::Full => self.fill(file, bytes, job)?,
            _ => {}
        }
        if let Some(header) = header {
            self.write_header(file, header)?;
        }
        block_on(file.flush()).map_err(|errno| fail("cannot flush", errno))
    }

    /// Writes the header of a container and its first key slot. What lies behind, up to the disk, are free slots.
    fn write_header(&self, file: &BlockingFile, header: &LuksArea) -> Result<(), Failure> {
        const BLOCK_BYTES: usize = 4096;
        let fail = |errno| Failure::system(&self.name, "cannot write the luks header", errno);
        let mut bytes = file.buffer(header.bytes.len().next_multiple_of(BLOCK_BYTES));
        bytes[..header.bytes.len()].copy_from_slice(&header.bytes);
        block_on(file.write_at(0, gaur_block::Source::memory(&bytes))).map_err(fail)?;
        block_on(file.flush()).map_err(fail)
    }

    fn fill(&self, file: &BlockingFile, bytes: u64, job: &Job) -> Result<(), Failure> {
        let zeros = file.buffer(1 << 20);
        let mut offset = 0;
        while offset < bytes {
            interrupt::check(job)?;
            let len = (bytes - offset).min(zeros.len() as u64);
            let part = gaur_block::Source::memory(&zeros[..len as usize]);
            block_on(file.write_at(offset, part))
                .map_err(|errno| Failure::system(&self.name, "cannot write zeros", errno))?;
            offset += len;
        }
        Ok(())
    }
}
