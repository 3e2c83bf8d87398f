//! When nobody can be using a host cluster any more.
//!
//! A read or an in-place write looks up a mapping and then does its input or output without any
//! lock. If the mapping is removed meanwhile, the host cluster must not be given to somebody else
//! before that request has ended. Requests therefore count themselves in one of two epochs; after
//! the epoch was turned, the old one drains, and what was unmapped before the turn is free.
//!
//! Every queue counts for itself, so that requests of different threads do not meet.
//!
//! Whole-image switches need more: that no request is inside at all. A [`Gate`] keeps new ones out.

use std::sync::Arc;

use crate::gate::Gate;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Two alternating epochs with the number of requests inside each.
#[derive(Debug, Default)]
pub(crate) struct Grace {
    epoch: AtomicU64,
    members: Mutex<Vec<Arc<Counters>>>,
    /// Keeps requests out while the whole image is switched.
    pub(crate) gate: Gate,
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

    /// Whether nobody is inside any epoch.
    pub(crate) fn is_empty(&self) -> bool {
        self.drained(0) && self.drained(1)
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

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.counter.fetch_sub(1, Ordering::SeqCst);
        self.grace.gate.request_ended();
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
