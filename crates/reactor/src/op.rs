//! One operation of a ring, as a future.
//!
//! The kernel reads and writes the operation's memory until it completes, so dropping the future
//! early asks the kernel to cancel and waits until it has let go. A future must therefore not be
//! leaked (`std::mem::forget`) while the operation is in flight, as `gaur_block::File` says.

use std::future::Future;
use std::os::fd::{FromRawFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use gaur_block::Errno;
use io_uring::squeue;

use crate::ring::Ring;

enum State {
    New(squeue::Entry),
    InFlight(u32),
    Done,
}

/// An operation that starts when it is first polled. The output is the kernel's result, 0 or more.
pub(crate) struct Op<'a> {
    ring: &'a Ring,
    state: State,
    /// The result is a new descriptor, to be closed if its task has gone.
    makes_fd: bool,
}

impl<'a> Op<'a> {
    /// # Safety
    /// What the entry points to stays valid for as long as this value exists.
    pub(crate) unsafe fn new(ring: &'a Ring, entry: squeue::Entry) -> Op<'a> {
        Op {
            ring,
            state: State::New(entry),
            makes_fd: false,
        }
    }

    /// Runs an operation, anew for as long as a signal interrupts it.
    ///
    /// # Safety
    /// What the entry points to stays valid for as long as the future exists.
    pub(crate) async unsafe fn run(ring: &Ring, entry: squeue::Entry) -> Result<u32, Errno> {
        loop {
            // SAFETY: the caller's promise.
            match unsafe { Op::new(ring, entry.clone()) }.await {
                Err(Errno::EINTR) => {}
                result => return result,
            }
        }
    }

    /// For operations whose result is a new descriptor.
    pub(crate) fn makes_fd(mut self) -> Op<'a> {
        self.makes_fd = true;
        self
    }
}

impl Future for Op<'_> {
    type Output = Result<u32, Errno>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &self.state {
            State::New(entry) => {
                // SAFETY: the promise made to `new`; `drop` waits for the kernel.
                let slot = unsafe { self.ring.start(entry.clone(), context.waker().clone()) };
                self.state = State::InFlight(slot);
                Poll::Pending
            }
            State::InFlight(slot) => match self.ring.take(*slot, context.waker()) {
                None => Poll::Pending,
                Some(result) => {
                    self.state = State::Done;
                    Poll::Ready(outcome(result))
                }
            },
            State::Done => panic!("an operation is polled until it is done and no further"),
        }
    }
}

impl Drop for Op<'_> {
    fn drop(&mut self) {
        let State::InFlight(slot) = self.state else {
            return;
        };
        let result = outcome(self.ring.cancel(slot));
        if let (true, Ok(fd)) = (self.makes_fd, result) {
            // SAFETY: the kernel made this descriptor for the operation, and nothing else knows it.
            drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
        }
    }
}

/// The kernel answers with a negative error number or a result.
fn outcome(result: i32) -> Result<u32, Errno> {
    u32::try_from(result).map_err(|_| Errno::from_raw(result.wrapping_neg()))
}
