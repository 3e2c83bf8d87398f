//! Waiting for each other among the tasks of one thread. First come, first served; no allocation
//! once the queues have grown to the most that ever waited.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Tells tasks that something has changed. What, they look up themselves, again after each wake-up.
#[derive(Default)]
pub struct Notify {
    /// Tasks in the order in which they came, by ticket.
    waiting: RefCell<VecDeque<(u64, Waker)>>,
    next: Cell<u64>,
    /// A notification that came while no task waited.
    kept: Cell<bool>,
}

impl Notify {
    /// Nothing to tell.
    pub fn new() -> Notify {
        Notify::default()
    }

    /// Wakes the task that has waited longest; when none waits, the next one that does goes on at
    /// once.
    pub fn notify_one(&self) {
        let first = self.waiting.borrow_mut().pop_front();
        match first {
            Some((_, waker)) => waker.wake(),
            None => self.kept.set(true),
        }
    }

    /// Wakes every task that waits now.
    pub fn notify_all(&self) {
        loop {
            let first = self.waiting.borrow_mut().pop_front();
            let Some((_, waker)) = first else { return };
            waker.wake();
        }
    }

    /// Waits for a notification.
    pub async fn notified(&self) {
        Notified {
            notify: self,
            ticket: None,
        }
        .await;
    }
}

struct Notified<'a> {
    notify: &'a Notify,
    /// While it waits.
    ticket: Option<u64>,
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let notify = self.notify;
        let waker = context.waker();
        let mut waiting = notify.waiting.borrow_mut();
        let Some(ticket) = self.ticket else {
            if notify.kept.replace(false) {
                return Poll::Ready(());
            }
            let ticket = notify.next.replace(notify.next.get() + 1);
            waiting.push_back((ticket, waker.clone()));
            self.ticket = Some(ticket);
            return Poll::Pending;
        };
        match waiting.iter_mut().find(|(other, _)| *other == ticket) {
            Some((_, old)) => {
                old.clone_from(waker);
                Poll::Pending
            }
            // It was taken out, to be woken.
            None => {
                self.ticket = None;
                Poll::Ready(())
            }
        }
    }
}

impl Drop for Notified<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let removed = {
            let mut waiting = self.notify.waiting.borrow_mut();
            let place = waiting.iter().position(|(other, _)| *other == ticket);
            place.and_then(|place| waiting.remove(place))
        };
        if removed.is_none() {
            // The notification was for this one; it must not be lost.
            self.notify.notify_one();
        }
    }
}
