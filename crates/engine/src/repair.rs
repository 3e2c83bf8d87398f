//! Repair of an image that nothing has open: carries out what `gaur_format::check::Repair` plans.
//!
//! It works on the file and not on an opened image, because what needs repair often cannot be opened.
//! Crash rule: the machine's; see there.

use gaur_block::{File, Source};
use gaur_format::check::{Repair, RepairMode, RepairStep, Repaired, TablePart};
use gaur_format::feature::Incompatible;

use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::layer::{LayerReader, check_supported};
#[cfg(feature = "broken-order")]
use crate::options::BrokenRule;
use crate::{align, pool::Pool, sector_locks::SectorLocks};

/// Checks the qcow2 image in `file` and repairs what `mode` says; with `dry_run` it is only told what would
/// be done. The file must be open for writing, and nobody else may be using it. A job that is cancelled, or a
/// failure, leaves an image that is no worse than before.
///
/// # Errors
/// Those of the host, and an image whose header cannot be understood. That an image is still damaged is no
/// error; the last check in [`Repaired`] says so.
pub async fn repair<F: File>(
    file: &F,
    mode: RepairMode,
    dry_run: bool,
    job: &Job,
) -> Result<Repaired, ImageError> {
    repair_on(file, mode, dry_run, job, 1, |_| {}).await
}

/// As [`repair`]; `look` looks at the tables that map the disk, on up to `threads` threads, each time that the image is
/// checked. It may leave some out when the job is cancelled.
///
/// # Errors
/// Those of [`repair`].
pub async fn repair_on<F: File>(
    file: &F,
    mode: RepairMode,
    dry_run: bool,
    job: &Job,
    threads: usize,
    look: impl FnMut(&mut [TablePart]),
) -> Result<Repaired, ImageError> {
    carry_out(file, (mode, dry_run), job, threads, look, true).await
}

/// [`repair`] with one rule of the write order broken, for tests of the tests.
///
/// # Errors
/// Those of [`repair`].
#[cfg(feature = "broken-order")]
pub async fn repair_breaking<F: File>(
    file: &F,
    mode: RepairMode,
    job: &Job,
    broken: Option<BrokenRule>,
) -> Result<Repaired, ImageError> {
    let flushes = broken != Some(BrokenRule::O5);
    carry_out(file, (mode, false), job, 1, |_| {}, flushes).await
}

/// Without `flushes` they are left out.
async fn carry_out<F: File>(
    file: &F,
    (mode, dry_run): (RepairMode, bool),
    job: &Job,
    threads: usize,
    mut look: impl FnMut(&mut [TablePart]),
    flushes: bool,
) -> Result<Repaired, ImageError> {
    let cancelled = |errno| ImageError::io(errno, "the repair was cancelled");
    let reader = LayerReader::new(file).await?;
    let cluster0 = reader.header_cluster().await?;
    let mut repair =
        Repair::new(&cluster0, reader.len_bytes, mode, dry_run).map_err(ImageError::format)?;
    job.expect(reader.len_bytes);
    let (pool, locks) = (Pool::new(), SectorLocks::default());
    loop {
        let step = repair.next();
        let mut parts = repair.split(threads);
        if !parts.is_empty() {
            look(&mut parts);
            job.step(0).map_err(cancelled)?;
            repair.join(parts);
            continue;
        }
        let read = match step {
            RepairStep::Need { len, .. } => len,
            _ => 0,
        };
        job.step(read).map_err(cancelled)?;
        match step {
            RepairStep::Need { offset, len } => match reader.padded(offset, len).await {
                Ok(bytes) => repair.feed(&bytes),
                Err(_) => repair.fail(),
            },
            RepairStep::Write { offset, bytes } => {
                let source = Source::memory(&bytes);
                align::write(file, &pool, &locks, offset, source)
                    .await
                    .map_err(|errno| {
                        let len = bytes.len();
                        let what =
                            format!("cannot repair: {len} bytes at {offset} are not written");
                        ImageError::io(errno, what)
                    })?;
            }
            RepairStep::Flush if !flushes => {}
            RepairStep::Flush => {
                let flushed = file.flush().await;
                flushed.map_err(|errno| ImageError::io(errno, "cannot repair: flush failed"))?;
            }
            RepairStep::Done(repaired) => return Ok(*repaired),
        }
    }
}

/// Repairs an image that is marked dirty: its refcounts may be too low. Whether there was anything to do.
pub(crate) async fn repair_if_dirty<F: File>(file: &F) -> Result<bool, ImageError> {
    let header = LayerReader::new(file).await?.header().await?;
    check_supported(&header, true)?;
    if !header.incompatible.has(Incompatible::DIRTY) {
        return Ok(false);
    }
    let repaired = repair(file, RepairMode::Unclosed, false, &Job::default()).await?;
    if repaired.after.only_leaks() {
        return Ok(true);
    }
    let report = repaired.after;
    let text = format!(
        "image was not closed, and {} corruptions and {} check errors are left after its repair; open \
         it read-only",
        report.corruptions, report.check_errors
    );
    Err(ImageError::new(ErrorKind::Corrupt, text))
}

#[cfg(test)]
mod tests;
