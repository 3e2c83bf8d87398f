//! Epoch-based reclamation of host clusters.
//!
//! A read or an in-place write looks up a mapping and then does its I/O without any lock. If the mapping
//! is removed meanwhile, the host cluster must not be given to another write before that request has
//! ended. So requests count themselves in one of two epochs. After the epoch has advanced, the old one
//! drains, and what was unmapped before the advance is free.
//!
//! Every queue counts for itself, so that requests of different threads do not share a cache line.
//!
//! Whole-image switches need more: no request inside any epoch. A [`Gate`] keeps new ones out.

use std::sync::Arc;

use crate::gate::Gate;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Two alternating epochs with the number of requests inside each.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    epoch: AtomicU64,
    handles: Mutex<Vec<Arc<Counters>>>,
    /// Keeps requests out while the whole image is switched.
    pub(crate) gate: Gate,
}

/// Requests of one queue inside each epoch, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counters([AtomicU64; 2]);

/// A queue's counters.
#[derive(Debug)]
pub(crate) struct EpochHandle(Arc<Counters>);

impl Epochs {
    /// Registers a queue, until [`Epochs::leave`].
    pub(crate) fn join(&self) -> EpochHandle {
        let counters = Arc::<Counters>::default();
        self.handles.lock().push(Arc::clone(&counters));
        EpochHandle(counters)
    }

    /// Removes a queue; none of its requests is inside.
    pub(crate) fn leave(&self, handle: &EpochHandle) {
        let mut handles = self.handles.lock();
        handles.retain(|other| !Arc::ptr_eq(other, &handle.0));
    }

    /// Enters the current epoch; the request is inside until the guard is dropped.
    pub(crate) fn enter<'a>(&'a self, handle: &'a EpochHandle) -> EpochGuard<'a> {
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let counter = handle.0.of(epoch);
            counter.fetch_add(1, Ordering::SeqCst);
            // Counted in an epoch that has ended meanwhile, the request would not be seen.
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return EpochGuard {
                    counter,
                    epochs: self,
                };
            }
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Starts a new epoch if the one before the current has drained. After `Some(epoch)`, wait for
    /// `drained(epoch)`: then every request that entered before this call has ended.
    ///
    /// One caller at a time.
    pub(crate) fn advance(&self) -> Option<u64> {
        let epoch = self.epoch.load(Ordering::SeqCst);
        if !self.drained(epoch.wrapping_add(1)) {
            return None;
        }
        self.epoch.store(epoch.wrapping_add(1), Ordering::SeqCst);
        Some(epoch)
    }

    /// Whether no request is inside any epoch.
    pub(crate) fn is_empty(&self) -> bool {
        self.drained(0) && self.drained(1)
    }

    /// Whether no request is inside `epoch`, which has ended.
    pub(crate) fn drained(&self, epoch: u64) -> bool {
        let handles = self.handles.lock();
        let inside = |handle: &Arc<Counters>| handle.of(epoch).load(Ordering::SeqCst) != 0;
        !handles.iter().any(inside)
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
pub(crate) struct EpochGuard<'a> {
    counter: &'a AtomicU64,
    epochs: &'a Epochs,
}

impl Drop for EpochGuard<'_> {
    fn drop(&mut self) {
        self.counter.fetch_sub(1, Ordering::SeqCst);
        self.epochs.gate.request_ended();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_drains_when_the_requests_of_all_queues_have_ended() {
        let epochs = Epochs::default();
        let (one, two) = (epochs.join(), epochs.join());
        let first = epochs.enter(&one);
        let epoch = epochs.advance().expect("nothing older is inside");
        let second = epochs.enter(&two);
        assert!(!epochs.drained(epoch));
        assert_eq!(
            epochs.advance(),
            None,
            "the old epoch still has a request inside"
        );
        drop(first);
        assert!(epochs.drained(epoch));
        epochs.leave(&one);
        let next = epochs.advance().expect("the old epoch has drained");
        assert!(!epochs.drained(next));
        drop(second);
        assert!(epochs.drained(next));
    }
}

#[cfg(all(test, loom))]
mod loom_model;
