//! Progress, pace and cancellation of a long operation.

use gaur_block::Errno;

use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::waiters::Waiters;

/// A long operation, seen from outside. Any thread may look at it, or cancel it; what is cancelled
/// leaves the image as it was.
#[derive(Debug, Default)]
pub struct Job {
    done: AtomicU64,
    total: AtomicU64,
    cancelled: AtomicBool,
    /// Bytes that were begun, and how many may be, where there is a limit.
    begun: AtomicU64,
    allowed: OnceLock<AtomicU64>,
    /// Work that waits for its turn.
    waiting: Waiters,
}

impl Job {
    /// Limits how many bytes of data may have been moved in all, from now on. Who limits a job raises the limit as time
    /// goes by: the engine knows no clock. Commits ask for it.
    pub fn allow(&self, bytes: u64) {
        let allowed = self.allowed.get_or_init(AtomicU64::default);
        allowed.fetch_max(bytes, Ordering::AcqRel);
        self.waiting.notify();
    }

    /// Waits until more may be moved, and counts it; `ECANCELED` if it is not wanted any more.
    pub(crate) async fn admit(&self, bytes: u64) -> Result<(), Errno> {
        let Some(allowed) = self.allowed.get() else {
            return Ok(());
        };
        let fits = |begun: u64| {
            let room = begun < allowed.load(Ordering::Acquire);
            room.then(|| begun.saturating_add(bytes))
        };
        loop {
            let ticket = self.waiting.ticket();
            self.step(0)?;
            let (begun, order) = (&self.begun, Ordering::AcqRel);
            if begun.fetch_update(order, Ordering::Acquire, fits).is_ok() {
                return Ok(());
            }
            self.waiting.wait(ticket).await;
        }
    }

    /// Bytes done (of metadata, or of the disk when it is resized), and how many there are to do as far as is known (0: not yet).
    pub fn progress_bytes(&self) -> (u64, u64) {
        let total = self.total.load(Ordering::Relaxed);
        (self.done.load(Ordering::Relaxed).min(total), total)
    }

    /// Asks for the end of the operation. It may be too late: then it succeeds.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.waiting.notify();
    }

    /// Whether the end was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// There is so much more to do.
    pub(crate) fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So much more was done; `ECANCELED` if the rest is not wanted.
    pub(crate) fn step(&self, bytes: u64) -> Result<(), Errno> {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        match self.is_cancelled() {
            true => Err(Errno::ECANCELED),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn work_waits_for_its_turn_and_for_no_more_after_a_cancel() {
        let job = Job::default();
        let context = &mut Context::from_waker(Waker::noop());
        // Without a limit nobody waits.
        let mut free = pin!(job.admit(1 << 40));
        assert_eq!(free.as_mut().poll(context), Poll::Ready(Ok(())));
        job.allow(1);
        let mut first = pin!(job.admit(100));
        assert_eq!(first.as_mut().poll(context), Poll::Ready(Ok(())));
        let mut second = pin!(job.admit(100));
        assert!(second.as_mut().poll(context).is_pending());
        job.allow(100);
        assert!(second.as_mut().poll(context).is_pending());
        job.allow(101);
        assert_eq!(second.as_mut().poll(context), Poll::Ready(Ok(())));
        let mut third = pin!(job.admit(1));
        assert!(third.as_mut().poll(context).is_pending());
        job.cancel();
        let ended = Poll::Ready(Err(Errno::ECANCELED));
        assert_eq!(third.as_mut().poll(context), ended);
    }
}
