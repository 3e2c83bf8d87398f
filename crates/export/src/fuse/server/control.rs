//! The control thread of an export as a file: it waits for what serving threads must not wait for, and
//! sees the export to its end.
//!
//! Unmounting may need the file to be served, and so may resizing the disk. In the end: the mount is
//! taken away while requests are still served, then the serving threads take no more, answer what is
//! under way and flush the disk.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use gaur_block::Errno;
use gaur_reactor::{Either, Stop, race};
use parking_lot::Mutex;

use super::device;
use super::mount::Mount;
use super::options::Options;
use crate::error::ServeError;
use crate::fuse::proto::Reply;
use crate::serve::{Channel, ServingThreads, say};

/// For the control thread.
pub(super) enum Message {
    /// Make the disk `size_bytes` long; with `at_least` only if it is shorter.
    Resize {
        size_bytes: u64,
        at_least: bool,
        answer: Channel<Result<(), Errno>>,
    },
    /// A serving thread has ended.
    ThreadEnded,
}

/// How a serving thread has the disk resized.
#[derive(Clone)]
pub(super) struct Resizer {
    pub(super) control: Channel<Message>,
    pub(super) resizable: bool,
}

impl Resizer {
    /// Makes the disk `size_bytes` long; with `at_least` only if it is shorter.
    pub(super) async fn resize(&self, size_bytes: u64, at_least: bool) -> Result<(), Errno> {
        let answer = Channel::new();
        self.control.put(Message::Resize {
            size_bytes,
            at_least,
            answer: answer.clone(),
        });
        answer.take().await
    }
}

/// Notifications to the kernel. The connection lasts as long as a descriptor of it is open, so this one is
/// closed when the serving threads have closed theirs: then programs that still have the file open get an
/// error.
pub(super) struct Notifier {
    descriptor: Mutex<Option<OwnedFd>>,
}

impl Notifier {
    pub(super) fn new(descriptor: OwnedFd) -> Notifier {
        Notifier {
            descriptor: Mutex::new(Some(descriptor)),
        }
    }

    pub(super) fn notify(&self, what: &Reply) -> Result<(), Errno> {
        match &*self.descriptor.lock() {
            Some(descriptor) => device::send(descriptor.as_fd(), what.bytes()),
            // The connection has ended.
            None => Ok(()),
        }
    }

    pub(super) fn close(&self) {
        self.descriptor.lock().take();
    }
}

/// What the control thread has.
pub(super) struct Control {
    pub(super) options: Arc<Options>,
    pub(super) mount: Arc<Mount>,
    pub(super) threads: ServingThreads,
    pub(super) notifier: Arc<Notifier>,
    pub(super) messages: Channel<Message>,
    /// The export is to end.
    pub(super) stop: Stop,
    /// Raised when serving threads are to take no more requests.
    pub(super) drain: Stop,
}

impl Control {
    /// Sees the export to its end.
    pub(super) async fn run(mut self) -> Result<(), ServeError> {
        let mut left = self.options.threads;
        let mut outcome = Ok(());
        while left > 0 {
            let event = match self.drain.is_stopped() {
                true => Either::Right(self.messages.take().await),
                false => race(self.stop.stopped(), self.messages.take()).await,
            };
            match event {
                Either::Left(()) => {
                    outcome = self.mount.end();
                    self.drain.stop();
                }
                Either::Right(Message::Resize {
                    size_bytes,
                    at_least,
                    answer,
                }) => answer.put(self.resize(size_bytes, at_least)),
                Either::Right(Message::ThreadEnded) => {
                    left -= 1;
                    self.drain.stop();
                }
            }
        }
        outcome = outcome.and(self.mount.end());
        let served = self.threads.ended().await;
        self.threads.join();
        self.notifier.close();
        served.and(outcome)
    }

    fn resize(&self, size_bytes: u64, at_least: bool) -> Result<(), Errno> {
        let resize = self.options.resize.as_ref().ok_or(Errno::EPERM)?;
        resize(size_bytes).map_err(|reason| {
            let line = format!("the disk cannot have {size_bytes} bytes: {reason}");
            say(&self.options.log, &line);
            match at_least {
                true => Errno::ENOSPC,
                false => Errno::EPERM,
            }
        })
    }
}
