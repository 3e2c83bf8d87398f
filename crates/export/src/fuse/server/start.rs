//! Starting an export as a file, and the handle of one that runs.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use gaur_block::{Device, Errno};
use gaur_reactor::{Stop, block_on};

use super::crew::{Briefing, Crew};
use super::device::{self, Received};
use super::file::File;
use super::keeper::{Keeper, Line, Message, Teller};
use super::mount::{self, Mount};
use super::options::Options;
use super::slot::Slot;
use crate::error::ServeError;
use crate::front::Front;
use crate::fuse::proto::{self, Operation, Reply, Terms};

/// How long the kernel may take for its first request. It sends it while it mounts.
const FIRST_REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// A file that is a disk.
pub struct Server {
    path: PathBuf,
    mount: Arc<Mount>,
    to_keeper: Mutex<Sender<Message>>,
    teller: Arc<Teller>,
    keeper: Option<JoinHandle<Result<(), ServeError>>>,
    ended: Stop,
    force: Stop,
    asked: AtomicBool,
}

impl Server {
    /// Covers the file; when this returns, the disk is there. `devices` makes each serving thread's
    /// queue of the disk.
    ///
    /// # Errors
    /// When there is no regular file at the path, it cannot be covered, or a device cannot be made.
    pub fn start<D, F>(options: Options, devices: F) -> Result<Server, ServeError>
    where
        D: Device + 'static,
        F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
    {
        options.check()?;
        let options = Arc::new(options);
        let path = mount::prepare(&options)?;
        let (to_keeper, messages) = mpsc::channel();
        let briefing = Briefing {
            options: options.clone(),
            line: Line {
                to: to_keeper.clone(),
                resizable: options.resize.is_some(),
            },
            drain: Stop::new(),
            force: Stop::new(),
        };
        let crew = Crew::start(&briefing, devices)?;
        let read_only = options.read_only || crew.limits.read_only;
        let mounted = cover(path, &options, read_only);
        let (mount, descriptor, descriptors) = match mounted {
            Ok(mounted) => mounted,
            Err(error) => {
                // It has done nothing yet.
                let _ = crew.dismiss();
                return Err(error);
            }
        };
        let file = Arc::new(File::new(read_only, crew.limits.preferred_block));
        crew.serve(descriptors, &file);
        let mount = Arc::new(mount);
        let teller = Arc::new(Teller::new(descriptor));
        let ended = Stop::new();
        let keeper = Keeper {
            options: options.clone(),
            mount: mount.clone(),
            crew,
            teller: teller.clone(),
            messages,
            drain: briefing.drain.clone(),
        };
        let raised = ended.clone();
        let keeper = std::thread::Builder::new()
            .name("fuse-keeper".to_owned())
            .spawn(move || {
                let _raise = Raise(raised);
                keeper.run()
            })
            .map_err(|error| ServeError::new(format!("cannot start a thread: {error}")))?;
        Ok(Server {
            path: options.path.clone(),
            mount,
            to_keeper: Mutex::new(to_keeper),
            teller,
            keeper: Some(keeper),
            ended,
            force: briefing.force,
            asked: AtomicBool::new(false),
        })
    }

    fn join(&mut self) -> Result<(), ServeError> {
        block_on(self.ended.stopped());
        if self.force.is_stopped() {
            let what = "stopped at once, what was not flushed may be lost";
            return Err(ServeError::new(format!("{}: {what}", self.path.display())));
        }
        match self.keeper.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(ServeError::new("a thread of the export failed")),
        }
    }
}

/// Raised at the end, also of a panic.
struct Raise(Stop);

impl Drop for Raise {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Front for Server {
    fn place(&self) -> String {
        self.path.display().to_string()
    }

    fn resized(&self) -> Result<(), ServeError> {
        self.teller
            .tell(&Reply::forget_attributes())
            .map_err(|errno| {
                ServeError::because("the kernel cannot be told of the new size", errno)
            })
    }

    fn stop(&self) {
        if !self.asked.swap(true, Ordering::AcqRel) {
            let to_keeper = self.to_keeper.lock();
            // A keeper that has gone has stopped.
            let _ = to_keeper
                .unwrap_or_else(PoisonError::into_inner)
                .send(Message::Stop);
        } else if !self.ended.is_stopped() {
            self.force.stop();
            self.teller.close();
            self.mount.abort();
            self.ended.stop();
        }
    }

    fn ended(&self) -> Stop {
        self.ended.clone()
    }

    fn finish(mut self: Box<Self>) -> Result<(), ServeError> {
        self.join()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.keeper.is_some() && !self.force.is_stopped() {
            self.stop();
            // Whoever wanted to know of an error has called `finish`.
            let _ = self.join();
        }
    }
}

/// Mounts, agrees with the kernel on the protocol, and makes a descriptor for each thread; the one
/// that comes first is for notifications.
fn cover(
    path: PathBuf,
    options: &Options,
    read_only: bool,
) -> Result<(Mount, OwnedFd, Vec<OwnedFd>), ServeError> {
    let refused = |what: &dyn std::fmt::Display| {
        ServeError::new(format!("{}: {what}", options.path.display()))
    };
    let (mount, descriptor) = Mount::make(path, options, read_only)?;
    let at_once = options.threads.saturating_mul(options.depth as usize);
    let max_background = u16::try_from(at_once).unwrap_or(u16::MAX);
    greet(&descriptor, max_background).map_err(|reason| refused(&reason))?;
    let another = || {
        // Whoever could not open the device shares the descriptor that somebody else opened.
        let cloned = device::clone(descriptor.as_fd()).map_err(drop);
        cloned.or_else(|()| descriptor.try_clone())
    };
    let others: std::io::Result<Vec<OwnedFd>> = (0..options.threads).map(|_| another()).collect();
    let others = others.map_err(|error| refused(&error))?;
    Ok((mount, descriptor, others))
}

/// Answers the kernel's first request.
fn greet(descriptor: &OwnedFd, max_background: u16) -> Result<(), String> {
    let failed = |errno: Errno| format!("the kernel's device fails: {errno}");
    let mut slot = Slot::new().map_err(failed)?;
    loop {
        if !device::wait(descriptor.as_fd(), FIRST_REQUEST_LIMIT).map_err(failed)? {
            return Err("the kernel does not begin to speak".to_owned());
        }
        let received = device::receive(descriptor.as_fd(), slot.request()).map_err(failed)?;
        let len = match received {
            Received::Request(len) => len,
            Received::Nothing => continue,
            Received::End => return Err("it was unmounted at once".to_owned()),
        };
        let request = proto::parse(slot.request().get(..len).unwrap_or_default());
        let Ok(request) = request else {
            return Err("the kernel's first request is none".to_owned());
        };
        let Operation::Init(offer) = request.operation else {
            return Err("the kernel's first request is about something else".to_owned());
        };
        let head = &request.head;
        let (reply, agreed) = match Terms::agree(&offer, max_background) {
            Ok(Some(terms)) => (Reply::init(head, &terms), true),
            Ok(None) => (Reply::init_again(head), false),
            Err(unusable) => return Err(unusable.to_string()),
        };
        device::send(descriptor.as_fd(), reply.bytes()).map_err(failed)?;
        if agreed {
            return Ok(());
        }
    }
}
