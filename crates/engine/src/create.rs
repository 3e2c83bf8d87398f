//! Making an image.
//!
//! The plan (`gaur_format::plan`) says what stands where; this writes it. Crash rule: the header is
//! written last, after a flush of everything else, so what a power cut leaves is either a whole image
//! or a file that is no image. On a block device the header of an image that stood there before goes
//! first, because its tables are about to be overwritten.

use std::ops::Range;

use gaur_block::{File, Source};
use gaur_format::plan::{self, CreateOptions, Plan, Preallocation};

use crate::align;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::pool::Pool;
use crate::sector_locks::SectorLocks;

/// How far zeros are written before the first plan write, on a file that keeps its old content.
const OLD_HEADER_BYTES: u64 = 64 << 10;
/// Zeros written between two looks at whether the image is still wanted.
const FILL_BYTES: u64 = 8 << 20;

struct Creation<'a, F: File> {
    file: &'a F,
    pool: Pool<F>,
    locks: SectorLocks,
    job: &'a Job,
}

/// Makes `file` an empty qcow2 image. Whatever it held is lost. When this returns `Ok` the image is
/// durable. A file of fixed length (a block device) must be long enough for the tables, and with
/// preallocation for the data too. If `job` is cancelled the file is no image.
pub async fn create<F: File>(
    file: &F,
    options: &CreateOptions,
    job: &Job,
) -> Result<(), ImageError> {
    let plan = plan::create(options).map_err(ImageError::format)?;
    if file.limits().read_only {
        return Err(ImageError::new(
            ErrorKind::ReadOnly,
            "the file of a new image is read-only",
        ));
    }
    let creation = Creation {
        file,
        pool: Pool::new(),
        locks: SectorLocks::default(),
        job,
    };
    if file.limits().resizable {
        creation.make_room(&plan).await?;
    } else {
        creation.clear_room(&plan).await?;
    }
    // Space for a data file is a matter of that file.
    match options.preallocation {
        _ if options.data_file.is_some() => {}
        Preallocation::Off | Preallocation::Metadata => {}
        Preallocation::Falloc => creation.zero(0..plan.len_bytes, false).await?,
        Preallocation::Full => creation.fill(0..plan.len_bytes).await?,
    }
    creation.write(&plan).await
}

impl<F: File> Creation<'_, F> {
    /// Gives a regular file its length; all of it reads as zeros.
    async fn make_room(&self, plan: &Plan) -> Result<(), ImageError> {
        for len_bytes in [0, plan.len_bytes] {
            self.file.set_len(len_bytes).await.map_err(|errno| {
                ImageError::io(
                    errno,
                    format!("cannot set the length of the file to {len_bytes}"),
                )
            })?;
        }
        Ok(())
    }

    /// Makes everything that the plan does not write read as zeros, on a file of fixed length.
    async fn clear_room(&self, plan: &Plan) -> Result<(), ImageError> {
        let len_bytes = self
            .file
            .len()
            .await
            .map_err(|errno| ImageError::io(errno, "cannot tell the length of the file"))?;
        if len_bytes < plan.len_bytes {
            let needed = plan.len_bytes;
            let text = format!("the image needs {needed} bytes, the device has {len_bytes}");
            return Err(ImageError::new(ErrorKind::NoSpace, text));
        }
        self.zero(0..OLD_HEADER_BYTES.min(plan.len_bytes), true)
            .await?;
        self.flush().await?;
        let mut written: Vec<Range<u64>> = plan
            .writes
            .iter()
            .map(|(offset, bytes)| offset.0..offset.0 + bytes.len() as u64)
            .collect();
        written.sort_by_key(|range| range.start);
        let mut start = 0;
        for range in written {
            self.zero(start..range.start.max(start), true).await?;
            start = start.max(range.end);
        }
        self.zero(start..plan.len_bytes.max(start), true).await
    }

    async fn zero(&self, range: Range<u64>, may_unmap: bool) -> Result<(), ImageError> {
        align::write_zeroes(self.file, &self.pool, &self.locks, range.clone(), may_unmap)
            .await
            .map_err(|errno| failed_write(errno, &range))
    }

    async fn fill(&self, range: Range<u64>) -> Result<(), ImageError> {
        self.job.expect(range.end - range.start);
        let mut start = range.start;
        while start < range.end {
            let piece = start..range.end.min(start + FILL_BYTES);
            align::write_zero_bytes(self.file, &self.pool, &self.locks, piece.clone())
                .await
                .map_err(|errno| failed_write(errno, &piece))?;
            start = piece.end;
            self.step(piece.end - piece.start)?;
        }
        Ok(())
    }

    fn step(&self, bytes: u64) -> Result<(), ImageError> {
        let step = self.job.step(bytes);
        step.map_err(|errno| ImageError::io(errno, "cannot make the image"))
    }

    async fn write(&self, plan: &Plan) -> Result<(), ImageError> {
        let (header, tables) = match plan.writes.split_last() {
            Some((header, tables)) => (std::slice::from_ref(header), tables),
            None => (&[][..], &[][..]),
        };
        for part in [tables, header] {
            for (offset, bytes) in part {
                self.step(0)?;
                let range = offset.0..offset.0 + bytes.len() as u64;
                let source = Source::memory(bytes);
                align::write(self.file, &self.pool, &self.locks, offset.0, source)
                    .await
                    .map_err(|errno| failed_write(errno, &range))?;
            }
            self.flush().await?;
        }
        Ok(())
    }

    async fn flush(&self) -> Result<(), ImageError> {
        self.file
            .flush()
            .await
            .map_err(|errno| ImageError::io(errno, "cannot flush the new image"))
    }
}

fn failed_write(errno: gaur_block::Errno, range: &Range<u64>) -> ImageError {
    let Range { start, end } = range;
    ImageError::io(
        errno,
        format!("cannot write bytes {start} to {end} of the new image"),
    )
}

#[cfg(test)]
mod tests;
