//! Waiting for descriptors without a ring, by `poll(2)`: the fallback's other half.
//!
//! It serves machines where io_uring is forbidden, so it is simple rather than fast: each wait looks
//! at every descriptor that a task waits for.

use std::cell::RefCell;
use std::future::Future;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::event::PollFlags;
use slab::Slab;

struct Wait {
    fd: RawFd,
    events: PollFlags,
    waker: Waker,
    done: bool,
}

/// Room at the start: the first wait should not be the one that allocates.
const WAITS_AT_START: usize = 64;

struct State {
    waits: Slab<Wait>,
    /// The array for `poll`, kept for its memory.
    asked: Vec<libc::pollfd>,
    /// Which wait each element of `asked` is for; the first is the inbox's event.
    owners: Vec<usize>,
}

impl Default for State {
    fn default() -> State {
        State {
            waits: Slab::with_capacity(WAITS_AT_START),
            asked: Vec::with_capacity(WAITS_AT_START),
            owners: Vec::with_capacity(WAITS_AT_START),
        }
    }
}

/// The descriptors that tasks of one reactor wait for.
#[derive(Default)]
pub(crate) struct Readiness {
    state: RefCell<State>,
}

impl Readiness {
    /// Waits until one of `events` (or an error, or a hang-up) is there.
    pub(crate) fn ready(&self, fd: RawFd, events: PollFlags) -> Ready<'_> {
        Ready {
            readiness: self,
            fd,
            events,
            slot: None,
        }
    }

    /// Waits until a descriptor is ready, `event` can be read, or the time is up; then wakes those
    /// concerned.
    pub(crate) fn wait(&self, event: RawFd, timeout: Option<Duration>) {
        let mut state = self.state.borrow_mut();
        let State {
            waits,
            asked,
            owners,
        } = &mut *state;
        asked.clear();
        owners.clear();
        asked.push(libc::pollfd {
            fd: event,
            events: libc::POLLIN,
            revents: 0,
        });
        owners.push(usize::MAX);
        for (index, wait) in waits.iter().filter(|(_, wait)| !wait.done) {
            asked.push(libc::pollfd {
                fd: wait.fd,
                events: wait.events.bits() as libc::c_short,
                revents: 0,
            });
            owners.push(index);
        }
        let timeout_ms = match timeout {
            None => -1,
            // Rounded up, so that a wait never ends just before its time.
            Some(time) => {
                libc::c_int::try_from(time.as_micros().div_ceil(1000)).unwrap_or(libc::c_int::MAX)
            }
        };
        // SAFETY: the pointer and count are those of a vector.
        let found =
            unsafe { libc::poll(asked.as_mut_ptr(), asked.len() as libc::nfds_t, timeout_ms) };
        if found <= 0 {
            return;
        }
        for (answer, owner) in asked.iter().zip(owners.iter()).skip(1) {
            if answer.revents != 0 {
                let wait = &mut waits[*owner];
                wait.done = true;
                // Wakers of tasks put them into a queue and do not come back here.
                wait.waker.wake_by_ref();
            }
        }
    }
}

/// See [`Readiness::ready`].
pub(crate) struct Ready<'a> {
    readiness: &'a Readiness,
    fd: RawFd,
    events: PollFlags,
    slot: Option<usize>,
}

impl Future for Ready<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let readiness = self.readiness;
        let waits = &mut readiness.state.borrow_mut().waits;
        let waker = context.waker();
        let Some(slot) = self.slot else {
            self.slot = Some(waits.insert(Wait {
                fd: self.fd,
                events: self.events,
                waker: waker.clone(),
                done: false,
            }));
            return Poll::Pending;
        };
        if waits[slot].done {
            waits.remove(slot);
            self.slot = None;
            return Poll::Ready(());
        }
        waits[slot].waker.clone_from(waker);
        Poll::Pending
    }
}

impl Drop for Ready<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.readiness.state.borrow_mut().waits.remove(slot);
        }
    }
}
