//! Waiting for each other among the tasks of one thread. First come, first served; no allocation
//! once the queues have grown to the most that ever waited.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::VecDeque;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Tasks in the order in which they came, by ticket.
#[derive(Default)]
struct Queue {
    waiting: RefCell<VecDeque<(u64, Waker)>>,
    next: Cell<u64>,
}

impl Queue {
    fn join(&self, waker: Waker) -> u64 {
        let ticket = self.next.replace(self.next.get() + 1);
        self.waiting.borrow_mut().push_back((ticket, waker));
        ticket
    }

    /// Refreshes the waker of a task that waits; `false` when it waits no more.
    fn stay(&self, ticket: u64, waker: &Waker) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        match waiting.iter_mut().find(|(other, _)| *other == ticket) {
            Some((_, old)) => {
                old.clone_from(waker);
                true
            }
            None => false,
        }
    }

    /// Takes a task out; `false` when it was not waiting any more.
    fn leave(&self, ticket: u64) -> bool {
        let removed = {
            let mut waiting = self.waiting.borrow_mut();
            let place = waiting.iter().position(|(other, _)| *other == ticket);
            place.and_then(|place| waiting.remove(place))
        };
        removed.is_some()
    }

    fn pop(&self) -> Option<Waker> {
        self.waiting
            .borrow_mut()
            .pop_front()
            .map(|(_, waker)| waker)
    }
}

/// A value that one task at a time has, across its awaits.
#[derive(Default)]
pub struct Mutex<T> {
    value: RefCell<T>,
    /// Held, or promised to the task that was woken last.
    taken: Cell<bool>,
    queue: Queue,
}

impl<T> Mutex<T> {
    /// Free.
    pub fn new(value: T) -> Mutex<T> {
        Mutex {
            value: RefCell::new(value),
            taken: Cell::new(false),
            queue: Queue::default(),
        }
    }

    /// Waits for its turn.
    pub async fn lock(&self) -> Guard<'_, T> {
        if let Some(guard) = self.try_lock() {
            return guard;
        }
        Turn {
            mutex: self,
            ticket: None,
            over: false,
        }
        .await;
        Guard {
            value: Some(self.value.borrow_mut()),
            mutex: self,
        }
    }

    /// Takes it if no task has it or waits for it.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        if self.taken.replace(true) {
            return None;
        }
        Some(Guard {
            value: Some(self.value.borrow_mut()),
            mutex: self,
        })
    }

    /// Gives it to the next in line.
    fn pass_on(&self) {
        match self.queue.pop() {
            Some(waker) => waker.wake(),
            None => self.taken.set(false),
        }
    }
}

/// Waiting for a mutex. A task that finds itself out of the queue has been given it.
struct Turn<'a, T> {
    mutex: &'a Mutex<T>,
    ticket: Option<u64>,
    over: bool,
}

impl<T> Future for Turn<'_, T> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let given = match self.ticket {
            Some(ticket) => !self.mutex.queue.stay(ticket, context.waker()),
            None => {
                let free = !self.mutex.taken.replace(true);
                if !free {
                    self.ticket = Some(self.mutex.queue.join(context.waker().clone()));
                }
                free
            }
        };
        if !given {
            return Poll::Pending;
        }
        self.over = true;
        Poll::Ready(())
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.filter(|_| !self.over) else {
            return;
        };
        if !self.mutex.queue.leave(ticket) {
            self.mutex.pass_on();
        }
    }
}

/// A locked [`Mutex`]; dropping it gives it to the next task in line.
pub struct Guard<'a, T> {
    value: Option<RefMut<'a, T>>,
    mutex: &'a Mutex<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value
            .as_ref()
            .expect("a guard has its value until it is dropped")
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value
            .as_mut()
            .expect("a guard has its value until it is dropped")
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.value = None;
        self.mutex.pass_on();
    }
}

/// Tells tasks that something has changed. What, they look up themselves, again after each wake-up.
#[derive(Default)]
pub struct Notify {
    queue: Queue,
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
        match self.queue.pop() {
            Some(waker) => waker.wake(),
            None => self.kept.set(true),
        }
    }

    /// Wakes every task that waits now.
    pub fn notify_all(&self) {
        while let Some(waker) = self.queue.pop() {
            waker.wake();
        }
    }

    /// Waits for a notification.
    pub async fn notified(&self) {
        Notified {
            notify: self,
            ticket: None,
            over: false,
        }
        .await;
    }
}

struct Notified<'a> {
    notify: &'a Notify,
    ticket: Option<u64>,
    over: bool,
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let notified = match self.ticket {
            Some(ticket) => !self.notify.queue.stay(ticket, context.waker()),
            None => self.notify.kept.replace(false),
        };
        if notified {
            self.over = true;
            return Poll::Ready(());
        }
        if self.ticket.is_none() {
            self.ticket = Some(self.notify.queue.join(context.waker().clone()));
        }
        Poll::Pending
    }
}

impl Drop for Notified<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.filter(|_| !self.over) else {
            return;
        };
        if !self.notify.queue.leave(ticket) {
            // The notification was for this one; it must not be lost.
            self.notify.notify_one();
        }
    }
}
