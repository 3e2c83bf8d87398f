//! Checks of the image while the load runs: they find nothing that a check of the file would not, and do no harm.

use std::rc::Rc;

use gaur_engine::{Checked, Queue};
use gaur_sim::{Random, SimFile};

use super::Load;

/// Longest pause between two checks.
const PAUSE_NS: u64 = 100_000;
/// Checks in a thousand that are cancelled.
const CANCEL_PER_MILLE: u32 = 200;

impl Load {
    /// A task that checks the image over and over; it had `leaks` leaked clusters when it was opened.
    pub async fn check_online(
        self: Rc<Self>,
        queues: Vec<Rc<Queue<SimFile>>>,
        mut random: Random,
        leaks: u64,
    ) {
        for _ in 0..self.config.online_checks {
            self.handle.doing("pausing".to_owned());
            self.handle.sleep(random.below(PAUSE_NS)).await;
            while self.exclusive.get() {
                self.handle.sleep(3_000).await;
            }
            if self.failure.borrow().is_some() {
                return;
            }
            self.active.set(self.active.get() + 1);
            self.check_once(&queues[random.index(queues.len())], &mut random, leaks)
                .await;
            self.active.set(self.active.get() - 1);
        }
        self.handle.doing("done".to_owned());
    }

    async fn check_once(&self, queue: &Queue<SimFile>, random: &mut Random, leaks: u64) {
        let tag = self.begin("check");
        let cancelled = random.chance(CANCEL_PER_MILLE);
        let was_saving = self.saving.get() > 0;
        let job = self.impatient_job(cancelled, random);
        let checked = queue.check(&job).await;
        let excused = self.may_fail.get() || self.poisoned.get();
        match checked {
            Ok(checked) => {
                self.stats.borrow_mut().online_checks += 1;
                // What could not be read is found, too; and what a failure has leaked.
                let wrong = is_wrong(&checked, leaks);
                if checked.report.corruptions > 0 || wrong && !excused {
                    self.fail(format!("check {tag}: {checked:?}, leaked at first {leaks}"));
                }
            }
            Err(_) if excused || cancelled || was_saving || self.saving.get() > 0 => {}
            Err(error) => self.fail(format!("check {tag} fails: {error:#}")),
        }
    }
}

fn is_wrong(checked: &Checked, leaks: u64) -> bool {
    checked.report.check_errors > 0 || checked.report.leaks > leaks
}
