//! The handover log: commits in memory that outlives the process, in a layout that a kill between any
//! two stores leaves readable.
//!
//! The memory is words of 64 bits: the header below, then two parts of records. Commits go to the
//! active part; a writeback pass makes the other one active and empties the first when it is done. A
//! record is guest cluster, entry, bitmap, entry and bitmap before, and a mark: the part's generation and
//! a checksum. The mark is cleared first and stored last, so a record that a kill cut short has none, and
//! one that is left from an earlier use of the part has that generation's.
//!
//! Nothing in a log is believed that does not fit its checksum. Words of the header that change alone hold
//! their number twice, 32 bits each; the others have a checksum.
//!
//! Crash rule: a store is atomic, and stores happen in program order. The image names its log by number
//! ([`CommitLog::number`]).

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gaur_block::File;

use crate::commit_log::{Commit, CommitLog};
use crate::error::ImageError;
use crate::queue::Queue;

const MAGIC: u64 = 0x6761_7572_6c6f_6703;
/// Instead of that while the words of the header are written: nothing counts.
const MAKING: u64 = 0x9d3c_51e8_0b74_a6f3;
const RECORD_WORDS: usize = 6;
/// The last word of a record.
const MARK: usize = RECORD_WORDS - 1;
const HEADER_WORDS: usize = 64;
/// What a word that holds a number twice grows by.
const ONE: u64 = 1 << 32 | 1;

/// Words of the header.
mod word {
    pub const MAGIC: usize = 0;
    /// By which the image names the log, and by which it named the one before, that was taken over.
    pub const NUMBER: usize = 1;
    pub const BEFORE: usize = 2;
    /// Four words: which start of the machine, and which file (device and number), it is about.
    pub const OWNER: usize = 3;
    /// Checksum of the six above.
    pub const SUM: usize = 7;
    /// The part that commits go to, 0 or 1; this and the following twice.
    pub const ACTIVE: usize = 8;
    /// Of each part: how many records were begun, and its generation.
    pub const BEGUN: usize = 9;
    pub const GENERATION: usize = 11;
    /// Not 0 once a flush has failed.
    pub const FAILED: usize = 13;
}

/// Memory of a log. Every call is atomic, and visible to the next process even if this one is killed
/// right after it.
pub trait LogWords: Send + Sync {
    /// How many words there are.
    fn count(&self) -> usize;
    /// Reads a word, with all that was stored before it was.
    fn load(&self, at: usize) -> u64;
    /// Stores a word, after all that was stored before.
    fn store(&self, at: usize, value: u64);
    /// Adds to a word; returns what was there.
    fn fetch_add(&self, at: usize, value: u64) -> u64;
}

impl<W: Deref<Target = [AtomicU64]> + Send + Sync> LogWords for W {
    fn count(&self) -> usize {
        self.len()
    }

    fn load(&self, at: usize) -> u64 {
        self[at].load(Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u64) {
        self[at].store(value, Ordering::Release);
    }

    fn fetch_add(&self, at: usize, value: u64) -> u64 {
        self[at].fetch_add(value, Ordering::AcqRel)
    }
}

/// What a log is about. Another start of the machine makes it worthless, another image makes it wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOwner {
    /// Which start of the machine this is.
    pub boot: [u64; 2],
    /// Device and number of the image's file.
    pub file: [u64; 2],
}

impl LogOwner {
    fn words(self) -> [u64; 4] {
        let ([a, b], [c, d]) = (self.boot, self.file);
        [a, b, c, d]
    }
}

/// Why memory cannot be used as a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogError {
    /// It holds something else.
    Foreign,
    /// It is a log with wrong bytes.
    Damaged,
    /// It holds what a process has left that was killed while it wrote to another image.
    OtherImage,
}

/// What a process that was killed has left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Its commits, oldest first.
    pub commits: Vec<Commit>,
    /// There were more than fit.
    pub overflowed: bool,
    /// A flush had failed: it is unknown which data are there.
    pub failed: bool,
}

/// A log in memory that outlives the process.
pub struct HandoverLog<W> {
    words: W,
    owner: LogOwner,
    is_left: bool,
    /// Commits are noted from the moment on in which what was left has been taken over.
    is_live: AtomicBool,
    /// The mark of a record is stored first, to see that this is noticed.
    #[cfg(feature = "broken-order")]
    marks_first: AtomicBool,
}

impl<W: LogWords> HandoverLog<W> {
    /// Words of a log that has room for so many commits in each of its parts.
    pub const fn words_for(commits: usize) -> usize {
        HEADER_WORDS + 2 * commits * RECORD_WORDS
    }

    /// The log in `words`, about what `owner` says. One of an earlier start of the machine, or without
    /// anything of worth, begins anew with this `number`.
    ///
    /// # Errors
    /// Then nothing was changed.
    pub fn open(words: W, owner: LogOwner, number: u64) -> Result<HandoverLog<W>, LogError> {
        let mut log = HandoverLog {
            words,
            owner,
            is_left: false,
            is_live: AtomicBool::new(false),
            #[cfg(feature = "broken-order")]
            marks_first: AtomicBool::new(false),
        };
        log.is_left = log.look()?;
        if !log.is_left {
            log.start_anew(number, 0);
        }
        Ok(log)
    }

    /// Breaks the rule that a mark is stored last.
    #[cfg(feature = "broken-order")]
    pub fn mark_first(&self) {
        self.marks_first.store(true, Ordering::Relaxed);
    }

    /// The memory.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// Whether a process was killed that wrote to this image with this log.
    pub fn is_left(&self) -> bool {
        self.is_left
    }

    /// The number of the log that this one took over from, else 0.
    pub fn number_before(&self) -> u64 {
        self.words.load(word::BEFORE)
    }

    fn look(&self) -> Result<bool, LogError> {
        match self.words.load(word::MAGIC) {
            MAGIC => {}
            MAKING => return Ok(false),
            0 if (0..self.words.count()).all(|at| self.words.load(at) == 0) => return Ok(false),
            _ => return Err(LogError::Foreign),
        }
        if self.words.load(word::SUM) != self.sum() {
            return Err(LogError::Damaged);
        }
        let found: [u64; 4] = std::array::from_fn(|at| self.words.load(word::OWNER + at));
        if found == self.owner.words() {
            return Ok(true);
        }
        if found[..2] == self.owner.boot && !self.left()?.commits.is_empty() {
            return Err(LogError::OtherImage);
        }
        Ok(false)
    }

    /// What the process before has left.
    ///
    /// # Errors
    /// [`LogError::Damaged`].
    pub fn left(&self) -> Result<Left, LogError> {
        let twice = |at: usize| twice(self.words.load(at)).ok_or(LogError::Damaged);
        let active = twice(word::ACTIVE)? as usize;
        if active > 1 {
            return Err(LogError::Damaged);
        }
        let mut left = Left {
            failed: twice(word::FAILED)? != 0,
            ..Left::default()
        };
        for part in [1 - active, active] {
            let begun = twice(word::BEGUN + part)? as usize;
            let generation = twice(word::GENERATION + part)?;
            left.overflowed |= begun > self.capacity();
            for index in 0..begun.min(self.capacity()) {
                left.commits.extend(self.record(part, index, generation)?);
            }
        }
        Ok(left)
    }

    /// A record, if it was finished.
    fn record(
        &self,
        part: usize,
        index: usize,
        generation: u32,
    ) -> Result<Option<Commit>, LogError> {
        let at = self.place(part, index);
        let commit = Commit {
            cluster: self.words.load(at),
            entry: self.words.load(at + 1),
            bitmap: self.words.load(at + 2),
            before: (self.words.load(at + 3), self.words.load(at + 4)),
        };
        let found = self.words.load(at + MARK);
        let of = (found >> 32) as u32;
        if found != 0 && found != mark(at, commit, of) {
            return Err(LogError::Damaged);
        }
        Ok((found != 0 && of == generation).then_some(commit))
    }

    /// Takes over what a process that was killed has `left` here, and notes commits from now on, under
    /// this `number`. `queue` is one of the image, which was opened with this log; nothing else was
    /// done to it since. Returns what [`Queue::adopt`] does.
    ///
    /// # Errors
    /// Those of [`Queue::adopt`]; the log stays as it is then, unless only the image's header could not be
    /// written.
    pub async fn take_over<F: File>(
        &self,
        queue: &Queue<F>,
        left: &Left,
        number: u64,
    ) -> Result<Option<u64>, ImageError> {
        let mut adopted = None;
        if !left.failed {
            adopted = queue.adopt(&left.commits, !left.overflowed).await?;
        }
        self.start_anew(number, self.number());
        let renamed = queue.log_renamed().await;
        renamed.map_err(|errno| ImageError::io(errno, "cannot name its log"))?;
        self.begin();
        Ok(adopted)
    }

    /// Notes commits from now on. For a log that nothing is left in.
    pub fn begin(&self) {
        self.is_live.store(true, Ordering::Release);
    }

    /// An empty log with another number, which had the number `before`. A process that is killed in here
    /// leaves nothing.
    pub fn start_anew(&self, number: u64, before: u64) {
        let words = &self.words;
        words.store(word::MAGIC, MAKING);
        words.store(word::BEFORE, before);
        words.store(word::NUMBER, number);
        for (at, id) in (word::OWNER..).zip(self.owner.words()) {
            words.store(at, id);
        }
        words.store(word::SUM, self.sum());
        for part in 0..2 {
            self.empty_part(part);
        }
        words.store(word::ACTIVE, 0);
        words.store(word::FAILED, 0);
        words.store(word::MAGIC, MAGIC);
    }

    fn sum(&self) -> u64 {
        u64::from(log_checksum(
            (word::NUMBER..word::SUM).map(|at| self.words.load(at)),
        ))
    }

    fn empty_part(&self, part: usize) {
        let at = word::GENERATION + part;
        // Not 0, so that no mark is.
        let next = (self.words.load(at) as u32).wrapping_add(1).max(1);
        self.words.store(at, u64::from(next) * ONE);
        self.words.store(word::BEGUN + part, 0);
    }

    fn active(&self) -> usize {
        (self.words.load(word::ACTIVE) & 1) as usize
    }

    fn is_live(&self) -> bool {
        self.is_live.load(Ordering::Acquire)
    }

    /// Records of a part.
    fn capacity(&self) -> usize {
        (self.words.count() - HEADER_WORDS) / 2 / RECORD_WORDS
    }

    /// The first word of a record.
    fn place(&self, part: usize, index: usize) -> usize {
        HEADER_WORDS + (part * self.capacity() + index) * RECORD_WORDS
    }

    fn write_record(&self, at: usize, commit: Commit, generation: u32) {
        let mark = mark(at, commit, generation);
        #[cfg(feature = "broken-order")]
        if self.marks_first.load(Ordering::Relaxed) {
            self.words.store(at + MARK, mark);
            return self.write_fields(at, commit);
        }
        self.words.store(at + MARK, 0);
        self.write_fields(at, commit);
        self.words.store(at + MARK, mark);
    }

    fn write_fields(&self, at: usize, commit: Commit) {
        for (at, field) in (at..).zip(fields(commit)) {
            self.words.store(at, field);
        }
    }
}

impl<W: LogWords> CommitLog for HandoverLog<W> {
    fn number(&self) -> u64 {
        self.words.load(word::NUMBER)
    }

    fn committed(&self, commit: Commit) {
        if !self.is_live() {
            return;
        }
        let part = self.active();
        let begun = self.words.fetch_add(word::BEGUN + part, ONE);
        let index = begun as u32 as usize;
        if index < self.capacity() {
            let generation = self.words.load(word::GENERATION + part) as u32;
            self.write_record(self.place(part, index), commit, generation);
        }
    }

    fn pass_starts(&self) {
        if self.is_live() && self.words.load(word::FAILED) == 0 {
            let other = 1 - self.active() as u64;
            self.words.store(word::ACTIVE, other * ONE);
        }
    }

    fn pass_ends(&self) {
        if self.is_live() {
            self.empty_part(1 - self.active());
        }
    }

    fn failed(&self) {
        if self.is_live() {
            self.words.store(word::FAILED, ONE);
        }
    }

    fn is_filling(&self) -> bool {
        let begun = || self.words.load(word::BEGUN + self.active()) as u32 as usize;
        self.is_live() && begun() > self.capacity() / 4
    }
}

impl<W> fmt::Debug for HandoverLog<W> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = &self.owner;
        let mut out = out.debug_struct("HandoverLog");
        out.field("owner", owner).finish_non_exhaustive()
    }
}

fn fields(commit: Commit) -> [u64; MARK] {
    [
        commit.cluster,
        commit.entry,
        commit.bitmap,
        commit.before.0,
        commit.before.1,
    ]
}

/// What says that the record at this word is whole, and of which generation it is; never 0.
fn mark(at: usize, commit: Commit, generation: u32) -> u64 {
    let head = [at as u64, u64::from(generation)];
    let sum = log_checksum(head.into_iter().chain(fields(commit)));
    u64::from(generation) << 32 | u64::from(sum)
}

/// The checksum that records and headers of logs have.
pub fn log_checksum(words: impl IntoIterator<Item = u64>) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for word in words {
        hasher.update(&word.to_ne_bytes());
    }
    hasher.finalize()
}

/// The number that a word holds twice.
fn twice(word: u64) -> Option<u32> {
    (word >> 32 == word & u64::from(u32::MAX)).then_some(word as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const CAPACITY: usize = 16;
    const OWNER: LogOwner = LogOwner {
        boot: [1, 2],
        file: [3, 4],
    };
    const OTHER: LogOwner = LogOwner {
        file: [3, 5],
        ..OWNER
    };

    type Memory = Arc<[AtomicU64]>;
    type Log = HandoverLog<Memory>;

    fn memory() -> Memory {
        let count = Log::words_for(CAPACITY);
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    fn commit(cluster: u64) -> Commit {
        Commit {
            cluster,
            entry: cluster << 16,
            bitmap: 0,
            before: (0, 0),
        }
    }

    fn live(memory: &Memory) -> Log {
        let log = HandoverLog::open(Arc::clone(memory), OWNER, 7).expect("it opens");
        log.begin();
        log
    }

    fn clusters_of(left: &Left) -> Vec<u64> {
        left.commits.iter().map(|commit| commit.cluster).collect()
    }

    fn clusters(log: &Log) -> Vec<u64> {
        clusters_of(&log.left().expect("a sound log"))
    }

    #[test]
    fn a_pass_forgets_what_was_noted_before_it_and_nothing_else() {
        let memory = memory();
        let log = live(&memory);
        log.committed(commit(1));
        log.pass_starts();
        log.committed(commit(2));
        let log = live(&memory);
        assert_eq!(clusters(&log), [1, 2], "the pass has not ended");
        log.pass_ends();
        log.committed(commit(3));
        assert_eq!(clusters(&log), [2, 3]);
        log.pass_starts();
        log.pass_ends();
        assert!(clusters(&log).is_empty());
    }

    #[test]
    fn what_belongs_to_another_image_is_left_alone_while_it_is_worth_something() {
        let memory = memory();
        let log = live(&memory);
        log.committed(commit(1));
        let other = || HandoverLog::open(Arc::clone(&memory), OTHER, 8);
        assert_eq!(other().map(drop), Err(LogError::OtherImage));
        assert_eq!(clusters(&live(&memory)), [1]);
        log.start_anew(9, 0);
        assert!(clusters(&other().expect("it is empty")).is_empty());
    }

    #[test]
    fn a_record_that_was_cut_short_does_not_count() {
        let log = live(&memory());
        for cluster in [1, 2, 3] {
            log.committed(commit(cluster));
        }
        // Killed before the last store, after the mark was cleared.
        let first = log.place(0, 0);
        log.words.store(first + MARK, 0);
        assert_eq!(clusters(&log), [2, 3]);
        // Killed before the first store: what is there is from an earlier use of the part.
        log.pass_starts();
        log.pass_ends();
        log.pass_starts();
        log.words.fetch_add(word::BEGUN, ONE);
        log.words.store(first + MARK, mark(first, commit(1), 1));
        assert!(clusters(&log).is_empty());
    }

    #[test]
    fn more_commits_than_fit_are_told() {
        let log = live(&memory());
        for cluster in 0..CAPACITY as u64 + 1 {
            log.committed(commit(cluster));
        }
        let left = log.left().expect("a sound log");
        assert!(left.overflowed);
        assert_eq!(left.commits.len(), CAPACITY);
    }

    #[test]
    fn a_process_that_is_killed_while_a_log_begins_anew_leaves_an_empty_one() {
        let memory = memory();
        let log = live(&memory);
        log.committed(commit(1));
        log.words.store(word::MAGIC, MAKING);
        log.words.store(word::NUMBER, 77);
        let log = HandoverLog::open(memory, OWNER, 8).expect("it opens");
        assert!(!log.is_left() && clusters(&log).is_empty());
        assert_eq!(log.number(), 8);
    }

    /// A log with wrong bytes was followed wherever it led.
    #[test]
    fn a_wrong_byte_anywhere_makes_the_log_refused_or_changes_nothing() {
        let memory = memory();
        let log = live(&memory);
        log.committed(commit(1));
        log.pass_starts();
        log.committed(commit(2));
        log.committed(commit(3));
        let used_words = |at: usize| {
            let record = |part, count| log.place(part, 0)..log.place(part, count);
            at < word::FAILED + 1 || record(0, 1).contains(&at) || record(1, 2).contains(&at)
        };
        let mut refused = 0;
        for at in 0..log.words.count() * 8 {
            for wrong in [0x01, 0x80, 0xff_u64] {
                let (index, flipped) = (at / 8, wrong << (at % 8 * 8));
                let sound = log.words.load(index);
                log.words.store(index, sound ^ flipped);
                let left = HandoverLog::open(Arc::clone(&memory), OWNER, 8).and_then(|log| {
                    assert!(log.is_left(), "byte {at}: it is taken for a new one");
                    Ok((log.number(), clusters_of(&log.left()?)))
                });
                log.words.store(index, sound);
                match left {
                    Ok(left) => assert_eq!(left, (7, vec![1, 2, 3]), "byte {at}"),
                    Err(error) => {
                        assert!(used_words(index), "byte {at}: {error:?}");
                        refused += 1;
                    }
                }
            }
        }
        assert_eq!(refused, 3 * 8 * (14 + 3 * 6), "every byte that counts");
    }
}
