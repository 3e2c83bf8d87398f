//! Repair: a machine on top of the checker that says which bytes of an image to read and to write.
//!
//! Rule one: data that reads today still reads, and an interruption after any step leaves the image no
//! worse. So the order is
//!
//! ```text
//! check
//! raise   refcounts below the references go up; damaged tables and blocks are built anew behind
//!         the end of the file, and one write of the header switches to them
//! FLUSH
//! tables  a new snapshot table or directory of bitmaps in place of a damaged one is written behind the end of the
//!         file, FLUSH, one write of the header switches to it, FLUSH, check again
//! fix     entries that are certainly wrong; copied flags that may not be set are cleared
//! FLUSH   check again, if entries changed
//! lower   refcounts above the references go down, if every reference is known
//! FLUSH
//! copied  copied flags that are missing are set
//! FLUSH   check again
//! header  the dirty and the corrupt bit go when the image is sound, then FLUSH
//! ```
//!
//! Nothing writes to a cluster that two structures claim. What is not repaired stays as it is, and the last
//! check reports it. Memory is that of the check and the list of L2 tables.

mod counts;
mod entries;
mod rebuild;
mod tables;
mod walk;

use alloc::borrow::ToOwned;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::bytes;
use crate::check::machine::{Check, Step};
use crate::check::parts::TablePart;
use crate::check::reader::Range;
use crate::check::repair::counts::CountsPass;
use crate::check::repair::entries::Aim;
use crate::check::repair::rebuild::Rebuild;
use crate::check::repair::tables::{NewTables, Switch};
use crate::check::repair::walk::Walk;
use crate::check::report::{Miscount, Report};
use crate::error::Error;
use crate::extension;
use crate::feature::{Autoclear, Compatible, Incompatible};
use crate::geometry::Version;
use crate::header::{Header, field};
use crate::limit;

/// Writes start and end at multiples of this: what a power cut cannot tear.
const SECTOR_BYTES: usize = 512;

/// What is repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepairMode {
    /// Refcounts above the references go down.
    Leaks,
    /// Whatever can be repaired without a guess, but no snapshot and no bitmap is dropped: for an image that was not closed, which
    /// nobody has asked to repair.
    Unclosed,
    /// Whatever can be repaired without a guess. What cannot be read is dropped.
    All,
}

/// What the machine wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepairStep {
    /// Read, as in [`Step::Need`], and [`Repair::feed`].
    Need {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Write. It may extend the file.
    Write {
        /// First byte.
        offset: u64,
        /// What to store there.
        bytes: Vec<u8>,
    },
    /// Make everything written so far durable.
    Flush,
    /// The repair is over.
    Done(Box<Repaired>),
}

/// What a repair has done, or would do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// The check before it.
    pub before: Report,
    /// The check after it; the same when nothing was written.
    pub after: Report,
    /// Clusters whose refcount went down.
    pub leaks_fixed: u64,
    /// Refcounts that went up, entries that changed, refcount structures that were built anew.
    pub corruptions_fixed: u64,
    /// What was done, at most [`limit::CHECK_FINDINGS_MAX`].
    pub actions: Vec<Action>,
    /// Actions that were counted but not kept.
    pub actions_dropped: u64,
    /// The dirty or the corrupt bit was cleared.
    pub marks_cleared: bool,
}

/// One thing that a repair has done, or would do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Action {
    /// What and where, one line in lower case.
    pub text: String,
    /// The counts as they were, where the refcount of a cluster was set.
    pub miscount: Option<Miscount>,
}

impl From<String> for Action {
    fn from(text: String) -> Action {
        Action {
            text,
            miscount: None,
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(out)
    }
}

impl Repaired {
    fn note<A: Into<Action>>(&mut self, action: impl FnOnce() -> A) {
        match self.actions.len() < limit::CHECK_FINDINGS_MAX {
            true => self.actions.push(action().into()),
            false => self.actions_dropped = self.actions_dropped.saturating_add(1),
        }
    }

    fn corruption<A: Into<Action>>(&mut self, action: impl FnOnce() -> A) {
        self.corruptions_fixed = self.corruptions_fixed.saturating_add(1);
        self.note(action);
    }

    fn leak<A: Into<Action>>(&mut self, action: impl FnOnce() -> A) {
        self.leaks_fixed = self.leaks_fixed.saturating_add(1);
        self.note(action);
    }
}

/// What follows a check.
#[derive(Clone, Copy, Debug)]
enum Then {
    Start,
    Raise,
    Fix,
    Lower,
    End,
}

#[derive(Clone, Debug)]
enum Stage {
    Check(Then),
    Raise(CountsPass),
    Rebuild(Rebuild),
    Tables(NewTables),
    Fix(Walk),
    Lower(CountsPass),
    Copied(Walk),
    Over,
}

/// Has a header lead to a refcount table behind the end of the file, where everything reads as zeros.
fn lose_refcount_table(cluster0: &mut [u8], file_len: u64) -> Result<(), Error> {
    let size = Header::cluster_size_of(cluster0)?;
    let end = file_len.checked_next_multiple_of(size).unwrap_or(0);
    let offset = end.to_be_bytes();
    bytes::put(cluster0, field::REFCOUNT_TABLE_OFFSET as usize, &offset);
    let clusters = 1_u32.to_be_bytes();
    bytes::put(cluster0, field::REFCOUNT_TABLE_CLUSTERS as usize, &clusters);
    Ok(())
}

/// Has a header lead to no more snapshots than there may be; how many less.
fn limit_snapshots(cluster0: &mut [u8]) -> u32 {
    let at = field::NB_SNAPSHOTS as usize;
    let count = bytes::u32_at(cluster0, at).unwrap_or(0);
    let less = count.saturating_sub(limit::SNAPSHOTS_MAX);
    if less > 0 {
        bytes::put(cluster0, at, &limit::SNAPSHOTS_MAX.to_be_bytes());
    }
    less
}

/// A repair in progress.
#[derive(Clone, Debug)]
pub struct Repair {
    mode: RepairMode,
    dry_run: bool,
    /// Cluster 0, as it is on the disk by now.
    cluster0: Vec<u8>,
    file_len: u64,
    check: Box<Check>,
    stage: Stage,
    out: VecDeque<RepairStep>,
    pending: Option<Range>,
    /// Something was written since the last flush, since the last check, at all.
    unflushed: bool,
    unchecked: bool,
    written: bool,
    /// Refcount structures are built anew once.
    rebuilt: bool,
    /// A table to be written and switched to.
    tables: Option<NewTables>,
    /// A damaged table of which no new one could be made: what it refers to is not known.
    tables_left: bool,
    result: Repaired,
}

impl Repair {
    /// Begins the repair of a file of `file_len` bytes; `cluster0` is its first cluster. With `dry_run` there
    /// are no writes. Fails as [`Check::new`] does, but for a header whose refcount table cannot be one, or that has too
    /// many snapshots.
    pub fn new(
        cluster0: &[u8],
        file_len: u64,
        mode: RepairMode,
        dry_run: bool,
    ) -> Result<Repair, Error> {
        let mut cluster0 = cluster0.to_vec();
        let all = mode == RepairMode::All;
        let lost = if all {
            limit_snapshots(&mut cluster0)
        } else {
            0
        };
        let mut check = match Check::for_repair(&cluster0, file_len, all) {
            Err(error) if mode != RepairMode::Leaks => {
                lose_refcount_table(&mut cluster0, file_len)?;
                Check::for_repair(&cluster0, file_len, all).map_err(|_| error)?
            }
            check => check?,
        };
        check.lose_snapshots(lost);
        Ok(Repair {
            mode,
            dry_run,
            cluster0,
            file_len,
            check: Box::new(check),
            stage: Stage::Check(Then::Start),
            out: VecDeque::new(),
            pending: None,
            unflushed: false,
            unchecked: false,
            written: false,
            rebuilt: false,
            tables: None,
            tables_left: false,
            result: Repaired::default(),
        })
    }

    /// What the machine wants now. A write or flush has succeeded when this is called again; after one
    /// that failed the repair is given up. A need is the same again until it is fed.
    #[expect(
        clippy::should_implement_trait,
        reason = "each step must be answered, no iterator"
    )]
    pub fn next(&mut self) -> RepairStep {
        loop {
            if let Some(step) = self.out.pop_front() {
                return step;
            }
            if let Some(Range { offset, len }) = self.pending {
                return RepairStep::Need { offset, len };
            }
            if matches!(self.stage, Stage::Over) {
                return RepairStep::Done(Box::new(self.result.clone()));
            }
            if self.build() {
                continue;
            }
            self.pending = self.wanted();
            if self.pending.is_none() {
                self.advance();
            }
        }
    }

    /// Hands in the bytes the last [`RepairStep::Need`] asked for; what is missing counts as zeros.
    pub fn feed(&mut self, read: &[u8]) {
        let Some(Range { offset, len }) = self.pending.take() else {
            return;
        };
        if let Stage::Check(_) = self.stage {
            return self.check.feed(read);
        }
        let mut old = read.to_vec();
        old.resize(usize::try_from(len).unwrap_or(0), 0);
        if let Stage::Tables(tables) = &mut self.stage {
            if let Some((at, bytes)) = tables.copy(old, &self.check.tally) {
                self.write(at, bytes);
            }
            return;
        }
        let mut new = old.clone();
        let (check, result) = (&mut self.check, &mut self.result);
        match &mut self.stage {
            Stage::Raise(pass) | Stage::Lower(pass) => pass.feed(check, &mut new, result),
            Stage::Fix(walk) | Stage::Copied(walk) => {
                walk.feed(check, Range { offset, len }, &mut new, result);
            }
            Stage::Check(_) | Stage::Rebuild(_) | Stage::Tables(_) | Stage::Over => {}
        }
        if let Some((start, changed)) = changed_sectors(&old, &new) {
            self.write(offset.saturating_add(start as u64), changed.to_vec());
        }
    }

    /// Says that the last read failed, instead of feeding it: that part stays as it is.
    pub fn fail(&mut self) {
        if let Stage::Check(_) = self.stage {
            self.pending = None;
            return self.check.fail();
        }
        let Some(Range { len, .. }) = self.pending.take() else {
            return;
        };
        match &mut self.stage {
            Stage::Fix(walk) | Stage::Copied(walk) => walk.failed(len),
            // Without all of it there is no new table; what was damaged stays.
            Stage::Tables(_) => {
                self.tables_left = true;
                self.stage = self.fix();
            }
            _ => {}
        }
    }

    /// While a check of the repair reads L2 tables: takes out those that are left, as [`Check::split`] does.
    /// [`Repair::join`] brings them back.
    pub fn split(&mut self, parts: usize) -> Vec<TablePart> {
        let Stage::Check(_) = self.stage else {
            return Vec::new();
        };
        let parts = self.check.split(parts);
        if !parts.is_empty() {
            self.pending = None;
        }
        parts
    }

    /// Takes over what the parts have found. All of them are through: what is not looked at has no references.
    pub fn join(&mut self, parts: Vec<TablePart>) {
        self.check.join(parts);
    }

    fn wanted(&mut self) -> Option<Range> {
        match &mut self.stage {
            Stage::Check(_) => match self.check.next() {
                Step::Need { offset, len } => Some(Range { offset, len }),
                Step::Done(_) => None,
            },
            Stage::Raise(pass) | Stage::Lower(pass) => pass.wanted(&self.check),
            Stage::Fix(walk) | Stage::Copied(walk) => walk.wanted(&self.check),
            Stage::Tables(tables) => tables.wanted(),
            Stage::Rebuild(_) | Stage::Over => None,
        }
    }

    /// Writes the next piece of new structures, if there is one.
    fn build(&mut self) -> bool {
        let next = match &mut self.stage {
            Stage::Rebuild(rebuild) => rebuild.next_write(&self.check.tally),
            Stage::Tables(tables) => tables.next_write(&self.check.tally),
            _ => None,
        };
        match next {
            Some((offset, bytes)) => {
                self.write(offset, bytes);
                true
            }
            None => false,
        }
    }

    fn advance(&mut self) {
        self.flush();
        self.stage = match core::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Check(then) => self.checked(then),
            Stage::Raise(_) => match self.tables.take() {
                Some(tables) => Stage::Tables(tables),
                None => self.fix(),
            },
            Stage::Rebuild(rebuild) => {
                let bytes = rebuild.header_bytes();
                self.write_header(field::REFCOUNT_TABLE_OFFSET, &bytes);
                self.flush();
                self.rebuilt = true;
                self.recheck(Then::Raise)
            }
            Stage::Tables(tables) => self.switch_tables(tables),
            Stage::Fix(_) if self.unchecked => self.recheck(Then::Lower),
            Stage::Fix(_) => self.lower(),
            Stage::Lower(_) => Stage::Copied(Walk::new(&self.check, Aim::Copied)),
            Stage::Copied(_) if self.written => self.recheck(Then::End),
            Stage::Copied(_) => self.end(),
            Stage::Over => Stage::Over,
        };
    }

    /// Another check of what is on the disk by now; without writes there is nothing new to see.
    fn recheck(&mut self, then: Then) -> Stage {
        if !self.dry_run {
            let all = self.mode == RepairMode::All;
            match Check::for_repair(&self.cluster0, self.file_len, all) {
                Ok(check) => *self.check = check,
                // It was understood before, and only fields that are certain have changed.
                Err(_) => return Stage::Over,
            }
        }
        self.unchecked = false;
        Stage::Check(then)
    }

    fn checked(&mut self, then: Then) -> Stage {
        let tally = &self.check.tally;
        match then {
            Then::Start => {
                self.result.before = tally.report.clone();
                let (stopped, clean) = (tally.stopped, tally.report.is_clean());
                if self.mode == RepairMode::All && !stopped {
                    self.plan_tables();
                }
                match self.mode {
                    _ if stopped || clean && self.tables.is_none() => self.end(),
                    RepairMode::Leaks => self.lower(),
                    RepairMode::Unclosed | RepairMode::All => self.raise(),
                }
            }
            Then::Raise => self.raise(),
            Then::Fix => self.fix(),
            Then::Lower => self.lower(),
            Then::End => self.end(),
        }
    }

    fn plan_tables(&mut self) {
        let check = &self.check;
        let damaged = check.table_change.is_some() || check.directory_change.is_some();
        match NewTables::plan(&mut self.check, self.file_len) {
            Some(tables) if self.dry_run => self.note_tables(tables.actions),
            Some(tables) => self.tables = Some(tables),
            None => self.tables_left = damaged,
        }
    }

    fn note_tables(&mut self, actions: Vec<String>) {
        for action in actions {
            self.result.corruption(|| action);
        }
    }

    /// The new tables are durable, and so are the counts of their clusters: the header switches to them.
    fn switch_tables(&mut self, tables: NewTables) -> Stage {
        self.note_tables(tables.actions);
        self.begin_writing();
        for switch in tables.switches {
            match switch {
                Switch::To(at, fields) => self.switch_header(at, &fields),
                Switch::NoBitmaps(at) => self.hide_bitmaps(at),
                Switch::L1Entry(at, entry) => self.push(at, entry.to_be_bytes().to_vec()),
            }
        }
        self.flush();
        self.recheck(Then::Fix)
    }

    /// Changes bytes of the header that lie in one sector, whatever is known of what is there.
    fn switch_header(&mut self, at: u64, fields: &[u8]) {
        bytes::put(&mut self.cluster0, at as usize, fields);
        self.push(at, fields.to_vec());
        self.flush();
    }

    /// The extension that leads to the bitmaps goes, and their autoclear bit: in one write where both lie in one sector.
    /// Otherwise the extension goes first; what an interruption leaves has no bitmaps either way.
    fn hide_bitmaps(&mut self, extension: u64) {
        let at = field::AUTOCLEAR as usize;
        let bits = bytes::u64_at(&self.cluster0, at).unwrap_or(0) & !Autoclear::BITMAPS.0;
        let removed = extension::REMOVED.to_be_bytes();
        let end = (extension as usize).saturating_add(removed.len());
        if end <= SECTOR_BYTES {
            bytes::put(&mut self.cluster0, at, &bits.to_be_bytes());
            bytes::put(&mut self.cluster0, extension as usize, &removed);
            let both = self.cluster0.get(at..end).unwrap_or_default().to_vec();
            self.switch_header(field::AUTOCLEAR, &both);
        } else {
            self.switch_header(extension, &removed);
            self.switch_header(field::AUTOCLEAR, &bits.to_be_bytes());
        }
    }

    fn raise(&mut self) -> Stage {
        if let Some(tables) = &self.tables {
            tables.refer(&mut self.check.tally);
        }
        let damaged = self.check.tally.refcounts_damaged;
        if !damaged && !rebuild::lacks_block(&self.check) {
            return Stage::Raise(CountsPass::raise());
        }
        if self.rebuilt {
            return self.fix();
        }
        match Rebuild::plan(&self.check.tally, self.file_len) {
            Some(rebuild) => {
                rebuild.note(&self.check.tally, &mut self.result);
                Stage::Rebuild(rebuild)
            }
            None => self.fix(),
        }
    }

    fn fix(&mut self) -> Stage {
        self.unchecked = false;
        Stage::Fix(Walk::new(&self.check, Aim::Fix))
    }

    /// Nothing is freed while a reference may be hidden, and no block is written that something else
    /// may be using.
    fn lower(&mut self) -> Stage {
        let tally = &self.check.tally;
        let known = tally.all_followed() && self.tables.is_none() && !self.tables_left;
        let pass = match known && (!tally.refcounts_damaged || self.dry_run) {
            true => CountsPass::lower(),
            false => CountsPass::nothing(),
        };
        Stage::Lower(pass)
    }

    fn end(&mut self) -> Stage {
        let report = match self.dry_run {
            true => self.result.before.clone(),
            false => self.check.tally.report.clone(),
        };
        let sound = report.corruptions == 0 && report.check_errors == 0;
        if sound && !self.dry_run && self.check.header.version == Version::V3 {
            self.clear_marks(report.leaks == 0);
        }
        self.result.after = report;
        Stage::Over
    }

    /// Clears the dirty and the corrupt bit; without leaks also our own bits of a process that was killed.
    fn clear_marks(&mut self, no_leaks: bool) {
        let bits = |at: u64| bytes::u64_at(&self.cluster0, at as usize).unwrap_or(0);
        let marks = Incompatible::DIRTY.with(Incompatible::CORRUPT);
        let old = Incompatible(bits(field::INCOMPATIBLE));
        let new = old.without(marks);
        let mut words = [new.0, bits(field::COMPATIBLE), bits(field::AUTOCLEAR)];
        let [_, compatible, autoclear] = words;
        let log = Autoclear(autoclear).log_number() | Compatible(compatible).log_number();
        // A log that a killed process has left is worth something as long as nothing has changed.
        if no_leaks && (self.written || log == 0) {
            let [_, compatible, autoclear] = &mut words;
            *compatible = Compatible(*compatible).with_own(Autoclear(0)).0;
            *autoclear &= KEPT_AUTOCLEAR.0;
        }
        self.result.marks_cleared = old != new;
        if old != new {
            self.result
                .note(|| "header: the dirty and the corrupt bit are cleared".to_owned());
        }
        let wanted: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.write_header(field::INCOMPATIBLE, &wanted);
        self.flush();
    }

    fn flush(&mut self) {
        if core::mem::take(&mut self.unflushed) {
            self.out.push_back(RepairStep::Flush);
        }
    }

    /// Changes bytes of the header, within its first sector.
    fn write_header(&mut self, at: u64, wanted: &[u8]) {
        let same = bytes::slice(&self.cluster0, at as usize, wanted.len()) == Some(wanted);
        if !same && !self.dry_run {
            self.push(at, wanted.to_vec());
            bytes::put(&mut self.cluster0, at as usize, wanted);
        }
    }

    fn write(&mut self, offset: u64, bytes: Vec<u8>) {
        if self.dry_run {
            return;
        }
        self.begin_writing();
        self.push(offset, bytes);
    }

    fn begin_writing(&mut self) {
        if !core::mem::replace(&mut self.written, true) {
            self.announce();
        }
    }

    fn push(&mut self, offset: u64, bytes: Vec<u8>) {
        self.file_len = self.file_len.max(offset.saturating_add(bytes.len() as u64));
        (self.unflushed, self.unchecked) = (true, true);
        self.out.push_back(RepairStep::Write { offset, bytes });
    }

    /// Before the first change: autoclear bits that this crate does not know go, and the log of commits
    /// that a killed process has left is no longer named, since the image is about to change without it.
    fn announce(&mut self) {
        if self.check.header.version != Version::V3 {
            return;
        }
        let header = &self.check.header;
        let kept = KEPT_AUTOCLEAR.with(Autoclear::IN_USE);
        let autoclear = Autoclear(header.autoclear.0 & kept.0);
        let own = match header.compatible.has(Compatible::IN_USE) {
            true => Autoclear::IN_USE,
            false => Autoclear(0),
        };
        let compatible = header.compatible.with_own(own);
        let words = [compatible.0, autoclear.0];
        let wanted: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.write_header(field::COMPATIBLE, &wanted);
        self.flush();
    }
}

/// Autoclear bits that stay true while an image is repaired: no guest data changes.
const KEPT_AUTOCLEAR: Autoclear = Autoclear::BITMAPS.with(Autoclear::RAW_DATA_FILE);

/// The sectors from the first that differs to the last, and where they start.
fn changed_sectors<'a>(old: &[u8], new: &'a [u8]) -> Option<(usize, &'a [u8])> {
    let differs = |(old, new): (&[u8], &[u8])| old != new;
    let pairs = || old.chunks(SECTOR_BYTES).zip(new.chunks(SECTOR_BYTES));
    let first = pairs().position(differs)?;
    let last = pairs().rposition(differs)?;
    let start = first.saturating_mul(SECTOR_BYTES);
    let end = last
        .saturating_add(1)
        .saturating_mul(SECTOR_BYTES)
        .min(new.len());
    Some((start, new.get(start..end)?))
}
