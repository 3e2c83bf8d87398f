//! What a server leaves to the next one when it is killed: the engine's log of commits, in memory that
//! outlives the process (a file in /run, which a reboot empties; see `gaur_engine::CommitLog`).
//!
//! Layout, in words of 64 bits: the header below, then two parts of [`CAPACITY`] records. Commits go to
//! the active part; a writeback pass makes the other one active and empties the first when it is done.
//! A record is guest cluster, entry, bitmap, entry and bitmap before, and a mark of the part's generation and a checksum, which is
//! cleared first and stored last: what a kill cut short has none, and what was left by an earlier use of
//! the part has that generation's.
//!
//! Nothing in a log is believed that does not fit its checksum. Words of the header that change alone stand
//! twice in themselves, 32 bits each; the others have a checksum.
//!
//! The image names its log by number (`gaur_engine::CommitLog::number`).

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_engine::{Commit, CommitLog, ErrorKind, Unclosed};
use gaur_reactor::{BlockingFile, SharedWords, block_on};

use crate::failure::Failure;
use crate::notice::say;
use crate::shared_image::SharedImage;

const MAGIC: u64 = 0x6761_7572_6c6f_6703;
/// Instead of that while the words of the header are written: nothing counts.
const MAKING: u64 = 0x9d3c_51e8_0b74_a6f3;
/// Records of a part.
const CAPACITY: usize = 87_000;
const RECORD_WORDS: usize = 6;
/// The last word of a record.
const MARK: usize = RECORD_WORDS - 1;
const PART_WORDS: usize = CAPACITY * RECORD_WORDS;
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
    /// Checksum of the four above.
    pub const SUM: usize = 7;
    /// The part that commits go to, 0 or 1; this and the following twice.
    pub const ACTIVE: usize = 8;
    /// Of each part: how many records were begun, and its generation.
    pub const BEGUN: usize = 9;
    pub const GENERATION: usize = 11;
    /// Not 0 once a flush has failed.
    pub const FAILED: usize = 13;
}

/// The log of a server.
pub struct Handover {
    path: PathBuf,
    words: SharedWords,
    owner: [u64; 4],
    /// A server before had it and did not close the image.
    is_left: bool,
    /// Commits are noted from the moment on in which what was left has been taken over.
    is_live: AtomicBool,
}

/// What a server that was killed has left.
struct Left {
    commits: Vec<Commit>,
    /// There were more than fit.
    overflowed: bool,
    failed: bool,
}

impl Handover {
    /// Opens the log at `path` for the image in `image`. What belongs to the time before this machine was
    /// started is forgotten.
    ///
    /// # Errors
    /// The file is none of ours, was damaged, or holds what another image's server has left: nothing of it
    /// is changed then.
    pub fn open(path: &Path, image: impl AsRef<Path>) -> Result<Handover, Failure> {
        let image = image.as_ref();
        let shown = path.display().to_string();
        let count = HEADER_WORDS + 2 * PART_WORDS;
        let words = SharedWords::open(path, count).map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => {
                Failure::about(&shown, "another server uses it").kind(ErrorKind::Locked)
            }
            std::io::ErrorKind::InvalidData => no_log(path),
            _ => Failure::io(&shown, &error),
        })?;
        let found = std::fs::metadata(image)
            .map_err(|error| Failure::io(&image.to_string_lossy(), &error))?;
        let mut log = Handover {
            path: path.to_owned(),
            words,
            owner: [boot()[0], boot()[1], found.dev(), found.ino()],
            is_left: false,
            is_live: AtomicBool::new(false),
        };
        log.is_left = log.look()?;
        if !log.is_left {
            log.start_anew(0);
        }
        Ok(log)
    }

    /// Whether this is the log of a server of this image.
    fn look(&self) -> Result<bool, Failure> {
        match self.get(word::MAGIC) {
            MAGIC => {}
            MAKING => return Ok(false),
            0 if self
                .words
                .iter()
                .all(|word| word.load(Ordering::Relaxed) == 0) =>
            {
                return Ok(false);
            }
            _ => return Err(no_log(&self.path)),
        }
        if self.get(word::SUM) != self.sum() {
            return Err(self.damaged());
        }
        let owner: Vec<u64> = (0..4).map(|at| self.get(word::OWNER + at)).collect();
        if owner == self.owner {
            return Ok(true);
        }
        if owner[..2] == self.owner[..2] && !self.left()?.commits.is_empty() {
            let text = "holds what a killed server of another image has left";
            let failure = Failure::about(self.path.display().to_string(), text);
            let failure = failure.kind(ErrorKind::Corrupt);
            return Err(failure.hint("serve that image with it, or remove it to give that up"));
        }
        Ok(false)
    }

    /// Whether a server was killed, and some of its requests may be under way yet.
    pub fn is_left(&self) -> bool {
        self.is_left
    }

    /// Takes over what a server that was killed has left, and notes commits from now on. Nothing else
    /// was done to the image since it was opened.
    pub fn take_over(&self, image: &SharedImage) -> Result<(), Failure> {
        let left = self.left()?;
        let queue = image.queue(BlockingFile::new);
        let mut adopted = None;
        if left.failed {
            say("the last server could not flush: what it had not flushed is lost");
        } else {
            adopted = block_on(queue.adopt(&left.commits, !left.overflowed)).map_err(|error| {
                let failure = Failure::image(image.name(), &error);
                failure.hint(self.ways_out())
            })?;
        }
        match adopted {
            Some(changed) => self.say_adopted(changed, left.overflowed),
            None if left.failed || left.commits.is_empty() => {}
            None => say(format_args!(
                "{}: was written to since its server was killed: what only the log {} knew is lost",
                image.name(),
                self.path.display()
            )),
        }
        if let (Some(unclosed), None) = (image.image().unclosed(), adopted) {
            let known = [self.number(), self.get(word::BEFORE)];
            tell(image.name(), unclosed, known.contains(&unclosed.log_number));
        }
        self.start_anew(self.number());
        block_on(queue.log_renamed())
            .map_err(|errno| Failure::system(image.name(), "cannot name its log", errno))?;
        self.is_live.store(true, Ordering::Release);
        Ok(())
    }

    fn say_adopted(&self, changed: u64, overflowed: bool) {
        if changed > 0 {
            say(format_args!(
                "{changed} clusters taken over from a server that was killed"
            ));
        }
        if overflowed {
            say("the last server had written more than its log holds: some of it is lost");
        }
    }

    /// Forgets what a server that was killed has left: who had been told of it is gone, too.
    pub fn forget(&self) -> Result<(), Failure> {
        if !self.left()?.commits.is_empty() {
            say(
                "the last server was killed, and whoever used its disk is gone: what was not flushed is lost",
            );
        }
        self.start_anew(self.number());
        Ok(())
    }

    /// The image was closed: there is nothing to hand over.
    pub fn remove(&self) {
        // Somebody may have removed it already.
        let _ = std::fs::remove_file(&self.path);
    }

    /// An empty log with a new number. Whoever is killed in here leaves nothing.
    fn start_anew(&self, before: u64) {
        self.set(word::MAGIC, MAKING);
        self.set(word::BEFORE, before);
        self.set(word::NUMBER, new_number());
        for (id, at) in self.owner.iter().zip(word::OWNER..) {
            self.set(at, *id);
        }
        self.set(word::SUM, self.sum());
        for part in 0..2 {
            self.empty_part(part);
        }
        self.set(word::ACTIVE, 0);
        self.set(word::FAILED, 0);
        self.set(word::MAGIC, MAGIC);
    }

    fn sum(&self) -> u64 {
        let words: Vec<u64> = (word::NUMBER..word::SUM).map(|at| self.get(at)).collect();
        u64::from(checksum(&words))
    }

    fn left(&self) -> Result<Left, Failure> {
        let twice = |at: usize| twice(self.get(at)).ok_or_else(|| self.damaged());
        let active = twice(word::ACTIVE)? as usize;
        if active > 1 {
            return Err(self.damaged());
        }
        let mut left = Left {
            commits: Vec::new(),
            overflowed: false,
            failed: twice(word::FAILED)? != 0,
        };
        for part in [1 - active, active] {
            let begun = twice(word::BEGUN + part)? as usize;
            let generation = twice(word::GENERATION + part)?;
            left.overflowed |= begun > CAPACITY;
            for index in 0..begun.min(CAPACITY) {
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
    ) -> Result<Option<Commit>, Failure> {
        let at = place(part, index);
        let commit = Commit {
            cluster: self.get(at),
            entry: self.get(at + 1),
            bitmap: self.get(at + 2),
            before: (self.get(at + 3), self.get(at + 4)),
        };
        let found = self.get(at + MARK);
        let of = (found >> 32) as u32;
        if found != 0 && found != mark(at, commit, of) {
            return Err(self.damaged());
        }
        Ok((found != 0 && of == generation).then_some(commit))
    }

    fn damaged(&self) -> Failure {
        let failure = Failure::about(self.path.display().to_string(), "the log is damaged");
        failure.kind(ErrorKind::Corrupt).hint(self.ways_out())
    }

    fn ways_out(&self) -> String {
        format!(
            "'rm {}' gives up what was acknowledged to clients and not flushed",
            self.path.display()
        )
    }

    fn empty_part(&self, part: usize) {
        let at = word::GENERATION + part;
        // Not 0, so that no mark is.
        let next = (self.get(at) as u32).wrapping_add(1).max(1);
        self.set(at, u64::from(next) * ONE);
        self.set(word::BEGUN + part, 0);
    }

    fn active(&self) -> usize {
        (self.get(word::ACTIVE) & 1) as usize
    }

    fn get(&self, at: usize) -> u64 {
        self.words[at].load(Ordering::Acquire)
    }

    fn set(&self, at: usize, value: u64) {
        self.words[at].store(value, Ordering::Release);
    }

    fn is_live(&self) -> bool {
        self.is_live.load(Ordering::Acquire)
    }
}

impl CommitLog for Handover {
    fn number(&self) -> u64 {
        self.get(word::NUMBER)
    }

    fn committed(&self, commit: Commit) {
        if !self.is_live() {
            return;
        }
        let part = self.active();
        let begun = self.words[word::BEGUN + part].fetch_add(ONE, Ordering::AcqRel);
        let index = begun as u32 as usize;
        if index >= CAPACITY {
            return;
        }
        let at = place(part, index);
        let generation = self.get(word::GENERATION + part) as u32;
        self.set(at + MARK, 0);
        self.set(at, commit.cluster);
        self.set(at + 1, commit.entry);
        self.set(at + 2, commit.bitmap);
        self.set(at + 3, commit.before.0);
        self.set(at + 4, commit.before.1);
        self.set(at + MARK, mark(at, commit, generation));
    }

    fn pass_starts(&self) {
        if self.is_live() && self.get(word::FAILED) == 0 {
            self.set(word::ACTIVE, (1 - self.active() as u64) * ONE);
        }
    }

    fn pass_ends(&self) {
        if self.is_live() {
            self.empty_part(1 - self.active());
        }
    }

    fn failed(&self) {
        if self.is_live() {
            self.set(word::FAILED, ONE);
        }
    }

    fn is_filling(&self) -> bool {
        self.is_live() && self.get(word::BEGUN + self.active()) as u32 as usize > CAPACITY / 4
    }
}

impl fmt::Debug for Handover {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Handover")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// The first word of a record.
fn place(part: usize, index: usize) -> usize {
    HEADER_WORDS + part * PART_WORDS + index * RECORD_WORDS
}

/// What says that the record at this word is whole, and of which generation it is; never 0.
fn mark(at: usize, commit: Commit, generation: u32) -> u64 {
    let words = [
        at as u64,
        u64::from(generation),
        commit.cluster,
        commit.entry,
        commit.bitmap,
        commit.before.0,
        commit.before.1,
    ];
    u64::from(generation) << 32 | u64::from(checksum(&words))
}

fn checksum(words: &[u64]) -> u32 {
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

fn no_log(path: &Path) -> Failure {
    let text = "is no handover log of this version of gaur";
    let failure = Failure::about(path.display().to_string(), text).kind(ErrorKind::Corrupt);
    failure.hint("name another file, or remove it")
}

/// A number for a log: a third stands for the start of the machine, the rest is chance.
fn new_number() -> u64 {
    let mut chance = [0; 4];
    // It only fails before the system has gathered any chance, long before this.
    let _ = rustix::rand::getrandom(&mut chance[..], rustix::rand::GetRandomFlags::empty());
    boot_mark() << 32 | u64::from(u32::from_ne_bytes(chance).max(1))
}

fn boot_mark() -> u64 {
    u64::from(checksum(&boot())) & 0xffff
}

/// Says what whoever opens an image for writing has to know of a process that did not close it. `knows`:
/// what was in its log is dealt with.
pub fn tell(name: &str, unclosed: Unclosed, knows: bool) {
    // After a restart of the machine there is no log.
    if !knows && unclosed.log_number != 0 && unclosed.log_number >> 32 == boot_mark() {
        say(format_args!(
            "{name}: a server that was killed left a log of changes (--handover); \
             without it what was acknowledged and not flushed is lost"
        ));
    }
    say(format_args!(
        "{name}: the process that wrote to it last was killed or lost its power; clusters may be leaked: \
         'gaur check {name}' counts them, 'qemu-img check -r leaks {name}' gives them back"
    ));
}

/// Which start of the machine this is; zeros where the kernel does not say.
fn boot() -> [u64; 2] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).unwrap_or(0);
    [(number >> 64) as u64, number as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(cluster: u64) -> Commit {
        Commit {
            cluster,
            entry: cluster << 16,
            bitmap: 0,
            before: (0, 0),
        }
    }

    fn clusters_of(left: &Left) -> Vec<u64> {
        left.commits.iter().map(|commit| commit.cluster).collect()
    }

    fn clusters(log: &Handover) -> Vec<u64> {
        clusters_of(&log.left().unwrap_or_else(|failure| panic!("{failure}")))
    }

    fn live(path: &Path, image: &str) -> Handover {
        let log = Handover::open(path, image).expect("it opens");
        log.is_live.store(true, Ordering::Release);
        log
    }

    #[test]
    fn a_pass_forgets_what_was_noted_before_it_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let image = folder.path().join("image").display().to_string();
        std::fs::write(&image, "").expect("a file");
        let log = live(&path, &image);
        log.committed(commit(1));
        log.pass_starts();
        log.committed(commit(2));
        drop(log);
        let log = live(&path, &image);
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
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let images = ["one", "two"].map(|name| folder.path().join(name).display().to_string());
        for image in &images {
            std::fs::write(image, "").expect("a file");
        }
        let log = live(&path, &images[0]);
        log.committed(commit(1));
        assert!(Handover::open(&path, &images[0]).is_err(), "it is in use");
        drop(log);
        assert!(Handover::open(&path, &images[1]).is_err());
        let log = live(&path, &images[0]);
        assert_eq!(clusters(&log), [1]);
        log.start_anew(0);
        drop(log);
        assert!(clusters(&live(&path, &images[1])).is_empty());
    }

    #[test]
    fn a_record_that_was_cut_short_does_not_count() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let image = folder.path().display().to_string();
        let log = live(&path, &image);
        log.committed(commit(1));
        log.committed(commit(2));
        log.committed(commit(3));
        // Killed before the last store, after the mark was cleared.
        log.set(place(0, 0) + MARK, 0);
        assert_eq!(clusters(&log), [2, 3]);
        // Killed before the first store: what is there is from an earlier use of the part.
        log.pass_starts();
        log.pass_ends();
        log.pass_starts();
        log.words[word::BEGUN].fetch_add(ONE, Ordering::AcqRel);
        log.set(place(0, 0) + MARK, mark(place(0, 0), commit(1), 1));
        assert!(clusters(&log).is_empty());
    }

    #[test]
    fn who_is_killed_while_a_log_begins_anew_leaves_an_empty_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let image = folder.path().display().to_string();
        let log = live(&path, &image);
        log.committed(commit(1));
        let before = log.number();
        log.set(word::MAGIC, MAKING);
        log.set(word::NUMBER, 77);
        drop(log);
        let log = live(&path, &image);
        assert!(!log.is_left() && clusters(&log).is_empty());
        assert!(log.number() != before && log.number() >> 48 == 0);
    }

    /// A log with wrong bytes was followed wherever it led.
    #[test]
    fn whatever_byte_is_wrong_the_log_is_refused_or_says_the_same() {
        use std::os::unix::fs::FileExt;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let image = folder.path().display().to_string();
        let log = live(&path, &image);
        log.committed(commit(1));
        log.pass_starts();
        log.committed(commit(2));
        log.committed(commit(3));
        let number = log.number();
        drop(log);
        let file = std::fs::File::options().read(true).write(true).open(&path);
        let file = file.expect("the log opens");
        let parts = [0, 1].map(|part| place(part, 0) as u64 * 8);
        let (first, second) = (parts[0]..parts[0] + 48, parts[1]..parts[1] + 96);
        let mut refused = 0;
        let used = |at: u64| at < 14 * 8 || first.contains(&at) || second.contains(&at);
        for at in (0..parts[0] + 100).chain(second.clone()) {
            for wrong in [0x01, 0x80, 0xff] {
                let mut byte = [0];
                file.read_exact_at(&mut byte, at).expect("it can be read");
                file.write_all_at(&[byte[0] ^ wrong], at)
                    .expect("it can be written");
                let left = Handover::open(&path, &image).and_then(|log| {
                    assert!(log.is_left(), "byte {at}: it is taken for a new one");
                    Ok((log.number(), clusters_of(&log.left()?)))
                });
                file.write_all_at(&byte, at).expect("it can be written");
                match left {
                    Ok(left) => assert_eq!(left, (number, vec![1, 2, 3]), "byte {at}"),
                    Err(failure) => {
                        assert!(used(at), "byte {at}: {failure}");
                        refused += 1;
                    }
                }
            }
        }
        assert_eq!(refused, 3 * (14 * 8 + 3 * 48), "every byte that counts");
    }
}
