//! Events and locks for tasks, without a runtime: tasks of any thread can wait for them.
//!
//! The order of steps makes lost wake-ups impossible: take a ticket, look at the state, and only
//! then wait on the ticket. Every [`Waiters::notify`] after the ticket was taken ends the wait.

use std::future::poll_fn;
use std::task::{Poll, Waker};

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, TaskMutex};

/// An event with a generation number.
///
/// Notifying when no task waits, the common case, takes no lock. A task that waits says so before it looks
/// at the generation, and one that notifies changes the generation before it looks for waiters, so
/// one of the two sees the other.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    generation: AtomicU64,
    waiting: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
}

/// A moment before which nothing is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

impl Waiters {
    /// Marks this moment; take it before looking at what is waited for.
    pub(crate) fn ticket(&self) -> Ticket {
        Ticket(self.generation.load(Ordering::SeqCst))
    }

    /// Wakes every task that waits.
    pub(crate) fn notify(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        if !self.waiting.load(Ordering::SeqCst) {
            return;
        }
        let mut woken = {
            let mut wakers = self.wakers.lock();
            self.waiting.store(false, Ordering::SeqCst);
            std::mem::take(&mut *wakers)
        };
        for waker in woken.drain(..) {
            waker.wake();
        }
        // Hand the memory back, so that waiting does not allocate for ever.
        let mut wakers = self.wakers.lock();
        if wakers.capacity() < woken.capacity() && wakers.is_empty() {
            *wakers = woken;
        }
    }

    /// Waits for the first `notify` after `ticket`.
    pub(crate) async fn wait(&self, ticket: Ticket) {
        poll_fn(|context| {
            let mut wakers = self.wakers.lock();
            self.waiting.store(true, Ordering::SeqCst);
            if self.ticket() != ticket {
                // A flag that stays set costs the next `notify` a look at an empty list.
                return Poll::Ready(());
            }
            if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}

/// A lock that a task may hold while it waits for input and output. Giving it up wakes one of the
/// tasks that wait.
pub(crate) type AsyncLock = TaskMutex<()>;

/// Locks on single numbers: host offsets being loaded, L1 entries being given a table.
#[derive(Debug, Default)]
pub(crate) struct KeyLocks {
    held: Mutex<Vec<u64>>,
    waiters: Waiters,
}

impl KeyLocks {
    /// Takes the lock on `key`, or waits until its holder is done and returns `None`: what the
    /// caller wanted to do has probably been done meanwhile.
    pub(crate) async fn lock_or_wait(&self, key: u64) -> Option<KeyGuard<'_>> {
        let ticket = self.waiters.ticket();
        if let Some(guard) = self.try_lock(key) {
            return Some(guard);
        }
        self.waiters.wait(ticket).await;
        None
    }

    fn try_lock(&self, key: u64) -> Option<KeyGuard<'_>> {
        let mut held = self.held.lock();
        if held.contains(&key) {
            return None;
        }
        held.push(key);
        Some(KeyGuard { locks: self, key })
    }
}

/// Holds one key of [`KeyLocks`].
#[derive(Debug)]
pub(crate) struct KeyGuard<'a> {
    locks: &'a KeyLocks,
    key: u64,
}

impl Drop for KeyGuard<'_> {
    fn drop(&mut self) {
        {
            let mut held = self.locks.held.lock();
            if let Some(at) = held.iter().position(|key| *key == self.key) {
                held.swap_remove(at);
            }
        }
        self.locks.waiters.notify();
    }
}

#[cfg(all(test, loom))]
mod loom_model;
