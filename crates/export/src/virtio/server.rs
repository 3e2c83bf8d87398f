//! A virtio block device that is served: what its transports have in common.

use std::future::Future;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use gaur_block::Device;
use gaur_reactor::{Config, Either, ThreadsConfig, race};

use super::ring_task;
use super::rings::{Rings, ThreadRings};
use super::thread_context::ThreadContext;
use crate::error::ServeError;
use crate::serve::{Channel, Geometry, Log, Prepared, Server, StopSwitch, Transport};

/// How long a resize waits until the driver was told.
const TELL_TIMEOUT: Duration = Duration::from_secs(10);

/// The size has changed; the answer is whether the driver was told.
pub(crate) type SizeChanged = mpsc::Sender<Result<(), ServeError>>;

/// What the control thread of a transport works with.
pub(crate) struct Control {
    pub(crate) rings: Rings,
    pub(crate) switch: StopSwitch,
    pub(crate) size_changes: Channel<SizeChanged>,
}

struct SizeChanges {
    channel: Channel<SizeChanged>,
    /// The driver, or the client that stands for it.
    peer: &'static str,
}

impl Transport for SizeChanges {
    fn resized(&self) -> Result<(), ServeError> {
        let (answer, told) = mpsc::channel();
        self.channel.put(answer);
        told.recv_timeout(TELL_TIMEOUT).unwrap_or_else(|_| {
            let peer = self.peer;
            Err(ServeError::new(format!(
                "the {peer} was not told of the new size"
            )))
        })
    }
}

/// What is served, and how.
pub(crate) struct Setup {
    /// Name of the control thread, and the first part of the others'.
    pub(crate) name: &'static str,
    /// Who is told of a new size.
    pub(crate) peer: &'static str,
    pub(crate) place: String,
    pub(crate) threads: usize,
    pub(crate) rings: u16,
    pub(crate) read_only: bool,
    pub(crate) log: Option<Log>,
}

/// Checks options that all transports have.
pub(crate) fn check(queues: u16, threads: usize) -> Result<(), String> {
    if queues == 0 || queues > 256 {
        return Err("the number of queues must be 1 to 256".to_owned());
    }
    if threads == 0 {
        return Err("the number of threads must be 1 at least".to_owned());
    }
    Ok(())
}

/// Threads with their devices, which do not serve rings yet.
pub(crate) struct PreparedRings {
    setup: Setup,
    pub(super) prepared: Prepared<Geometry, ThreadRings>,
}

/// Starts the threads and makes a device on each.
pub(crate) fn prepare<D, F>(setup: Setup, devices: F) -> Result<PreparedRings, ServeError>
where
    D: Device + 'static,
    F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
{
    let config = ThreadsConfig {
        count: setup.threads.clamp(1, usize::from(setup.rings.max(1))),
        processors: Vec::new(),
        name: setup.name.to_owned(),
        reactor: Config::default(),
    };
    let (read_only, log) = (setup.read_only, setup.log.clone());
    let make = move |thread| {
        let context = ThreadContext::new(devices(thread)?, read_only, log.clone());
        let geometry = context.geometry();
        Ok((Rc::new(context), geometry))
    };
    let serve = |context: Rc<ThreadContext<D>>, rings: ThreadRings| {
        for (ring, commands) in rings {
            gaur_reactor::spawn(ring_task::run(context.clone(), ring, commands));
        }
        std::future::ready(Ok(()))
    };
    let prepared = Prepared::start(&config, make, serve)?;
    Ok(PreparedRings { setup, prepared })
}

impl PreparedRings {
    /// What the device is like.
    pub(crate) fn geometry(&self) -> Geometry {
        self.prepared.report
    }

    /// Serves rings. `serve` is the transport's side, on the control thread: it starts and stops rings
    /// until the export is drained, and flushes them.
    pub(crate) fn serve<F, E>(self, serve: F) -> Result<Server, ServeError>
    where
        F: FnOnce(Control) -> E + Send + 'static,
        E: Future<Output = Result<(), ServeError>>,
    {
        let PreparedRings { setup, prepared } = self;
        let rings = Rings::new(setup.rings, setup.log);
        let size_changes = Channel::new();
        let transport = SizeChanges {
            channel: size_changes.clone(),
            peer: setup.peer,
        };
        let run = async move |switch: StopSwitch| {
            let threads = prepared.count();
            let threads = prepared.serve(rings.on_threads(threads));
            let (now, all) = (switch.now.clone(), rings.clone());
            let control = Control {
                rings,
                switch,
                size_changes,
            };
            match race(serve(control), now.stopped()).await {
                Either::Left(outcome) => {
                    all.end();
                    threads.join();
                    outcome
                }
                // The threads are left with the very requests that are not waited for.
                Either::Right(()) => Ok(()),
            }
        };
        Server::spawn(setup.name.to_owned(), setup.place, Box::new(transport), run)
    }
}
