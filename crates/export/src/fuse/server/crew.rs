//! The serving threads, each with its queue of the disk.
//!
//! Devices are made before the file is mounted: they may open files, and one of these may be the one
//! that the mount will cover.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use gaur_block::{Device, DeviceLimits, Payload, Request};
use gaur_reactor::{Either, JoinHandle, Stop, Threads, ThreadsConfig, block_on, race};

use super::file::File;
use super::keeper::{Line, Message};
use super::options::Options;
use super::post::Post;
use crate::error::ServeError;

/// What a thread gets when the file is mounted; nothing when it is not going to be.
#[derive(Default)]
struct Start {
    given: Stop,
    with: Mutex<Option<(OwnedFd, Arc<File>)>>,
}

impl Start {
    fn give(&self, with: Option<(OwnedFd, Arc<File>)>) {
        *self.with.lock().unwrap_or_else(PoisonError::into_inner) = with;
        self.given.stop();
    }

    async fn taken(&self) -> Option<(OwnedFd, Arc<File>)> {
        self.given.stopped().await;
        self.with
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

pub(super) struct Crew {
    threads: Threads,
    starts: Vec<Arc<Start>>,
    ends: Vec<JoinHandle<Result<(), ServeError>>>,
    /// Of the disk.
    pub(super) limits: DeviceLimits,
}

/// What every thread is told.
#[derive(Clone)]
pub(super) struct Briefing {
    pub(super) options: Arc<Options>,
    pub(super) line: Line,
    /// Raised when no more requests are to be taken.
    pub(super) drain: Stop,
    /// Raised when nothing is to be waited for.
    pub(super) force: Stop,
}

impl Crew {
    /// Starts the threads and has them make their devices.
    pub(super) fn start<D, F>(briefing: &Briefing, devices: F) -> Result<Crew, ServeError>
    where
        D: Device + 'static,
        F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
    {
        let config = ThreadsConfig {
            count: briefing.options.threads,
            pin: false,
            name: "fuse".to_owned(),
            reactor: briefing.options.reactor,
        };
        let threads = Threads::start(&config)
            .map_err(|errno| ServeError::because("cannot start the serving threads", errno))?;
        let devices = Arc::new(devices);
        let (ready, readiness) = mpsc::channel();
        let (mut starts, mut ends) = (Vec::new(), Vec::new());
        for (thread, handle) in threads.handles().iter().enumerate() {
            let start = Arc::new(Start::default());
            starts.push(Arc::clone(&start));
            let (briefing, devices, ready) = (briefing.clone(), devices.clone(), ready.clone());
            let end = handle
                .spawn(move || async move {
                    let made = devices(thread);
                    drop(devices);
                    serve(made, ready, &start, briefing).await
                })
                .map_err(|errno| ServeError::because("cannot use a serving thread", errno))?;
            ends.push(end);
        }
        drop(ready);
        let mut made = Ok(None);
        for _ in 0..starts.len() {
            // A thread that panics while it makes its device never says that it is ready.
            let limits = readiness.recv().unwrap_or_else(|_| {
                Err("a serving thread failed while it opened the disk".to_owned())
            });
            made = made.and(limits.map(Some));
        }
        let limits = made.and_then(|limits| limits.ok_or_else(|| "there is no thread".to_owned()));
        let placeholder = DeviceLimits {
            preferred_block: 1,
            discard_block: 1,
            max_transfer: 1,
            read_only: true,
        };
        let crew = Crew {
            threads,
            starts,
            ends,
            limits: *limits.as_ref().unwrap_or(&placeholder),
        };
        match limits {
            Ok(_) => Ok(crew),
            Err(reason) => {
                // What the others would say is of no interest any more.
                let _ = crew.dismiss();
                Err(ServeError::new(reason))
            }
        }
    }

    pub(super) fn count(&self) -> usize {
        self.starts.len()
    }

    /// Has every thread serve, each by a descriptor of its own.
    pub(super) fn serve(&self, descriptors: Vec<OwnedFd>, file: &Arc<File>) {
        for (start, descriptor) in self.starts.iter().zip(descriptors) {
            start.give(Some((descriptor, Arc::clone(file))));
        }
    }

    /// Ends threads that have nothing to serve.
    pub(super) fn dismiss(self) -> Result<(), ServeError> {
        for start in &self.starts {
            start.give(None);
        }
        self.finish()
    }

    /// Waits for the threads.
    pub(super) fn finish(self) -> Result<(), ServeError> {
        let mut outcome = Ok(());
        for end in self.ends {
            outcome = outcome.and(block_on(end));
        }
        self.threads.join();
        outcome
    }
}

/// What a serving thread does.
async fn serve<D: Device + 'static>(
    made: Result<D, String>,
    ready: mpsc::Sender<Result<DeviceLimits, String>>,
    start: &Start,
    briefing: Briefing,
) -> Result<(), ServeError> {
    let (limits, device) = match made {
        Ok(device) => (Ok(device.limits()), Some(Rc::new(device))),
        Err(reason) => (Err(reason), None),
    };
    // Nobody listens when the server gave up on another thread's account.
    let _ = ready.send(limits);
    drop(ready);
    let (Some(device), Some((descriptor, file))) = (device, start.taken().await) else {
        return Ok(());
    };
    let Briefing {
        options,
        line,
        drain,
        force,
    } = briefing;
    let _ended = Ended(line.to.clone());
    let read_only = file.read_only;
    let post = Rc::new(Post::new(device.clone(), file, line, descriptor));
    let watched = post.clone();
    gaur_reactor::spawn(async move {
        drain.stopped().await;
        watched.close();
    });
    let (watched, over) = (post.clone(), Stop::new());
    let until = over.clone();
    gaur_reactor::spawn(async move {
        if let Either::Left(()) = race(force.stopped(), until.stopped()).await {
            watched.hang_up();
        }
    });
    let served = post.run(options.depth).await;
    over.stop();
    let served = served.map_err(|errno| ServeError::because("serving the file failed", errno));
    let flushed = if read_only {
        Ok(())
    } else {
        device.submit(Request::Flush, Payload::None).await
    };
    let flushed =
        flushed.map_err(|errno| ServeError::because("the last flush of the disk failed", errno));
    served.and(flushed)
}

/// Tells the keeper that a thread has ended, however it did.
struct Ended(Sender<Message>);

impl Drop for Ended {
    fn drop(&mut self) {
        // The keeper goes only when it was told of every thread.
        let _ = self.0.send(Message::Ended);
    }
}
