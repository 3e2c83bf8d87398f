//! Gate for requests: a switch of the whole image closes it and waits until none is inside.
//!
//! Requests count themselves (`metadata::epochs`) and look at the gate after that; the task that closes it looks
//! at the counts after that. So one of the two sees the other.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::waiters::Waiters;

/// The gate; open at first.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    /// Notified while it is closed when a request ends.
    ended: Waiters,
    /// Notified when it is opened again.
    opened: Waiters,
}

impl Gate {
    /// Whether requests have to wait.
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// A request has ended, and does not count any more.
    #[inline]
    pub(crate) fn request_ended(&self) {
        if self.is_closed() {
            self.ended.notify();
        }
    }

    /// Waits while it is closed. A request that waits does not count.
    pub(crate) async fn wait(&self) {
        let ticket = self.opened.ticket();
        if self.is_closed() {
            self.opened.wait(ticket).await;
        }
    }

    /// Lets no more requests in and waits until `empty` says that none is inside. They wait until the
    /// guard is dropped.
    ///
    /// One caller at a time; not from inside a request, nor from within a pass that one may wait for.
    pub(crate) async fn close(&self, empty: impl Fn() -> bool) -> Closed<'_> {
        self.closed.store(true, Ordering::SeqCst);
        let closed = Closed(self);
        loop {
            let ticket = self.ended.ticket();
            if empty() {
                return closed;
            }
            self.ended.wait(ticket).await;
        }
    }
}

/// Keeps requests out.
#[derive(Debug)]
pub(crate) struct Closed<'a>(&'a Gate);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.closed.store(false, Ordering::SeqCst);
        self.0.opened.notify();
    }
}
