//! The keeper: a thread that waits for what serving threads must not wait for, and that sees an export
//! to its end.
//!
//! Unmounting may need the file to be served, and so may resizing the disk. In the end: the mount is
//! taken away while requests are still served, then the serving threads take no more, answer what is
//! under way and flush the disk.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gaur_block::Errno;
use gaur_reactor::Stop;

use super::crew::Crew;
use super::device;
use super::mount::Mount;
use super::options::Options;
use crate::error::ServeError;
use crate::fuse::proto::Reply;

pub(super) enum Message {
    /// Somebody wants another size.
    Resize(Arc<Wish>),
    /// End in order.
    Stop,
    /// A serving thread has ended.
    Ended,
}

/// Another size, and what became of it.
pub(super) struct Wish {
    size_bytes: u64,
    /// Only if it is not that long yet.
    at_least: bool,
    result: Mutex<Option<Result<(), Errno>>>,
    done: Stop,
}

/// A serving thread's line to the keeper.
#[derive(Clone)]
pub(super) struct Line {
    pub(super) to: Sender<Message>,
    pub(super) resizable: bool,
}

impl Line {
    pub(super) fn resizable(&self) -> bool {
        self.resizable
    }

    /// Makes the disk this long, in bytes.
    pub(super) async fn resize(&self, size_bytes: u64) -> Result<(), Errno> {
        self.ask(size_bytes, false).await
    }

    /// Makes the disk at least this long, in bytes.
    pub(super) async fn grow(&self, size_bytes: u64) -> Result<(), Errno> {
        self.ask(size_bytes, true).await
    }

    async fn ask(&self, size_bytes: u64, at_least: bool) -> Result<(), Errno> {
        let wish = Arc::new(Wish {
            size_bytes,
            at_least,
            result: Mutex::new(None),
            done: Stop::new(),
        });
        let sent = self.to.send(Message::Resize(Arc::clone(&wish)));
        sent.map_err(|_| Errno::EIO)?;
        wish.done.stopped().await;
        let result = wish.result.lock().unwrap_or_else(PoisonError::into_inner);
        result.unwrap_or(Err(Errno::EIO))
    }
}

/// Tells the kernel what it did not ask for. The connection lasts as long as anybody has a descriptor
/// of it, so this one is closed when the serving threads have closed theirs: then programs that still
/// have the file open get an error.
pub(super) struct Teller {
    descriptor: Mutex<Option<OwnedFd>>,
}

impl Teller {
    pub(super) fn new(descriptor: OwnedFd) -> Teller {
        Teller {
            descriptor: Mutex::new(Some(descriptor)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.descriptor
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self, what: &Reply) -> Result<(), Errno> {
        match &*self.lock() {
            Some(descriptor) => device::send(descriptor.as_fd(), what.bytes()),
            // There is nobody to be told.
            None => Ok(()),
        }
    }

    pub(super) fn close(&self) {
        self.lock().take();
    }
}

pub(super) struct Keeper {
    pub(super) options: Arc<Options>,
    pub(super) mount: Arc<Mount>,
    pub(super) crew: Crew,
    pub(super) teller: Arc<Teller>,
    pub(super) messages: Receiver<Message>,
    /// Raised when no more requests are to be taken.
    pub(super) drain: Stop,
}

impl Keeper {
    /// Sees the export to its end.
    pub(super) fn run(self) -> Result<(), ServeError> {
        let mut left = self.crew.count();
        let mut outcome = Ok(());
        // Nobody is left at the other end when threads died without a word.
        while left > 0
            && let Ok(message) = self.messages.recv()
        {
            match message {
                Message::Resize(wish) => self.fulfil(&wish),
                Message::Stop => {
                    outcome = outcome.and(self.mount.end());
                    self.drain.stop();
                }
                Message::Ended => {
                    left -= 1;
                    self.drain.stop();
                }
            }
        }
        self.drain.stop();
        outcome = outcome.and(self.mount.end());
        let served = self.crew.finish();
        self.teller.close();
        served.and(outcome)
    }

    fn fulfil(&self, wish: &Wish) {
        let result = match &self.options.resize {
            None => Err(Errno::EPERM),
            Some(resize) => resize(wish.size_bytes).map_err(|reason| {
                let size = wish.size_bytes;
                self.options
                    .say(&format!("the disk cannot have {size} bytes: {reason}"));
                if wish.at_least {
                    Errno::ENOSPC
                } else {
                    Errno::EPERM
                }
            }),
        };
        *wish.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        wish.done.stop();
    }
}
