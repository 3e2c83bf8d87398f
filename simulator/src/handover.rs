//! A process that takes over from one that was killed: every write that was acknowledged is there,
//! flushed or not, because the log of commits has outlived the process.

use std::sync::{Arc, Mutex};

use gaur_engine::{Commit, CommitLog, OpenOptions};
use gaur_sim::{Scheduler, Trace};

use crate::judge::Verdict;
use crate::reopen::open;
use crate::run::{Run, STEPS_MAX};

/// Records in one part that make a pass due.
const FILLING: usize = 200;

/// A log that outlives the process, as memory shared with nobody else would.
#[derive(Debug, Default)]
pub(crate) struct KeptLog(Mutex<Parts>);

#[derive(Debug, Default)]
struct Parts {
    /// What a pass under way is making durable.
    older: Vec<Commit>,
    newer: Vec<Commit>,
    failed: bool,
}

impl KeptLog {
    fn with<T>(&self, act: impl FnOnce(&mut Parts) -> T) -> T {
        act(&mut self.0.lock().expect("nobody panics while they hold it"))
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
    pub(crate) fn take_over(&mut self, left: &[Commit]) -> Result<Verdict, String> {
        for _ in 0..self.random.below(3) {
            let steps = 1 + self.random.below(200);
            if self.adopt(left, steps)? {
                break;
            }
        }
        if !self.adopt(left, STEPS_MAX)? {
            return Err("adopting does not end".to_owned());
        }
        let files = self
            .host
            .crash_images(gaur_sim::Survivors::Nothing, &mut self.random);
        self.judge(&files, true)
    }

    /// One process adopts for at most so many steps and goes away; whether it was done.
    fn adopt(&mut self, left: &[Commit], steps: u64) -> Result<bool, String> {
        let mut scheduler = Scheduler::new(self.random.number(), Trace::default());
        self.host = self.host.restarted(&scheduler.handle());
        let opened = open(&mut scheduler, &self.host, self.engine_options())?;
        let (image, files) = opened.map_err(|error| format!("the image is not opened: {error}"))?;
        let queue = image.queue(files);
        let left = left.to_vec();
        let adopting = async move { queue.adopt(&left).await.map(drop) };
        let adopted = scheduler.block_on("adopt", steps, adopting);
        match adopted.map_err(|stuck| stuck.to_string())? {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(errno)) => Err(format!("adopting fails: {errno:?}")),
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
