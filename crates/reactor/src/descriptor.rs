//! Waiting for a descriptor that is neither a file of the engine nor a socket: an event counter, a
//! device of the kernel's that hands out requests.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_block::Errno;
use io_uring::{opcode, types};
use rustix::event::{PollFd, PollFlags, poll};

use crate::context;
use crate::op::Op;
use crate::reactor::Engine;
use crate::syscall::{self, again};

/// An open descriptor whose readiness tasks can wait for. Reading and writing it is the caller's
/// business; it may move between threads between calls.
#[derive(Debug)]
pub struct Descriptor {
    fd: OwnedFd,
    /// It does not block, so a ring does not wait for it to be read.
    never_blocks: AtomicBool,
}

impl Descriptor {
    /// Takes a descriptor over.
    pub fn new(fd: OwnedFd) -> Descriptor {
        let never_blocks = AtomicBool::new(false);
        Descriptor { fd, never_blocks }
    }

    /// Takes over one that does not block (`O_NONBLOCK`), or belongs to a process that must not be trusted to
    /// have it answer at once: it is only ever asked whether there is something.
    pub fn never_blocking(fd: OwnedFd) -> Descriptor {
        let never_blocks = AtomicBool::new(true);
        Descriptor { fd, never_blocks }
    }

    /// Waits until something can be read, or the other side has gone.
    ///
    /// # Errors
    /// When the descriptor cannot be waited for.
    pub async fn readable(&self) -> Result<(), Errno> {
        self.ready(PollFlags::IN).await
    }

    /// Waits until something can be written, or the other side has gone.
    ///
    /// # Errors
    /// When the descriptor cannot be waited for.
    pub async fn writable(&self) -> Result<(), Errno> {
        self.ready(PollFlags::OUT).await
    }

    /// Takes what an event counter (`eventfd(2)`) has counted, once that is not 0. With a ring, and a
    /// counter that blocks, waiting and taking are one operation.
    ///
    /// # Errors
    /// When the descriptor cannot be waited for or read, or nothing will come any more.
    pub async fn count(&self) -> Result<u64, Errno> {
        loop {
            let taken = match self.take_by_ring().await {
                None => {
                    self.readable().await?;
                    self.take_now()
                }
                Some(taken) => taken,
            };
            match taken {
                // Another thread has taken it, or the ring does not wait for this one.
                Err(Errno::EAGAIN) => self.never_blocks.store(true, Ordering::Relaxed),
                taken => return taken,
            }
        }
    }

    /// Takes the count in one operation of the ring; `None` where that cannot be.
    async fn take_by_ring(&self) -> Option<Result<u64, Errno>> {
        if self.never_blocks.load(Ordering::Relaxed) {
            return None;
        }
        let core = context::find()?;
        let ring = core.ring()?;
        let mut count = [0; size_of::<u64>()];
        let (start, len) = (count.as_mut_ptr(), count.len() as u32);
        let entry = opcode::Read::new(types::Fd(self.fd.as_raw_fd()), start, len).build();
        // SAFETY: the bytes are this future's own, and the operation, made later, goes first.
        Some(match unsafe { Op::run(ring, entry) }.await {
            Ok(0) => Err(Errno::from_raw(libc::EPIPE)),
            result => result.map(|_| u64::from_ne_bytes(count)),
        })
    }

    fn take_now(&self) -> Result<u64, Errno> {
        let mut count = [0; size_of::<u64>()];
        match syscall::read_now(self.fd.as_fd(), &mut count)? {
            0 => Err(Errno::from_raw(libc::EPIPE)),
            _ => Ok(u64::from_ne_bytes(count)),
        }
    }

    async fn ready(&self, events: PollFlags) -> Result<(), Errno> {
        let fd = self.fd.as_raw_fd();
        let Some(core) = context::find() else {
            // The thread itself waits.
            let mut wait = [PollFd::new(&self.fd, events)];
            return again(|| poll(&mut wait, None)).map(drop);
        };
        match core.engine() {
            Engine::Fallback(readiness) => {
                readiness.ready(fd, events).await;
                Ok(())
            }
            Engine::Ring(ring) => {
                let events = u32::from(events.bits());
                let entry = opcode::PollAdd::new(types::Fd(fd), events).build();
                // SAFETY: the entry points to nothing.
                unsafe { Op::run(ring, entry) }.await.map(drop)
            }
        }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
