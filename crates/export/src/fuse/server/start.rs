//! Starting an export as a file.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gaur_block::{Device, Errno, Request};
use gaur_reactor::{Either, Stop, ThreadsConfig, race};

use super::control::{Control, Message, Notifier, Resizer};
use super::device::{self, Received};
use super::file::File;
use super::mount::{self, Mount};
use super::options::Options;
use super::reader::Reader;
use super::request_buffer::RequestBuffer;
use crate::error::ServeError;
use crate::fuse::proto::{self, Operation, Reply, Terms};
use crate::serve::{Channel, Disk, OnDrop, Prepared, Server, Transport};

/// How long the kernel may take for its first request. It sends it while it mounts.
const FIRST_REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// What a thread needs to serve the mounted file.
struct ThreadStart {
    descriptor: OwnedFd,
    file: Arc<File>,
    resizer: Resizer,
    depth: u32,
    /// Raised when no more requests are to be taken.
    drain: Stop,
    /// Raised when nothing is to be waited for.
    now: Stop,
}

/// Covers the file; when this returns, the disk is there. `devices` makes each serving thread's
/// queue of the disk. They are made before the file is mounted: they may open files, and one of these may
/// be the one that the mount will cover.
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
    let config = ThreadsConfig {
        count: options.threads,
        processors: Vec::new(),
        name: "fuse".to_owned(),
        reactor: options.reactor,
    };
    let make = move |thread| {
        let device = Rc::new(Disk::new(devices(thread)?));
        let limits = device.limits();
        Ok((device, limits))
    };
    let prepared = Prepared::start(&config, make, serve_on_thread::<D>)?;
    let limits = prepared.report;
    let read_only = options.read_only || limits.read_only;
    let (mount, descriptor, descriptors) = cover(path, &options, read_only)?;
    let file = Arc::new(File::new(read_only, limits.preferred_block));
    let export = Export {
        place: options.path.display().to_string(),
        mount: Arc::new(mount),
        notifier: Arc::new(Notifier::new(descriptor)),
    };
    let (mount, notifier) = (export.mount.clone(), export.notifier.clone());
    let (name, place) = ("fuse-control".to_owned(), export.place.clone());
    Server::spawn(name, place, Box::new(export), async move |switch| {
        let (messages, drain) = (Channel::new(), Stop::new());
        let starts = descriptors.into_iter().map(|descriptor| ThreadStart {
            descriptor,
            file: file.clone(),
            resizer: Resizer {
                control: messages.clone(),
                resizable: options.resize.is_some(),
            },
            depth: options.depth,
            drain: drain.clone(),
            now: switch.now.clone(),
        });
        let control = Control {
            threads: prepared.serve(starts),
            options,
            mount,
            notifier,
            messages: messages.clone(),
            stop: switch.drain,
            drain: drain.clone(),
        };
        control.run().await
    })
}

/// What a serving thread does.
async fn serve_on_thread<D: Device + 'static>(
    device: Rc<Disk<D>>,
    start: ThreadStart,
) -> Result<(), ServeError> {
    let ThreadStart { drain, now, .. } = start;
    let control = start.resizer.control.clone();
    let _ended = OnDrop(|| control.put(Message::ThreadEnded));
    let read_only = start.file.read_only;
    let reader = Reader::new(device.clone(), start.file, start.resizer, start.descriptor);
    let reader = Rc::new(reader);
    let watched = reader.clone();
    gaur_reactor::spawn(async move {
        drain.stopped().await;
        watched.close();
    });
    let (watched, over) = (reader.clone(), Stop::new());
    let until = over.clone();
    gaur_reactor::spawn(async move {
        if let Either::Left(()) = race(now.stopped(), until.stopped()).await {
            watched.hang_up();
        }
    });
    let served = reader.run(start.depth).await;
    over.stop();
    let served = served.map_err(|errno| ServeError::because("serving the file failed", errno));
    let flushed = if read_only {
        Ok(())
    } else {
        device.ask(Request::Flush).await
    };
    let flushed =
        flushed.map_err(|errno| ServeError::because("the last flush of the disk failed", errno));
    served.and(flushed)
}

/// What the handle of the export can do.
struct Export {
    place: String,
    mount: Arc<Mount>,
    notifier: Arc<Notifier>,
}

impl Transport for Export {
    fn resized(&self) -> Result<(), ServeError> {
        let told = self.notifier.notify(&Reply::forget_attributes());
        told.map_err(|errno| {
            ServeError::because("the kernel cannot be told of the new size", errno)
        })
    }

    fn cut_off(&self) -> Result<(), ServeError> {
        self.notifier.close();
        self.mount.abort();
        let what = "stopped at once, what was not flushed may be lost";
        Err(ServeError::new(format!("{}: {what}", self.place)))
    }

    fn ends_with_handle(&self) -> bool {
        true
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
        // Without the right to open the device, threads share the descriptor that the helper opened.
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
    let mut buffer = RequestBuffer::new().map_err(failed)?;
    loop {
        if !device::wait(descriptor.as_fd(), FIRST_REQUEST_LIMIT).map_err(failed)? {
            return Err("the kernel does not begin to speak".to_owned());
        }
        let received = device::receive(descriptor.as_fd(), buffer.request()).map_err(failed)?;
        let len = match received {
            Received::Request(len) => len,
            Received::Nothing => continue,
            Received::End => return Err("it was unmounted at once".to_owned()),
        };
        let request = proto::parse(buffer.request().get(..len).unwrap_or_default());
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
