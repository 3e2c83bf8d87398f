//! When nobody can be using a host cluster any more.
//!
//! A read or an in-place write looks up a mapping and then does its input or output without any
//! lock. If the mapping is removed meanwhile, the host cluster must not be given to somebody else
//! before that request has ended. Requests therefore count themselves in one of two epochs; after
//! the epoch was turned, the old one drains, and what was unmapped before the turn is free.
//!
//! Every queue counts for itself, so that requests of different threads do not meet.
//!
//! Whole-image switches need more: that no request is inside at all. [`Grace::close`] keeps new ones out
//! and waits for the others.

use std::sync::Arc;

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::waiters::Waiters;

/// Two alternating epochs with the number of requests inside each.
#[derive(Debug, Default)]
pub(crate) struct Grace {
    epoch: AtomicU64,
    members: Mutex<Vec<Arc<Counters>>>,
    /// Nobody is let in.
    closed: AtomicBool,
    /// Notified while closed when a request ends.
    ended: Waiters,
    /// Notified when it is opened again.
    opened: Waiters,
}

/// Requests of one queue inside each epoch, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counters([AtomicU64; 2]);

/// A queue that takes part.
#[derive(Debug)]
pub(crate) struct Member(Arc<Counters>);

impl Grace {
    /// Lets a queue take part, until [`Grace::leave`].
    pub(crate) fn join(&self) -> Member {
        let counters = Arc::<Counters>::default();
        self.members.lock().push(Arc::clone(&counters));
        Member(counters)
    }

    /// The queue takes part no more; none of its requests is inside.
    pub(crate) fn leave(&self, member: &Member) {
        let mut members = self.members.lock();
        members.retain(|other| !Arc::ptr_eq(other, &member.0));
    }

    /// Enters the current epoch; the request is inside until the value is dropped.
    pub(crate) fn enter<'a>(&'a self, member: &'a Member) -> Inside<'a> {
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let counter = member.0.of(epoch);
            counter.fetch_add(1, Ordering::SeqCst);
            // Counted in an epoch that has been turned meanwhile, the request would not be seen.
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return Inside {
                    counter,
                    grace: self,
                };
            }
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// The same for requests, which wait while it is closed.
    pub(crate) async fn enter_open<'a>(&'a self, member: &'a Member) -> Inside<'a> {
        loop {
            let inside = self.enter(member);
            // Whoever closes it looks for those inside afterwards.
            if !self.closed.load(Ordering::SeqCst) {
                return inside;
            }
            drop(inside);
            let ticket = self.opened.ticket();
            if self.closed.load(Ordering::SeqCst) {
                self.opened.wait(ticket).await;
            }
        }
    }

    /// Lets no more requests in and waits until none is inside. They wait until the guard is dropped.
    ///
    /// One caller at a time; not from inside a request, nor from within a pass that one may wait for.
    pub(crate) async fn close(&self) -> Closed<'_> {
        self.closed.store(true, Ordering::SeqCst);
        let closed = Closed(self);
        loop {
            let ticket = self.ended.ticket();
            if self.drained(0) && self.drained(1) {
                return closed;
            }
            self.ended.wait(ticket).await;
        }
    }

    /// Starts a new epoch if the one before the current has drained. After `Some(epoch)`, wait for
    /// `drained(epoch)`: then every request that entered before this call has ended.
    ///
    /// One caller at a time.
    pub(crate) fn turn(&self) -> Option<u64> {
        let epoch = self.epoch.load(Ordering::SeqCst);
        if !self.drained(epoch.wrapping_add(1)) {
            return None;
        }
        self.epoch.store(epoch.wrapping_add(1), Ordering::SeqCst);
        Some(epoch)
    }

    /// Whether nobody is inside `epoch`, which has been turned.
    pub(crate) fn drained(&self, epoch: u64) -> bool {
        let members = self.members.lock();
        let inside = |member: &Arc<Counters>| member.of(epoch).load(Ordering::SeqCst) != 0;
        !members.iter().any(inside)
    }
}

impl Counters {
    fn of(&self, epoch: u64) -> &AtomicU64 {
        if epoch & 1 == 0 {
            &self.0[0]
        } else {
            &self.0[1]
        }
    }
}

/// A request inside an epoch.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    counter: &'a AtomicU64,
    grace: &'a Grace,
}

/// Keeps requests out.
#[derive(Debug)]
pub(crate) struct Closed<'a>(&'a Grace);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.closed.store(false, Ordering::SeqCst);
        self.0.opened.notify();
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.counter.fetch_sub(1, Ordering::SeqCst);
        if self.grace.closed.load(Ordering::SeqCst) {
            self.grace.ended.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_drains_when_the_requests_of_all_queues_have_ended() {
        let grace = Grace::default();
        let (one, two) = (grace.join(), grace.join());
        let first = grace.enter(&one);
        let epoch = grace.turn().expect("nothing older is inside");
        let second = grace.enter(&two);
        assert!(!grace.drained(epoch));
        assert_eq!(
            grace.turn(),
            None,
            "the old epoch still has a request inside"
        );
        drop(first);
        assert!(grace.drained(epoch));
        grace.leave(&one);
        let next = grace.turn().expect("the old epoch has drained");
        assert!(!grace.drained(next));
        drop(second);
        assert!(grace.drained(next));
    }
}

#[cfg(all(test, loom))]
mod loom_model;
