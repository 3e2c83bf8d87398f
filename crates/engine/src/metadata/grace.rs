//! When nobody can be using a host cluster any more.
//!
//! A read or an in-place write looks up a mapping and then does its input or output without any
//! lock. If the mapping is removed meanwhile, the host cluster must not be given to somebody else
//! before that request has ended. Requests therefore count themselves in one of two epochs; after
//! the epoch was turned, the old one drains, and what was unmapped before the turn is free.

use std::sync::atomic::{AtomicU64, Ordering};

/// Two alternating epochs with the number of requests inside each.
#[derive(Debug, Default)]
pub(crate) struct Grace {
    epoch: AtomicU64,
    inside: [AtomicU64; 2],
}

impl Grace {
    /// Enters the current epoch; the request is inside until the value is dropped.
    pub(crate) fn enter(&self) -> Inside<'_> {
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let counter = self.counter(epoch);
            counter.fetch_add(1, Ordering::SeqCst);
            // Counted in an epoch that has been turned meanwhile, the request would not be seen.
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return Inside { counter };
            }
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Starts a new epoch if the one before the current has drained. After `Some(epoch)`, wait for
    /// `drained(epoch)`: then every request that entered before this call has ended.
    pub(crate) fn turn(&self) -> Option<u64> {
        let epoch = self.epoch.load(Ordering::SeqCst);
        if self.counter(epoch.wrapping_add(1)).load(Ordering::SeqCst) != 0 {
            return None;
        }
        self.epoch.store(epoch.wrapping_add(1), Ordering::SeqCst);
        Some(epoch)
    }

    /// Whether nobody is inside `epoch`, which has been turned.
    pub(crate) fn drained(&self, epoch: u64) -> bool {
        self.counter(epoch).load(Ordering::SeqCst) == 0
    }

    fn counter(&self, epoch: u64) -> &AtomicU64 {
        if epoch & 1 == 0 {
            &self.inside[0]
        } else {
            &self.inside[1]
        }
    }
}

/// A request inside an epoch.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    counter: &'a AtomicU64,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.counter.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_drains_when_its_requests_have_ended() {
        let grace = Grace::default();
        let first = grace.enter();
        let epoch = grace.turn().expect("nothing older is inside");
        let second = grace.enter();
        assert!(!grace.drained(epoch));
        assert_eq!(
            grace.turn(),
            None,
            "the old epoch still has a request inside"
        );
        drop(first);
        assert!(grace.drained(epoch));
        let next = grace.turn().expect("the old epoch has drained");
        assert!(!grace.drained(next));
        drop(second);
        assert!(grace.drained(next));
    }
}
