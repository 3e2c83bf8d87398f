//! Handover after a kill: a new process finds every acknowledged write, flushed or not, because the commit
//! log has outlived the killed one. Once another writer has changed the image, the log must be refused.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use gaur_engine::{Commit, CommitLog, HandoverLog, Left, LogOwner, LogWords, OpenOptions};
use gaur_sim::{FileImage, Random, Scheduler, Trace};

use crate::judge::Verdict;
use crate::machine::TOP;
use crate::reopen::open;
use crate::run::{Rule, Run, STEPS_MAX};

/// Records of a part of a log. A quarter of them makes a pass due.
const RECORDS: usize = 800;
/// What a record is stored with; the last store makes it count.
const STORES_OF_A_RECORD: u64 = 8;
/// What a log begins anew with.
const STORES_OF_A_HEADER: u64 = 15;
/// The header's autoclear bits, and the compatible ones.
const AUTOCLEAR: u64 = 88;
const COMPATIBLE: u64 = 80;
/// The autoclear bit of a raw data file, which stays.
const RAW_DATA_FILE: u64 = 1 << 1;
/// That of a process that writes.
const IN_USE: u64 = 1 << 15;

/// Feature bits of the top image, which a version 2 header does not have.
fn bits(image: &FileImage, at: u64) -> u64 {
    if image.bytes(4, 4) != [0, 0, 0, 3] {
        return 0;
    }
    let bytes = image.bytes(at, 8);
    bytes
        .first_chunk()
        .map_or(0, |raw| u64::from_be_bytes(*raw))
}

/// What the feature bits of an image say about its writer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// All autoclear bits but that of a raw data file.
    autoclear: u64,
    /// The compatible bits that are the engine's own.
    compatible: u64,
    has_snapshots: bool,
}

impl Marks {
    pub(crate) fn of(image: &FileImage) -> Marks {
        Marks {
            autoclear: bits(image, AUTOCLEAR) & !RAW_DATA_FILE,
            compatible: bits(image, COMPATIBLE) & !(IN_USE - 1),
            has_snapshots: image.bytes(60, 4) != [0; 4],
        }
    }

    /// Whether a process writes, or was killed while it did.
    pub(crate) fn is_in_use(self) -> bool {
        let bits = match self.has_snapshots {
            true => self.compatible,
            false => self.autoclear,
        };
        bits & IN_USE != 0
    }

    /// Whether QEMU's repair would delete the snapshots.
    pub(crate) fn endangers_snapshots(self) -> bool {
        self.has_snapshots && self.autoclear & IN_USE != 0
    }

    /// Whether these are right after a process has closed an image that had those when it was opened: no process writes, and
    /// there is no log.
    pub(crate) fn follow(self, before: Marks) -> bool {
        let unchanged = [before.autoclear, before.compatible] == [self.autoclear, self.compatible];
        let leaked = if before.is_in_use() { IN_USE } else { 0 };
        // The bit of the bitmaps stays with them.
        let own = self.autoclear & !(before.autoclear & 1);
        unchanged || (self.compatible == 0 && [leaked, 0].contains(&own))
    }
}

/// Memory of a handover log. It outlives the process.
pub(crate) type Memory = Arc<[AtomicU64]>;

/// What a store to a log's memory unwinds with when the process is killed there.
pub(crate) struct Killed;

/// A process' view of the memory: it is killed before one of its stores.
pub(crate) struct Words {
    memory: Memory,
    /// Stores until then, and that one; 0 when it is dead.
    left: AtomicU64,
}

impl Words {
    /// Whether a store happens.
    fn lives(&self) -> bool {
        let before = self.left.load(Ordering::Relaxed);
        self.left.store(before.saturating_sub(1), Ordering::Relaxed);
        if before == 1 {
            std::panic::resume_unwind(Box::new(Killed));
        }
        before > 0
    }

    /// Does something of which only so many stores happen: a thread that has come no further.
    fn cut_short(&self, stores: u64, act: impl FnOnce()) {
        let until_kill = self.left.swap(stores + 1, Ordering::Relaxed);
        // What unwinds here is that thread alone.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
        self.left.store(until_kill, Ordering::Relaxed);
    }
}

impl LogWords for Words {
    fn count(&self) -> usize {
        self.memory.len()
    }

    fn load(&self, at: usize) -> u64 {
        self.memory[at].load(Ordering::Relaxed)
    }

    fn store(&self, at: usize, value: u64) {
        if self.lives() {
            self.memory[at].store(value, Ordering::Relaxed);
        }
    }

    fn fetch_add(&self, at: usize, value: u64) -> u64 {
        match self.lives() {
            true => self.memory[at].fetch_add(value, Ordering::Relaxed),
            false => 0,
        }
    }
}

/// The log of a process, with another thread that now and then is in the middle of a record.
#[derive(Debug)]
pub(crate) struct KeptLog {
    log: HandoverLog<Words>,
    random: Mutex<Random>,
}

/// Memory of an empty log.
pub(crate) fn empty_memory() -> Memory {
    let count = HandoverLog::<Words>::words_for(RECORDS);
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

impl KeptLog {
    /// What a process finds in `memory`; it begins a new log under that number. It is killed before its
    /// store `kill_at`, counted from 1, if that is one.
    pub(crate) fn open(
        memory: &Memory,
        (number, kill_at): (u64, Option<u64>),
        random: Random,
        broken: bool,
    ) -> Result<Arc<KeptLog>, String> {
        let owner = LogOwner {
            boot: [1, 2],
            file: [3, 4],
        };
        let words = Words {
            memory: Arc::clone(memory),
            left: AtomicU64::new(u64::MAX),
        };
        let log = HandoverLog::open(words, owner, number);
        let log = log.map_err(|error| format!("the log is refused: {error:?}"))?;
        #[cfg(feature = "broken-order")]
        if broken {
            log.mark_first();
        }
        #[cfg(not(feature = "broken-order"))]
        let _ = broken;
        log.words()
            .left
            .store(kill_at.unwrap_or(u64::MAX), Ordering::Relaxed);
        let random = Mutex::new(random);
        Ok(Arc::new(KeptLog { log, random }))
    }

    /// Notes commits from now on.
    pub(crate) fn begin(&self) {
        self.log.begin();
    }

    /// What outlives the process.
    pub(crate) fn memory(&self) -> Memory {
        Arc::clone(&self.log.words().memory)
    }

    /// What is left; `None` if a pass has failed, or the log was too small.
    pub(crate) fn left(&self) -> Result<Option<Left>, String> {
        let left = self.log.left();
        let left = left.map_err(|error| format!("the log is refused: {error:?}"))?;
        Ok((!left.failed && !left.overflowed).then_some(left))
    }
}

impl CommitLog for KeptLog {
    fn number(&self) -> u64 {
        self.log.number()
    }

    fn committed(&self, commit: Commit) {
        let mut random = self.random.lock().expect("no holder panics");
        let cut = random.chance(20).then(|| random.below(STORES_OF_A_RECORD));
        drop(random);
        if let Some(stores) = cut {
            let other = Commit {
                cluster: commit.cluster ^ 1,
                ..commit
            };
            let words = self.log.words();
            words.cut_short(stores, || self.log.committed(other));
        }
        self.log.committed(commit);
    }

    fn pass_starts(&self) {
        self.log.pass_starts();
    }

    fn pass_ends(&self) {
        self.log.pass_ends();
    }

    fn failed(&self) {
        self.log.failed();
    }

    fn is_filling(&self) -> bool {
        self.log.is_filling()
    }
}

/// Does what a process does until it is killed at a store to its log: then nothing is returned.
pub(crate) fn until_killed<T>(act: impl FnOnce() -> T) -> Option<T> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)) {
        Ok(done) => Some(done),
        Err(reason) if reason.is::<Killed>() => None,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// What a process has found that took over.
struct Taken {
    /// The image names the log.
    counts: bool,
    /// There were commits in it.
    has_left: bool,
}

/// The state that a killed process has left and no process has taken over yet.
#[derive(Debug)]
pub(crate) struct StaleLog {
    memory: Memory,
    /// The image as it was left; `None` if another writer has changed it.
    image: Option<FileImage>,
}

impl Run<'_> {
    /// The next process adopts what the killed one had committed; now and then it is killed as well,
    /// and another one does. Then all that was acknowledged is there, and durable.
    pub(crate) fn take_over(&mut self, memory: &Memory) -> Result<Verdict, String> {
        for _ in 0..self.random.below(3) {
            let steps = 1 + self.random.below(200);
            let begins_anew = self.torn.chance(300);
            let kill_at = begins_anew.then(|| 1 + self.torn.below(STORES_OF_A_HEADER));
            let steps = if begins_anew { STEPS_MAX } else { steps };
            if self.adopt(memory, (steps, kill_at))?.is_some() {
                break;
            }
        }
        let Some(taken) = self.adopt(memory, (STEPS_MAX, None))? else {
            return Err("adopting does not end".to_owned());
        };
        // A process that was killed before the first change had nothing to leave.
        if taken.has_left && !taken.counts {
            return Err("the log is not known".to_owned());
        }
        let files = self
            .host
            .crash_images(gaur_sim::Survivors::Nothing, &mut self.random);
        self.judge(&files, true)
    }

    /// No handover: the log stays, and the next process writes without it. It may be another program,
    /// which clears the bits that it does not know before it changes anything.
    pub(crate) fn leave_log(&mut self, memory: Memory) -> Result<(), String> {
        let foreign = self.aside.chance(300);
        let mut files = self.host.images();
        if foreign && let Some(image) = files.get_mut(TOP) {
            let known = bits(image, AUTOCLEAR) & (IN_USE - 1);
            image.write(AUTOCLEAR, &known.to_be_bytes());
            self.replace_files(files.clone());
        }
        self.stale = Some(StaleLog {
            memory,
            image: files.remove(TOP).filter(|_| !foreign),
        });
        match foreign {
            true => self.find_stale_log(),
            false => Ok(()),
        }
    }

    /// A process finds the log that was left. If others have written to the image since, it must be refused.
    pub(crate) fn find_stale_log(&mut self) -> Result<(), String> {
        let Some(stale) = self.stale.take() else {
            return Ok(());
        };
        let image = self.host.images().remove(TOP);
        // With snapshots other programs leave the bits alone.
        let has_snapshots = image
            .as_ref()
            .is_none_or(|now| Marks::of(now).has_snapshots);
        if image == stale.image || (stale.image.is_none() && has_snapshots) {
            return Ok(());
        }
        self.stats.stale_logs += 1;
        let taken = self.adopt(&stale.memory, (STEPS_MAX, None))?;
        match taken.is_some_and(|taken| !taken.counts) {
            true => Ok(()),
            false => {
                Err("a log counts although another writer has changed the image since".to_owned())
            }
        }
    }

    /// The log of a process that is about to start, in this memory.
    pub(crate) fn log(
        &mut self,
        memory: &Memory,
        number: u64,
        kill_at: Option<u64>,
    ) -> Result<Arc<KeptLog>, String> {
        let broken = self.options.broken == Some(Rule::Log);
        KeptLog::open(memory, (number, kill_at), self.torn.fork(), broken)
    }

    /// One process takes over for at most so many steps, and until this store to its log, and goes away:
    /// nothing if it was not done.
    fn adopt(
        &mut self,
        memory: &Memory,
        (steps, kill_at): (u64, Option<u64>),
    ) -> Result<Option<Taken>, String> {
        let mut scheduler = Scheduler::new(self.random.number(), Trace::default());
        self.host = self.host.restarted(&scheduler.handle());
        let numbers: [u64; 2] = std::array::from_fn(|_| self.torn.number() >> 16 | 1);
        let log = self.log(memory, numbers[0], kill_at)?;
        let left = log.left()?.unwrap_or_default();
        let options = OpenOptions {
            commit_log: Some(log.clone()),
            ..self.engine_options()
        };
        let opened = open(&mut scheduler, &self.host, options)?;
        let (image, files) = opened.map_err(|error| format!("the image is not opened: {error}"))?;
        let queue = image.queue(files);
        let has_left = !left.commits.is_empty();
        let adopting = async move { log.log.take_over(&queue, &left, numbers[1]).await };
        let adopted = until_killed(|| scheduler.block_on("adopt", steps, adopting));
        let Some(adopted) = adopted else {
            return Ok(None);
        };
        match adopted.map_err(|stuck| stuck.to_string())? {
            None => Ok(None),
            Some(Ok(adopted)) => Ok(Some(Taken {
                counts: adopted.is_some(),
                has_left,
            })),
            Some(Err(error)) => Err(format!("adopting fails: {error:#}")),
        }
    }

    /// How the image is opened for a load.
    pub(crate) fn load_options(&self) -> OpenOptions {
        let log = self.log.clone().map(|log| -> Arc<dyn CommitLog> { log });
        OpenOptions {
            commit_log: log,
            ..self.engine_options()
        }
    }
}
