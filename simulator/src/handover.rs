//! Handover after a kill: a new process finds every acknowledged write, flushed or not, because the commit
//! log has outlived the killed one. Once another writer has changed the image, the log must be refused.

use std::sync::{Arc, Mutex};

use gaur_engine::{Commit, CommitLog, OpenOptions};
use gaur_sim::{FileImage, Scheduler, Trace};

use crate::judge::Verdict;
use crate::machine::TOP;
use crate::reopen::open;
use crate::run::{Run, STEPS_MAX};

/// Records in one part that make a pass due.
const FILLING: usize = 200;
/// The header's autoclear bits, and the compatible ones.
const AUTOCLEAR: u64 = 88;
const COMPATIBLE: u64 = 80;
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
    /// All autoclear bits.
    autoclear: u64,
    /// The compatible bits that are the engine's own.
    compatible: u64,
    has_snapshots: bool,
}

impl Marks {
    pub(crate) fn of(image: &FileImage) -> Marks {
        Marks {
            autoclear: bits(image, AUTOCLEAR),
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
        unchanged || (self.compatible == 0 && [leaked, 0].contains(&self.autoclear))
    }
}

/// A log that outlives the process, as a memory file would.
#[derive(Debug)]
pub(crate) struct KeptLog {
    number: u64,
    parts: Mutex<Parts>,
}

/// The state that a killed process has left and no process has taken over yet.
#[derive(Debug)]
pub(crate) struct StaleLog {
    number: u64,
    left: Vec<Commit>,
    /// The image as it was left; `None` if another writer has changed it.
    image: Option<FileImage>,
}

#[derive(Debug, Default)]
struct Parts {
    /// What a pass under way is making durable.
    older: Vec<Commit>,
    newer: Vec<Commit>,
    failed: bool,
}

impl KeptLog {
    /// An empty log.
    pub(crate) fn new(number: u64) -> KeptLog {
        let parts = Mutex::default();
        KeptLog { number, parts }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Parts) -> T) -> T {
        act(&mut self.parts.lock().expect("no holder panics"))
    }

    /// What is left; `None` if a pass has failed.
    pub(crate) fn left(&self) -> Option<Vec<Commit>> {
        self.with(|parts| {
            let all = parts.older.iter().chain(&parts.newer).copied();
            (!parts.failed).then(|| all.collect())
        })
    }
}

impl CommitLog for KeptLog {
    fn number(&self) -> u64 {
        self.number
    }

    fn committed(&self, commit: Commit) {
        self.with(|parts| parts.newer.push(commit));
    }

    fn pass_starts(&self) {
        self.with(|parts| {
            let newer = std::mem::take(&mut parts.newer);
            parts.older.extend(newer);
        });
    }

    fn pass_ends(&self) {
        self.with(|parts| parts.older.clear());
    }

    fn failed(&self) {
        self.with(|parts| parts.failed = true);
    }

    fn is_filling(&self) -> bool {
        self.with(|parts| parts.newer.len() > FILLING)
    }
}

impl Run<'_> {
    /// The next process adopts what the killed one had committed; now and then it is killed as well,
    /// and another one does. Then all that was acknowledged is there, and durable.
    pub(crate) fn take_over(&mut self, number: u64, left: &[Commit]) -> Result<Verdict, String> {
        for _ in 0..self.random.below(3) {
            let steps = 1 + self.random.below(200);
            if self.adopt(number, left, steps)?.is_some() {
                break;
            }
        }
        match self.adopt(number, left, STEPS_MAX)? {
            None => return Err("adopting does not end".to_owned()),
            // Who was killed before the first change had nothing to leave.
            Some(false) if !left.is_empty() => return Err("the log is not known".to_owned()),
            Some(_) => {}
        }
        let files = self
            .host
            .crash_images(gaur_sim::Survivors::Nothing, &mut self.random);
        self.judge(&files, true)
    }

    /// No handover: the log stays, and the next process writes without it. It may be another program,
    /// which clears the bits that it does not know before it changes anything.
    pub(crate) fn leave_log(&mut self, number: u64, left: Vec<Commit>) -> Result<(), String> {
        let foreign = self.aside.chance(300);
        let mut files = self.host.images();
        if foreign && let Some(image) = files.get_mut(TOP) {
            let known = bits(image, AUTOCLEAR) & (IN_USE - 1);
            image.write(AUTOCLEAR, &known.to_be_bytes());
            self.replace_files(files.clone());
        }
        self.stale = Some(StaleLog {
            number,
            left,
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
        match self.adopt(stale.number, &stale.left, STEPS_MAX)? {
            Some(false) => Ok(()),
            _ => Err("a log counts although another writer has changed the image since".to_owned()),
        }
    }

    /// One process adopts for at most so many steps and goes away: nothing if it was not done, else whether
    /// the log counts.
    fn adopt(&mut self, number: u64, left: &[Commit], steps: u64) -> Result<Option<bool>, String> {
        let mut scheduler = Scheduler::new(self.random.number(), Trace::default());
        self.host = self.host.restarted(&scheduler.handle());
        let options = OpenOptions {
            commit_log: Some(Arc::new(KeptLog::new(number))),
            ..self.engine_options()
        };
        let opened = open(&mut scheduler, &self.host, options)?;
        let (image, files) = opened.map_err(|error| format!("the image is not opened: {error}"))?;
        let queue = image.queue(files);
        let left = left.to_vec();
        let adopting = async move { queue.adopt(&left, true).await };
        let adopted = scheduler.block_on("adopt", steps, adopting);
        match adopted.map_err(|stuck| stuck.to_string())? {
            None => Ok(None),
            Some(Ok(adopted)) => Ok(Some(adopted.is_some())),
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
