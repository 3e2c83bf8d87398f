//! The checker's state machine: the order of its stages, and its public interface.

use alloc::borrow::Cow;
use alloc::vec::Vec;

use crate::check::bitmaps::{Bitmaps, DirectoryChange};
use crate::check::mapping::{L1Tables, L2Tables, SharedTable, UseCounts, check_l2_table};
use crate::check::reader::Range;
use crate::check::refcounts::Refcounts;
use crate::check::report::Report;
use crate::check::snapshots::{SnapshotTable, TableChange};
use crate::check::tally::Tally;
use crate::error::{Error, ErrorKind};
use crate::header::Header;
use crate::limit;
use crate::snapshot::Snapshot;

/// What the checker wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read `len` bytes at `offset` of the file and [`Check::feed`] them. At most 2 MiB, except for
    /// a snapshot table whose entries are longer than that. Bytes after the end of the file are
    /// zeros, and may be left out.
    Need {
        /// First byte.
        offset: u64,
        /// Number of bytes, at least 1.
        len: u64,
    },
    /// The check is over.
    Done(Report),
}

#[derive(Clone, Debug)]
pub(super) enum Stage {
    Snapshots(SnapshotTable),
    Refcounts,
    L1(L1Tables),
    L2(L2Tables, Option<(u64, UseCounts)>),
    Bitmaps(Bitmaps),
    Over,
}

/// Where an L1 table is.
#[derive(Clone, Copy, Debug)]
pub(super) struct L1Place {
    pub(super) offset: u64,
    pub(super) entries: u32,
    /// It maps the disk of today, not that of a snapshot.
    pub(super) active: bool,
}

/// As many bytes as were asked for: what is missing is zeros.
pub(super) fn padded(bytes: &[u8], len: u64) -> Cow<'_, [u8]> {
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    match bytes.get(..len) {
        Some(all) => Cow::Borrowed(all),
        None => {
            let mut padded = bytes.to_vec();
            padded.resize(len, 0);
            Cow::Owned(padded)
        }
    }
}

/// A check in progress.
#[derive(Clone, Debug)]
pub struct Check {
    pub(super) header: Header,
    pub(super) tally: Tally,
    pub(super) refcounts: Refcounts,
    /// Where the L1 tables are, the active one first.
    pub(super) l1_tables: Vec<L1Place>,
    /// Snapshots whose L1 tables wait until the refcounts are read.
    snapshots: Vec<Snapshot>,
    /// The snapshot table that a repair puts in place of a damaged one.
    pub(super) table_change: Option<TableChange>,
    /// The same for the directory of bitmaps.
    pub(super) directory_change: Option<DirectoryChange>,
    /// Entries of the active L1 table that share their L2 tables.
    pub(super) shared_tables: Vec<SharedTable>,
    /// These changes are wanted.
    salvage: bool,
    pub(super) stage: Stage,
    /// What was asked for and not yet fed.
    pub(super) pending: Option<Range>,
}

impl Check {
    /// Begins a check of a file of `file_len` bytes; `header` is cluster 0 of it (see
    /// [`Header::parse`]). Fails when the header cannot be understood or the file is too long.
    pub fn new(header: &[u8], file_len: u64) -> Result<Check, Error> {
        let header = Header::parse(header)?;
        header.check_features()?;
        let mut tally = Tally::new(&header, file_len);
        if tally.clusters > limit::CHECK_CLUSTERS_MAX {
            return Err(Error::new(
                ErrorKind::TooLarge,
                "image",
                "file is too long to be checked",
            )
            .found(format_args!("{} clusters", tally.clusters))
            .allowed(alloc::format!(
                "up to {} clusters",
                limit::CHECK_CLUSTERS_MAX
            )));
        }
        let cluster = Range::new(0, tally.geometry.cluster_size());
        tally.refer(cluster, 1, format_args!("header"));
        Ok(Check {
            refcounts: Refcounts::new(&header, file_len),
            stage: Stage::Snapshots(SnapshotTable::new(&header)),
            snapshots: Vec::new(),
            table_change: None,
            directory_change: None,
            shared_tables: Vec::new(),
            salvage: false,
            l1_tables: alloc::vec![L1Place {
                offset: header.l1_table_offset.0,
                entries: header.l1_size,
                active: true,
            }],
            header,
            tally,
            pending: None,
        })
    }

    /// The same check for a repair: what the data path reads counts as a reference whatever QEMU's checker
    /// makes of it. With `salvage` the snapshots and bitmaps that the repair drops have none.
    pub(super) fn for_repair(header: &[u8], file_len: u64, salvage: bool) -> Result<Check, Error> {
        let mut check = Check::new(header, file_len)?;
        check.tally.count_unlisted = true;
        check.salvage = salvage;
        if salvage {
            check.stage = Stage::Snapshots(SnapshotTable::salvaging(&check.header));
        }
        Ok(check)
    }

    /// Says that the snapshot table has so many more entries, which are not looked at.
    pub(super) fn lose_snapshots(&mut self, more: u32) {
        if let Stage::Snapshots(table) = &mut self.stage {
            table.lose(more);
        }
    }

    /// The header of the image being checked.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What the checker wants now. The same again when nothing was fed since.
    #[expect(
        clippy::should_implement_trait,
        reason = "each step must be answered, no iterator"
    )]
    pub fn next(&mut self) -> Step {
        loop {
            if let Some(Range { offset, len }) = self.pending {
                return Step::Need { offset, len };
            }
            if self.tally.stopped {
                self.stage = Stage::Over;
            }
            if matches!(self.stage, Stage::Over) {
                return Step::Done(self.tally.report.clone());
            }
            self.pending = self.wanted();
            if self.pending.is_none() && !self.tally.stopped {
                self.advance();
            }
        }
    }

    /// Hands in the bytes the last [`Step::Need`] asked for. What is missing counts as zeros, what
    /// is too much is ignored, as is a call without a request before it.
    pub fn feed(&mut self, bytes: &[u8]) {
        let Some(Range { len, .. }) = self.pending.take() else {
            return;
        };
        let bytes = padded(bytes, len);
        match &mut self.stage {
            Stage::Snapshots(stage) => stage.feed(&bytes),
            Stage::Refcounts => self.refcounts.feed(&mut self.tally, &bytes),
            Stage::L1(stage) => stage.feed(&mut self.tally, &bytes),
            Stage::L2(_, current) => {
                if let Some((offset, uses)) = current.take() {
                    check_l2_table(&mut self.tally, offset, uses, &bytes);
                }
            }
            Stage::Bitmaps(stage) => stage.feed(&mut self.tally, &bytes),
            Stage::Over => {}
        }
    }

    /// Says that the last read failed, instead of feeding it: that part counts as a check error and
    /// the check goes on where it can.
    pub fn fail(&mut self) {
        let Some(Range { offset, len }) = self.pending.take() else {
            return;
        };
        let place = format_args!("cannot read {len} bytes at {offset:#x}");
        match &mut self.stage {
            Stage::Snapshots(_) => return self.tally.stop(place),
            Stage::Refcounts => self.refcounts.failed(&mut self.tally, len),
            Stage::L1(stage) => stage.failed(len),
            Stage::L2(_, current) => *current = None,
            Stage::Bitmaps(stage) => stage.failed(len),
            Stage::Over => {}
        }
        self.tally.error(place);
    }

    /// The next read of this stage, `None` when it is through.
    fn wanted(&mut self) -> Option<Range> {
        match &mut self.stage {
            Stage::Snapshots(stage) => stage.wanted(&mut self.tally),
            Stage::Refcounts => self.refcounts.wanted(&mut self.tally),
            Stage::L1(stage) => stage.wanted(&mut self.tally),
            Stage::L2(tables, current) => {
                *current = tables.pop_first();
                let len = self.tally.geometry.cluster_size();
                current.map(|(offset, _)| Range { offset, len })
            }
            Stage::Bitmaps(stage) => stage.wanted(&mut self.tally),
            Stage::Over => None,
        }
    }

    fn advance(&mut self) {
        let tally = &mut self.tally;
        self.stage = match core::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Snapshots(stage) => {
                (self.snapshots, self.table_change) = stage.finish(tally);
                let places = self.snapshots.iter().map(|snapshot| L1Place {
                    offset: snapshot.l1_table_offset.0,
                    entries: snapshot.l1_size,
                    active: false,
                });
                self.l1_tables.extend(places);
                Stage::Refcounts
            }
            Stage::Refcounts => {
                let snapshots = core::mem::take(&mut self.snapshots);
                Stage::L1(L1Tables::new(&self.header, snapshots, tally))
            }
            Stage::L1(stage) => {
                let found;
                (found, self.shared_tables) = stage.finish();
                Stage::L2(found, None)
            }
            Stage::L2(..) => {
                tally.stage_bytes = 0;
                Stage::Bitmaps(Bitmaps::new(&self.header, tally, self.salvage))
            }
            Stage::Bitmaps(stage) => {
                self.directory_change = stage.finish();
                self.finish();
                Stage::Over
            }
            Stage::Over => Stage::Over,
        };
    }

    fn finish(&mut self) {
        let tally = &mut self.tally;
        if let Some(luks) = self.header.encryption() {
            let range = Range::new(luks.offset.0, luks.len_bytes);
            tally.refer(range, 1, format_args!("luks header"));
        }
        self.refcounts.refer_to_blocks(tally);
        Refcounts::compare(tally);
    }
}
