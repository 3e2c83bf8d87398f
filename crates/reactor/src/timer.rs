//! Timers of one reactor: who is to be woken when.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::context;

/// A deadline, and a number that tells equal ones apart.
type Key = (Instant, u64);

#[derive(Default)]
pub(crate) struct Timers {
    pending: RefCell<BTreeMap<Key, Waker>>,
    next: Cell<u64>,
}

impl Timers {
    fn add(&self, deadline: Instant, waker: Waker) -> Key {
        let key = (deadline, self.next.replace(self.next.get() + 1));
        self.pending.borrow_mut().insert(key, waker);
        key
    }

    fn remove(&self, key: Key) {
        let removed = self.pending.borrow_mut().remove(&key);
        // Not before the borrow has ended: dropping a waker may run code that comes back here.
        drop(removed);
    }

    /// How long until the first deadline; `None` when there is none.
    pub(crate) fn next_in(&self) -> Option<Duration> {
        let pending = self.pending.borrow();
        let ((deadline, _), _) = pending.first_key_value()?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    /// Wakes everybody whose time has come.
    pub(crate) fn fire(&self) {
        if self.pending.borrow().is_empty() {
            return;
        }
        let now = Instant::now();
        loop {
            let mut pending = self.pending.borrow_mut();
            let Some(first) = pending.first_entry().filter(|first| first.key().0 <= now) else {
                return;
            };
            let waker = first.remove();
            drop(pending);
            waker.wake();
        }
    }
}

/// Waits until `duration` has passed. Without a reactor it blocks the thread.
pub async fn sleep(duration: Duration) {
    let Some(deadline) = Instant::now().checked_add(duration) else {
        return std::future::pending().await;
    };
    if context::has_reactor() {
        Sleep {
            deadline,
            key: None,
        }
        .await;
    } else {
        std::thread::sleep(duration);
    }
}

struct Sleep {
    deadline: Instant,
    key: Option<Key>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.deadline {
            return Poll::Ready(());
        }
        let timers = context::current();
        if let Some(key) = self.key.take() {
            timers.timers().remove(key);
        }
        self.key = Some(timers.timers().add(self.deadline, context.waker().clone()));
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            context::with(|core| core.map(|core| core.timers().remove(key)));
        }
    }
}
