//! Waiting for a descriptor that is neither a file of the engine nor a socket: an event counter, a
//! device of the kernel's that hands out requests.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use gaur_block::Errno;
use io_uring::{opcode, types};

use crate::context;
use crate::op::Op;
use crate::reactor::Engine;
use crate::syscall;

/// An open descriptor whose readiness tasks can wait for. Reading and writing it is the caller's
/// business; it may move between threads between calls.
#[derive(Debug)]
pub struct Descriptor {
    fd: OwnedFd,
}

impl Descriptor {
    /// Takes a descriptor over.
    pub fn new(fd: OwnedFd) -> Descriptor {
        Descriptor { fd }
    }

    /// Waits until something can be read, or the other side has gone.
    ///
    /// # Errors
    /// When the descriptor cannot be waited for.
    pub async fn readable(&self) -> Result<(), Errno> {
        self.ready(libc::POLLIN).await
    }

    /// Waits until something can be written, or the other side has gone.
    ///
    /// # Errors
    /// When the descriptor cannot be waited for.
    pub async fn writable(&self) -> Result<(), Errno> {
        self.ready(libc::POLLOUT).await
    }

    async fn ready(&self, events: libc::c_short) -> Result<(), Errno> {
        let fd = self.fd.as_raw_fd();
        let Some(core) = context::find() else {
            return block(fd, events);
        };
        match core.engine() {
            Engine::Fallback(readiness) => {
                readiness.ready(fd, events).await;
                Ok(())
            }
            Engine::Ring(ring) => {
                let entry = opcode::PollAdd::new(types::Fd(fd), events as u32).build();
                loop {
                    // SAFETY: the entry points to nothing.
                    match unsafe { Op::new(ring, entry.clone()) }.await {
                        Err(Errno::EINTR) => {}
                        result => return result.map(drop),
                    }
                }
            }
        }
    }
}

/// Without a reactor the thread itself waits.
fn block(fd: RawFd, events: libc::c_short) -> Result<(), Errno> {
    let mut wait = libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    loop {
        // SAFETY: the pointer is to one element.
        match unsafe { libc::poll(&raw mut wait, 1, -1) } {
            1.. => return Ok(()),
            _ => match syscall::last_errno() {
                Errno::EINTR => {}
                errno => return Err(errno),
            },
        }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
