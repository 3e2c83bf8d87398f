//! A serving process: its sockets, its exports, and an end in order within limits.
//!
//! The end begins when the server is told to stop, or when its clients are through with it. Clients have the
//! drain limit, then they and commands that are under way are given up; the images have the close limit to be
//! flushed and closed. A thread of its own sees to it, because what hangs may be the file system below an
//! image. A second stop does not wait for any of that.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gaur_export::Log;
use gaur_export::nbd::{self, Listen, Listener};
use gaur_reactor::Stop;
use parking_lot::{Condvar, Mutex};

use crate::control::server::{self as control, ControlServer};
use crate::exporter::{Export, Exporter, Limits, NewExport};
use crate::failure::Failure;
use crate::host_kind::HostKind;
use crate::notice::say;
use crate::pin::{Pin, Prospect};
use crate::shared_image::patiently;
use crate::trimmer;

/// How a server is set up.
pub struct Config {
    /// How files are reached.
    pub host: HostKind,
    /// What becomes of the memory and the threads of the process.
    pub pin: Pin,
    /// What will be exported.
    pub prospect: Prospect,
    /// Of the end.
    pub limits: Limits,
    /// Takes lines about clients.
    pub log: Option<Log>,
    /// Where and how NBD is served, if it is; the list of exports there is not looked at.
    pub nbd: Option<(Listen, nbd::Options)>,
    /// Path of the socket for commands.
    pub control: Option<PathBuf>,
    /// It stays for commands when it has no export and does not serve NBD.
    pub stays: bool,
}

/// How a server has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All images were flushed and closed.
    InOrder,
    /// They were not, for this reason. Threads that hang go with the process.
    GivenUp(String),
}

/// What an end that was given up means.
const LOST: &str = "stopped at once, what clients had not flushed may be lost";
/// How long the front ends have for their part of an end at once.
const FORCED_LIMIT: Duration = Duration::from_secs(1);
/// When it is told that the images are not closed yet.
const SLOW: Duration = Duration::from_secs(10);
/// How long the server before may keep its locks: the kernel takes a process that was killed apart in
/// its own time.
const LOCKS_LINGER: Duration = Duration::from_secs(20);

/// A server with its sockets open.
pub struct Server {
    exporter: Arc<Exporter>,
    nbd: Option<(Listener, nbd::Options)>,
    control: Option<gaur_reactor::Listener>,
    limits: Limits,
    stays: bool,
    ending: Arc<Ending>,
}

/// What ends a server.
struct Ending {
    exporter: Arc<Exporter>,
    /// Commands of the control socket are given up.
    commands: Stop,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    /// How often it was told to stop.
    stops: usize,
    /// `false` when the end was given up.
    finished: Option<Result<bool, Failure>>,
}

/// Tells a server to stop.
#[derive(Clone)]
pub struct Stopper(Arc<Ending>);

impl Stopper {
    /// The first call ends the server in order, the second at once.
    pub fn stop(&self) {
        self.0.commands.stop();
        self.0.exporter.stop();
        self.0.progress.lock().stops += 1;
        self.0.changed.notify_all();
    }
}

impl Server {
    /// Opens the sockets; clients that come now wait for [`Server::run`].
    pub fn new(config: Config) -> Result<Server, Failure> {
        config.pin.start(config.prospect)?;
        gaur_reactor::pin::raise_file_limit();
        // First, while the process has one thread.
        let control = config.control.as_deref().map(control::bind);
        let control = control.transpose()?;
        let exporter = Exporter::new(config.host, config.pin, config.log, config.limits);
        trimmer::start(&exporter);
        let mut settings = None;
        if let Some((listen, options)) = config.nbd {
            let listener = Listener::bind_labelled(&listen, options.socket_label.as_deref());
            let listener = listener.map_err(|error| Failure::new(error.to_string()))?;
            exporter.announce_nbd(listener.uris().encrypted(options.tls.is_some()));
            settings = Some((listener, options));
        }
        let ending = Ending {
            exporter: Arc::clone(&exporter),
            commands: Stop::new(),
            progress: Mutex::default(),
            changed: Condvar::new(),
        };
        Ok(Server {
            exporter,
            nbd: settings,
            control,
            limits: config.limits,
            stays: config.stays,
            ending: Arc::new(ending),
        })
    }

    /// Exports an image after a server that is gone: waits for its locks.
    pub fn take_over(&self, new: &NewExport) -> Result<Arc<Export>, Failure> {
        patiently(LOCKS_LINGER, || self.exporter.add(new.clone()))
    }

    /// Its exports.
    pub fn exporter(&self) -> &Arc<Exporter> {
        &self.exporter
    }

    /// Tells it to stop, from any thread.
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.ending))
    }

    /// Serves until there is a reason to end, and ends everything in order, or gives that up.
    pub fn run(self) -> Result<Ended, Failure> {
        let Server {
            exporter, ending, ..
        } = self;
        let start =
            |socket| ControlServer::start(socket, Arc::clone(&exporter), ending.commands.clone());
        let control = self.control.map(start).transpose()?;
        if let Some((listener, options)) = self.nbd {
            exporter.start_nbd(listener, options)?;
        }
        exporter.wait(control.is_some() && self.stays);
        let theirs = Arc::clone(&ending);
        let finish = move || {
            let finished = exporter.finish();
            if let (Some(control), false) = (control, matches!(finished, Ok(false))) {
                control.finish();
            }
            theirs.progress.lock().finished = Some(finished);
            theirs.changed.notify_all();
        };
        let thread = std::thread::Builder::new().name("end".to_owned());
        let thread = thread.spawn(finish);
        thread.map_err(|error| Failure::io("the thread of the end", &error))?;
        ending.wait(self.limits)
    }
}

impl Ending {
    /// Waits for the end within its limits.
    fn wait(&self, limits: Limits) -> Result<Ended, Failure> {
        if let Some(ended) = self.ended_within(limits.drain) {
            return ended;
        }
        self.commands.stop();
        let silent = limits.close.min(SLOW);
        if let Some(ended) = self.ended_within(silent) {
            return ended;
        }
        let names = self.names();
        let left = limits.close - silent;
        if !left.is_zero() {
            let seconds = left.as_secs();
            say(format!(
                "{names} not flushed and closed yet ({seconds} s left, --close-limit)"
            ));
            if let Some(ended) = self.ended_within(left) {
                return ended;
            }
        }
        let why = format!("{names} not flushed and closed in time (--close-limit); {LOST}");
        Ok(Ended::GivenUp(why))
    }

    /// How it ended, if it does so in time, or was stopped at once.
    fn ended_within(&self, limit: Duration) -> Option<Result<Ended, Failure>> {
        let mut progress = self.progress.lock();
        let undecided = |progress: &mut Progress| progress.finished.is_none() && progress.stops < 2;
        self.changed.wait_while_for(&mut progress, undecided, limit);
        let forced = progress.stops >= 2;
        if forced {
            let unfinished = |progress: &mut Progress| progress.finished.is_none();
            self.changed
                .wait_while_for(&mut progress, unfinished, FORCED_LIMIT);
        }
        match progress.finished.take() {
            Some(finished) => Some(finished.map(|in_order| match in_order {
                true => Ended::InOrder,
                false => Ended::GivenUp(LOST.to_owned()),
            })),
            None => forced.then(|| Ok(Ended::GivenUp(LOST.to_owned()))),
        }
    }

    /// The exports that are left.
    fn names(&self) -> String {
        let exports = self.exporter.exports();
        match exports.as_slice() {
            [one] => format!("export {:?} is", one.name),
            others => format!("{} exports are", others.len()),
        }
    }
}
