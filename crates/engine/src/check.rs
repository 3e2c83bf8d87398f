//! A check of an image that is open, while requests go on: carries out what `gaur_format::check::Check` asks for, on
//! the image as it is in memory.
//!
//! A round begins at a moment without requests (`gate.rs`) and without a pass. Every count is known then: references
//! from tables, references on their way to be counted down, and what queues were handed. From then on the clusters
//! are noted whose counts or references change (`metadata/changed.rs`), and requests go on. The check walks over the
//! tables, in the caches first and on the disk for what is not there, and says nothing about clusters that were noted.
//! Further rounds look at those alone, until none is left or [`ROUNDS_MAX`] is reached.
//!
//! What the check reads stays what it is meanwhile: snapshots, size and L1 table, because the lock on resizing is
//! held; refcount table, because a copy is taken; L2 tables, because those given up are held back. Bitmaps
//! are opened with the first change of the disk: a round in which that happens is done again.
//!
//! Crash rule: none. It writes nothing but what a flush writes.

use std::sync::Arc;

use gaur_block::{Errno, File};
use gaur_format::check::{Check, Report, Step};
use gaur_format::header::field;
use gaur_format::l1::OFFSET_MASK;

use crate::active::Active;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::layer::LayerReader;
use crate::metadata::changed::{ClusterMarks, Unsettled};
use crate::queue::Queue;
use crate::range::{ClusterRange, HostRange};
use crate::sync::atomic::Ordering;

/// Rounds after which a cluster that changes all the time is not judged.
const ROUNDS_MAX: u32 = 4;
/// Rounds that are done again because bitmaps were opened meanwhile.
const REPEATS_MAX: u32 = 2;

/// What a check of an open image has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// What is wrong; the counts of clusters are those of the first walk.
    pub report: Report,
    /// Clusters about whose counts nothing can be said, because they changed in every round.
    pub unsettled_clusters: u64,
    /// Walks over the tables.
    pub rounds: u32,
}

/// The image as it was when a round began.
struct Start {
    /// The header's cluster, with the refcount table that was in force.
    header: Vec<u8>,
    file_len: u64,
    /// The refcount table, and where it is.
    table: (Vec<u64>, HostRange),
    /// Its blocks, and the L2 tables of the disk as far as the check has come to know of them. A slice in a cache is
    /// that of a block, or a table, only here: it stays when its cluster has become something else.
    blocks: ClusterMarks,
    tables: ClusterMarks,
    /// References in memory that are to be counted down.
    held: Vec<ClusterRange>,
    /// What queues were handed.
    handed: Vec<ClusterRange>,
    changed: Arc<ClusterMarks>,
    opened: (bool, bool),
}

/// How a round has ended.
enum Round {
    /// What was found, and the clusters about which that says nothing.
    Judged(Report, Arc<ClusterMarks>),
    /// It has to be done again.
    Again,
    /// It did not begin: a machine's state is being saved.
    Saving,
}

/// Ends the watch, also when the check is given up.
struct Watching<'a, F: File>(Active<'a, F>);

impl<F: File> Drop for Watching<'_, F> {
    fn drop(&mut self) {
        let held = self.0.qcow2.maps.watch.end();
        self.0.writer.alloc.lock().unmapped.extend(held);
    }
}

impl<F: File> Queue<F> {
    /// Checks the top image of the chain. Requests of all queues go on meanwhile, but for the end of a flush when
    /// a round begins; changes of snapshots and of the size wait. Nothing is repaired.
    ///
    /// # Errors
    /// An image that is not qcow2, one that an earlier failure left unwritable, one into which a machine's state is being
    /// saved, and errors of the host. What is wrong with the image is no error.
    pub async fn check(&self, job: &Job) -> Result<Checked, ImageError> {
        if self.image.top.qcow2.is_none() {
            let text = "only qcow2 images can be checked";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        match self.active() {
            Some(active) => active.check(job).await,
            None => self.check_file(job).await,
        }
    }

    /// Checks an image that this process does not write to.
    async fn check_file(&self, job: &Job) -> Result<Checked, ImageError> {
        let reader = LayerReader::new(self.top_file()).await?;
        let header = reader.header_cluster().await?;
        let mut check = Check::new(&header, reader.len_bytes).map_err(ImageError::format)?;
        let read = async |offset, len| reader.padded(offset, len).await.ok();
        let report = walk(&mut check, job, read, || reader.len_bytes).await;
        Ok(Checked {
            report: report.map_err(|errno| self.image.explain(errno, "cannot check"))?,
            unsettled_clusters: 0,
            rounds: 1,
        })
    }
}

/// Answers a check until it is over.
async fn walk(
    check: &mut Check,
    job: &Job,
    read: impl AsyncFn(u64, u64) -> Option<Vec<u8>>,
    file_len: impl Fn() -> u64,
) -> Result<Report, Errno> {
    let mut expected = false;
    loop {
        let step = check.next();
        let left = check.tables_left();
        let is_table = left.is_some();
        match step {
            Step::Need { offset, len } => {
                if !std::mem::replace(&mut expected, is_table) {
                    job.expect(left.unwrap_or(0) as u64 * len);
                }
                job.step(if is_table { len } else { 0 })?;
                let bytes = read(offset, len).await;
                check.file_is_now(file_len());
                match bytes {
                    Some(bytes) => check.feed(&bytes),
                    None => check.fail(),
                }
            }
            Step::Done(report) => return Ok(report),
        }
    }
}

impl<F: File> Active<'_, F> {
    async fn check(&self, job: &Job) -> Result<Checked, ImageError> {
        let _held = self.writer.resizing.lock().await;
        let mut checked = Checked::default();
        let mut left: Option<Arc<ClusterMarks>> = None;
        let mut repeats = 0;
        while checked.rounds < ROUNDS_MAX {
            let (report, changed) = match self.check_round(left.clone(), job).await? {
                Round::Judged(report, changed) => (report, changed),
                Round::Saving if checked.rounds > 0 => break,
                Round::Saving => {
                    let text = "the state of a machine is being saved into the image; check it when that is over";
                    return Err(ImageError::new(ErrorKind::Locked, text));
                }
                Round::Again => {
                    repeats += 1;
                    if repeats > REPEATS_MAX {
                        break;
                    }
                    continue;
                }
            };
            checked.rounds += 1;
            if let Some(left) = left {
                changed.keep_only(&left);
                checked.report.add_findings(report);
            } else {
                checked.report = report;
            }
            checked.unsettled_clusters = changed.count();
            left = Some(changed);
            if checked.unsettled_clusters == 0 {
                break;
            }
        }
        Ok(checked)
    }

    /// A walk over all tables. `left` are the clusters that are still to be judged.
    async fn check_round(
        &self,
        left: Option<Arc<ClusterMarks>>,
        job: &Job,
    ) -> Result<Round, ImageError> {
        let fail = |errno| self.image.explain(errno, "cannot check");
        let Some(start) = self.begin_round().await.map_err(fail)? else {
            return Ok(Round::Saving);
        };
        let _watching = Watching(*self);
        let mut check = Check::new(&start.header, start.file_len).map_err(ImageError::format)?;
        let changed = Arc::clone(&start.changed);
        let again = left.is_some();
        check.follow(Arc::new(Unsettled { changed, left }), again);
        for clusters in &start.held {
            check.hold(clusters.start, clusters.len);
        }
        for clusters in &start.handed {
            check.hold_perhaps(clusters.start, clusters.len);
        }
        let read = async |offset, len| self.read_checked(&start, HostRange::new(offset, len)).await;
        let file_len = || self.writer.alloc.lock().physical_end;
        let report = walk(&mut check, job, read, file_len).await.map_err(fail)?;
        Ok(match self.opened() == start.opened {
            true => Round::Judged(report, start.changed),
            false => Round::Again,
        })
    }

    /// Whether the header says that this process writes, and whether bitmaps are open.
    fn opened(&self) -> (bool, bool) {
        let announced = self.writer.announced.load(Ordering::SeqCst);
        (announced, self.is_recording())
    }

    /// Begins to note changes, at a moment without requests and without a pass. `None` while a machine's state is being
    /// saved: no table refers to what it has taken.
    async fn begin_round(&self) -> Result<Option<Start>, Errno> {
        // So that the pass below, for which requests wait, has little to write.
        self.flush_all().await?;
        let epochs = &self.writer.epochs;
        let _closed = epochs.gate.close(|| epochs.is_empty()).await;
        let mut start = None;
        let pass = async || {
            self.write_back().await?;
            start = Some(self.note_start().await?);
            Ok(())
        };
        self.writer.flush.lead(&self.image.poison, pass).await?;
        start.ok_or(Errno::EIO)
    }

    async fn note_start(&self) -> Result<Option<Start>, Errno> {
        let geometry = self.geometry();
        let file_len = self.queue.top_file().len().await?;
        let mut header = vec![0; geometry.cluster_size().min(file_len) as usize];
        self.read_file(0, &mut header).await?;
        // A save that begins later takes clusters under this lock, when they are noted.
        let alloc = self.writer.alloc.lock();
        if self.writer.saves.load(Ordering::SeqCst) > 0 {
            return Ok(None);
        }
        let place = alloc.table_range();
        let clusters = (alloc.table_clusters as u32).to_be_bytes();
        let put = |header: &mut [u8], at: u64, bytes: &[u8]| {
            if let Some(out) = header.get_mut(at as usize..at as usize + bytes.len()) {
                out.copy_from_slice(bytes);
            }
        };
        put(
            &mut header,
            field::REFCOUNT_TABLE_OFFSET,
            &place.start.to_be_bytes(),
        );
        put(&mut header, field::REFCOUNT_TABLE_CLUSTERS, &clusters);
        let lists = [
            &alloc.unmapped,
            &alloc.durable,
            &alloc.draining,
            &alloc.releasable,
        ];
        let handed = alloc.handed.values();
        let changed = Arc::new(ClusterMarks::new(geometry.clusters_for(file_len)));
        #[cfg(feature = "broken-order")]
        let told = !self.image.breaks(crate::options::BrokenRule::Watch);
        #[cfg(not(feature = "broken-order"))]
        let told = true;
        if told {
            self.qcow2.maps.watch.begin(Arc::clone(&changed));
        }
        let clusters = geometry.clusters_for(file_len);
        let blocks = ClusterMarks::new(clusters);
        for block in alloc.table.iter().filter(|block| **block != 0) {
            blocks.set(block / geometry.cluster_size());
        }
        Ok(Some(Start {
            header,
            file_len,
            blocks,
            tables: ClusterMarks::new(clusters),
            table: (alloc.table.clone(), place),
            held: lists.into_iter().flatten().copied().collect(),
            handed: handed
                .flat_map(|handed| [handed.local, handed.tail])
                .collect(),
            changed,
            opened: self.opened(),
        }))
    }

    /// What the image has at a place: as it is in memory, and on the disk for what is not there, which is at least as
    /// new as when the round began. What has changed since is noted.
    async fn read_checked(&self, start: &Start, range: HostRange) -> Option<Vec<u8>> {
        let (table, place) = &start.table;
        if range.start >= place.start && range.end() <= place.end() {
            return Some(entries_at(range, place.start, |index| {
                table.get(index as usize).copied()
            }));
        }
        let l1 = &self.qcow2.maps.l1;
        let cluster = |offset: u64| offset / self.geometry().cluster_size();
        if range.start >= l1.range().start && range.end() <= l1.range().end() {
            return Some(entries_at(range, l1.range().start, |index| {
                let raw = l1.get(index);
                if raw & OFFSET_MASK != 0 {
                    start.tables.set(cluster(raw & OFFSET_MASK));
                }
                Some(raw)
            }));
        }
        let mut bytes = vec![0; range.len as usize];
        self.read_file(range.start, &mut bytes).await.ok()?;
        if start.blocks.contains(cluster(range.start)) {
            let alloc = self.writer.alloc.lock();
            let slice_bytes = alloc.blocks.slice_bytes() as usize;
            for (at, out) in (range.start..)
                .step_by(slice_bytes)
                .zip(bytes.chunks_exact_mut(slice_bytes))
            {
                if let Some(cached) = alloc.blocks.get(at) {
                    out.copy_from_slice(cached);
                }
            }
        }
        if start.tables.contains(cluster(range.start)) {
            let slices = &self.qcow2.maps.slices;
            let slice_bytes = slices.slice_bytes() as usize;
            for (at, out) in (range.start..)
                .step_by(slice_bytes)
                .zip(bytes.chunks_exact_mut(slice_bytes))
            {
                slices.peek(at, out);
            }
        }
        Some(bytes)
    }
}

/// The bytes of a piece of a table that begins at host offset `start`.
fn entries_at(range: HostRange, start: u64, entry: impl Fn(u64) -> Option<u64>) -> Vec<u8> {
    let first = (range.start - start) / 8;
    let entries = (first..first + range.len / 8).map(|index| entry(index).unwrap_or(0));
    entries.flat_map(u64::to_be_bytes).collect()
}

#[cfg(test)]
mod tests;
