//! Streams while the load runs: what lies below the top image is copied into it, and no request sees that.

use std::rc::Rc;

use gaur_engine::{Queue, Shares};
use gaur_sim::{Random, SimFile};

use super::Load;

/// Longest pause between two streams.
const PAUSE_NS: u64 = 100_000;
/// Streams in a thousand that are cancelled.
const CANCEL_PER_MILLE: u32 = 300;

impl Load {
    /// A task that streams over and over.
    pub async fn stream(self: Rc<Self>, queues: Vec<Rc<Queue<SimFile>>>, mut random: Random) {
        for _ in 0..self.config.streams {
            self.handle.doing("pausing".to_owned());
            self.handle.sleep(random.below(PAUSE_NS)).await;
            while self.exclusive.get() {
                self.handle.sleep(3_000).await;
            }
            if self.failure.borrow().is_some() {
                return;
            }
            self.active.set(self.active.get() + 1);
            self.stream_once(&queues[random.index(queues.len())], &mut random)
                .await;
            self.active.set(self.active.get() - 1);
        }
        self.handle.doing("done".to_owned());
    }

    async fn stream_once(&self, queue: &Queue<SimFile>, random: &mut Random) {
        let tag = self.begin("stream");
        let cancelled = random.chance(CANCEL_PER_MILLE);
        let job = self.impatient_job(cancelled, random);
        // Several at a time also where disks are small.
        let shares = Shares::new(random.pick(&[4096, 64 << 10, 1 << 20]));
        let streamed = queue.stream(&shares, &job).await;
        let excused = self.may_fail.get() || self.poisoned.get() || cancelled;
        match streamed {
            Ok(_) => self.stats.borrow_mut().streams += 1,
            Err(_) if excused => {}
            Err(error) => self.fail(format!("stream {tag} fails: {error:#}")),
        }
    }
}
