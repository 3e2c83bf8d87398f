//! One range of an object, asked for until it is there or time is up.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};

use crate::store::{Facts, Fault, Source};

/// Longest wait for one answer.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);
/// Between two attempts: at first, and at most.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The shortest time after which a request is asked a second time beside the first.
const HEDGE_MIN: Duration = Duration::from_millis(250);
/// How many times the usual time of an answer that is.
const HEDGE_FACTOR: u32 = 4;

/// How long answers take here, learned from those that came.
#[derive(Debug, Default)]
pub(crate) struct Pace(AtomicU64);

impl Pace {
    /// Every answer moves it by an eighth.
    fn learn(&self, took: Duration) {
        let took = took.as_micros() as u64;
        let known = self.0.load(Ordering::Relaxed);
        let next = match known {
            0 => took,
            known => known - known / 8 + took / 8,
        };
        self.0.store(next.max(1), Ordering::Relaxed);
    }

    /// When an answer is late; never before there was one.
    fn late(&self) -> Duration {
        match self.0.load(Ordering::Relaxed) {
            0 => ANSWER,
            usual => (Duration::from_micros(usual) * HEDGE_FACTOR).max(HEDGE_MIN),
        }
    }
}

/// The bytes of a range, or why not, after so long at most. `tell` hears of each fault.
pub(crate) async fn range(
    source: &Source,
    facts: &Facts,
    range: Range<u64>,
    pace: &Pace,
    patience: Duration,
    tell: impl Fn(&Fault),
) -> Result<Bytes, Fault> {
    let ask = || hedged(source, facts, range.clone(), pace);
    repeat(ask, patience, tell).await
}

/// What the object is.
pub(crate) async fn look(source: &Source, patience: Duration) -> Result<Facts, Fault> {
    repeat(|| within(ANSWER, source.look()), patience, |_| {}).await
}

/// Asks until it works, the fault is one that stays, or time is up. `tell` hears of each fault.
pub(crate) async fn repeat<T, F: Future<Output = Result<T, Fault>>>(
    ask: impl Fn() -> F,
    patience: Duration,
    tell: impl Fn(&Fault),
) -> Result<T, Fault> {
    let deadline = Instant::now() + patience;
    let mut pause = PAUSE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let fault = match within(left, ask()).await {
            Ok(found) => return Ok(found),
            Err(fault) => fault,
        };
        tell(&fault);
        // A store may ask for any time; longer than the patience is as good as never.
        let wait = fault.after.unwrap_or_default().min(patience).max(pause);
        if !fault.passes || Instant::now() + wait >= deadline {
            return Err(fault);
        }
        sleep(wait).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// An answer that is there in time.
pub(crate) async fn within<T>(
    time: Duration,
    answer: impl Future<Output = Result<T, Fault>>,
) -> Result<T, Fault> {
    let answer = timeout(time, answer).await;
    answer.unwrap_or_else(|_| Err(Fault::passing("the store does not answer")))
}

/// A second request goes out when the first is late, and the first answer counts.
pub(crate) async fn hedged(
    source: &Source,
    facts: &Facts,
    range: Range<u64>,
    pace: &Pace,
) -> Result<Bytes, Fault> {
    let start = Instant::now();
    let one = || within(ANSWER, source.range(range.clone(), facts));
    let mut first = std::pin::pin!(one());
    let answer = match timeout(pace.late(), &mut first).await {
        Ok(answer) => answer,
        Err(_) => tokio::select! {
            answer = &mut first => answer,
            answer = one() => answer,
        },
    };
    if answer.is_ok() {
        pace.learn(start.elapsed());
    }
    answer
}
