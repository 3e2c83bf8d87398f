//! What a serving process exports: images, and the exports that show them, which come and go.
//!
//! Every export has a name, whatever its clients speak. An export of a front end has a thread that
//! waits for its end, because such an export may also end by itself (its device was deleted, its file
//! unmounted); that thread alone takes it off the list and lets its image go. NBD's exports share one
//! server (`nbd`). Nothing here is done on a serving thread, and nothing once per request.
//!
//! Lock order: `Exporter::table` is never held while an image is opened or an export is started.

use std::sync::Arc;
use std::time::Duration;

use gaur_engine::{ErrorKind, Job};
use gaur_export::Front;
use gaur_export::Log;
use gaur_reactor::block_on;
use parking_lot::{Condvar, Mutex};

use crate::failure::Failure;
use crate::fronts::FrontConfig;
use crate::health::Health;
use crate::host_kind::HostKind;
use crate::image_spec::ImageSpec;
use crate::notice::say;
use crate::pin::Pin;

use crate::size::{self, NewSize};

mod device_state;
mod facts;
mod image_options;
mod images;
mod nbd;
mod served;

pub use facts::{AddExport, ExportFacts};
pub use image_options::{DetectZeroes, Discard, ImageOptions};
pub use images::CommandUse;
use images::Images;
pub use served::Served;

/// Limits of an end, whether of a server or of one export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For clients to take what they have asked for; then NBD clients are cut off. Requests of the other front
    /// ends are waited for until `close` is over, too.
    pub drain: Duration,
    /// For the images to be flushed and closed after that.
    pub close: Duration,
}

/// An export that is to be.
#[derive(Clone, Debug)]
pub struct NewExport {
    /// What it is called; for NBD what clients call it.
    pub name: String,
    /// The image.
    pub spec: ImageSpec,
    /// How the image is opened.
    pub image: ImageOptions,
    /// For people.
    pub description: String,
    /// The front end.
    pub front: FrontConfig,
}

/// An export that is there.
pub struct Export {
    /// What it is called.
    pub name: String,
    /// What its clients speak.
    pub config: FrontConfig,
    /// The image as it shows it.
    pub served: Arc<Served>,
    /// Where clients find it.
    pub place: String,
    /// What runs; none for NBD, and none any more at the end.
    front: Mutex<Option<Box<dyn Front>>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Its end was asked for.
    ending: bool,
    /// And waits to hear how it ended.
    awaited: bool,
    /// How long its clients have, if not as long as the server says.
    drain: Option<Duration>,
    /// How it ended.
    ended: Option<Result<(), Failure>>,
}

/// The list of exports.
#[derive(Default)]
struct Table {
    exports: Vec<Arc<Export>>,
    /// Names of exports that are about to be.
    starting: Vec<String>,
    /// Everything is to end.
    stopping: bool,
    /// At once.
    forced: bool,
    /// The first failure of an export whose end no command waited for.
    failure: Option<Failure>,
    /// The NBD server is over.
    nbd_over: bool,
}

/// The exports of this process.
pub struct Exporter {
    /// How files are reached.
    pub(crate) host: HostKind,
    pub(crate) pin: Pin,
    log: Option<Log>,
    limits: Limits,
    images: Images,
    table: Mutex<Table>,
    /// Rung with every change of the table.
    changed: Condvar,
    nbd: Mutex<nbd::Nbd>,
}

impl Export {
    fn stop(&self) {
        self.state.lock().ending = true;
        self.served.resizing.cancel();
        if let Some(front) = &*self.front.lock() {
            front.stop();
        }
    }
}

/// Keeps a name for an export that is about to be.
struct Reservation<'a> {
    exporter: &'a Exporter,
    name: String,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut table = self.exporter.table.lock();
        table.starting.retain(|name| *name != self.name);
        self.exporter.changed.notify_all();
    }
}

impl Exporter {
    /// Nothing yet.
    pub fn new(host: HostKind, pin: Pin, log: Option<Log>, limits: Limits) -> Arc<Exporter> {
        Arc::new(Exporter {
            host,
            pin,
            log,
            limits,
            images: Images::default(),
            table: Mutex::default(),
            changed: Condvar::new(),
            nbd: Mutex::default(),
        })
    }

    /// The exports that are there, oldest first.
    pub fn exports(&self) -> Vec<Arc<Export>> {
        self.table.lock().exports.clone()
    }

    /// Opens the image and exports it; clients can come when this returns.
    pub fn add(self: &Arc<Self>, new: NewExport) -> Result<Arc<Export>, Failure> {
        let reservation = self.reserve(&new.name)?;
        let new = device_state::with_log(new);
        let acquired = self.images.acquire(&new.name, &new.spec, &new.image);
        let image = acquired.inspect_err(|_| device_state::forget(&new))?;
        let shared = image.shared();
        let served = Arc::new(Served {
            health: Arc::new(Health::new(&new.name, shared)),
            image: Arc::clone(&image),
            policy: new.image.policy(&new.spec),
            read_only: new.image.refuses_writes(&new.spec),
            log: self.log.clone(),
            resizing: Job::default(),
            added: device_state::notes(&new),
        });
        let (place, front) = match self.start(&new, &served) {
            Ok(started) => started,
            Err(failure) => {
                drop(served);
                device_state::forget(&new);
                // Nothing was written through it; why it did not start is what counts.
                let _ = self.images.release(&new.name, &image, self.limits.drain);
                return Err(failure);
            }
        };
        let export = Arc::new(Export {
            name: new.name.clone(),
            config: new.front.clone(),
            served,
            place,
            front: Mutex::new(front),
            state: Mutex::default(),
        });
        device_state::note_recovered(&export.place, &new);
        self.table.lock().exports.push(Arc::clone(&export));
        drop(reservation);
        if !export.config.is_nbd() {
            self.watch(&export)?;
        }
        Ok(export)
    }

    fn start(
        &self,
        new: &NewExport,
        served: &Arc<Served>,
    ) -> Result<(String, Option<Box<dyn Front>>), Failure> {
        let image = served.shared().image();
        self.pin.before_export(image, new.front.is_device())?;
        let (offset, size) = (new.image.offset, image.size_bytes());
        if offset > size {
            let message = format!("offset {offset} is beyond its end ({size} bytes)");
            return Err(Failure::about(served.name(), message));
        }
        let shows = !new.image.bitmap.is_empty() || new.image.allocation_depth;
        if shows && !new.front.is_nbd() {
            return Err(Failure::new(
                "only NBD shows bitmaps and depths to its clients",
            ));
        }
        match new.front.start(Arc::clone(served))? {
            Some(front) => Ok((front.place(), Some(front))),
            None => Ok((self.add_to_nbd(new, served)?, None)),
        }
    }

    fn reserve(&self, name: &str) -> Result<Reservation<'_>, Failure> {
        let mut table = self.table.lock();
        if table.stopping {
            return Err(Failure::new("the server is stopping").kind(ErrorKind::Cancelled));
        }
        let there = table.exports.iter().any(|export| export.name == name);
        if there || table.starting.iter().any(|other| other == name) {
            let failure = Failure::new(format!("there is an export {name:?} already"));
            let failure = failure.hint("NAME=FILE calls an image's export NAME");
            return Err(failure.kind(ErrorKind::InvalidInput));
        }
        table.starting.push(name.to_owned());
        let name = name.to_owned();
        Ok(Reservation {
            exporter: self,
            name,
        })
    }

    /// Has an export of a front end followed to its end.
    fn watch(self: &Arc<Self>, export: &Arc<Export>) -> Result<(), Failure> {
        let (exporter, watched) = (Arc::clone(self), Arc::clone(export));
        let thread = std::thread::Builder::new().name("export".to_owned());
        let thread = thread.spawn(move || exporter.follow(&watched));
        thread.map(drop).map_err(|error| {
            // No thread would see it end, so it does not begin.
            export.stop();
            self.follow(export);
            Failure::io("the thread of an export", &error)
        })
    }

    fn follow(&self, export: &Arc<Export>) {
        let ended = export.front.lock().as_ref().map(|front| front.ended());
        if let Some(ended) = ended {
            block_on(ended.stopped());
        }
        let front = export.front.lock().take();
        let finished = front.map_or(Ok(()), Front::finish);
        let name = export.served.name();
        let finished = finished.map_err(|error| Failure::about(name, error.to_string()));
        self.bury(export, finished);
    }

    /// Takes an export that has ended off the list.
    fn bury(&self, export: &Arc<Export>, outcome: Result<(), Failure>) {
        let drain = export.state.lock().drain.unwrap_or(self.limits.drain);
        let image = &export.served.image;
        let released = self.images.release(&export.name, image, drain);
        if matches!(export.config, FrontConfig::Ublk(_)) {
            device_state::forget_if_gone(&export.place);
        }
        gaur_reactor::freed_memory();
        let outcome = outcome.and(released);
        let mut table = self.table.lock();
        table.exports.retain(|other| !Arc::ptr_eq(other, export));
        let mut state = export.state.lock();
        let outcome = match outcome {
            Err(failure) if !state.awaited => {
                if !table.stopping {
                    say(&failure);
                }
                table.failure.get_or_insert(failure);
                Ok(())
            }
            outcome => outcome,
        };
        state.ended = Some(outcome);
        self.changed.notify_all();
    }

    /// Ends an export: its clients' requests are finished, its image is flushed, and closed if no other
    /// export shows it. Clients that do not take their replies are cut off after `drain`.
    pub fn remove(self: &Arc<Self>, name: &str, drain: Option<Duration>) -> Result<(), Failure> {
        let export = self.find(name)?;
        {
            let mut state = export.state.lock();
            if state.ending || state.ended.is_some() {
                let failure = Failure::new(format!("export {name:?} is ending already"));
                return Err(failure.kind(ErrorKind::InvalidInput));
            }
            state.ending = true;
            state.awaited = true;
            state.drain = drain;
        }
        let drain = drain.unwrap_or(self.limits.drain);
        if export.config.is_nbd() {
            let (exporter, removed) = (Arc::clone(self), Arc::clone(&export));
            let thread = std::thread::Builder::new().name("removal".to_owned());
            let remove = move || {
                let drained = exporter.remove_from_nbd(&removed, drain);
                exporter.bury(&removed, drained);
            };
            let started = thread.spawn(remove);
            started.map_err(|error| Failure::io("the thread of a removal", &error))?;
        } else {
            export.stop();
        }
        self.removed(&export, drain + self.limits.close)
    }

    /// Waits for the end of an export.
    fn removed(&self, export: &Export, limit: Duration) -> Result<(), Failure> {
        let mut table = self.table.lock();
        let running = |_: &mut Table| export.state.lock().ended.is_none();
        self.changed.wait_while_for(&mut table, running, limit);
        let mut state = export.state.lock();
        state.ended.take().unwrap_or_else(|| {
            // How it ends is told by the server then.
            state.awaited = false;
            let seconds = limit.as_secs();
            let message = format!("is not flushed and closed after {seconds} s");
            let failure = Failure::about(export.served.name(), message);
            Err(failure.hint("the server goes on with that"))
        })
    }

    /// Changes the size of an export's image, and tells its clients as far as they can be told.
    pub fn resize(
        &self,
        (export, used): (Arc<Export>, CommandUse),
        (size, shrink): (NewSize, bool),
        job: &Job,
    ) -> Result<Arc<Export>, Failure> {
        let file = export.served.name();
        if export.served.read_only {
            let failure = Failure::about(file, "is exported for reading only");
            return Err(failure.kind(ErrorKind::ReadOnly));
        }
        let old = export.served.shared().size_bytes();
        let new = size::checked(file, old, size, shrink)?;
        if new < old && export.served.is_flat() {
            let failure = Failure::about(file, export.served.refuses_to_shrink());
            return Err(failure.kind(ErrorKind::Unsupported));
        }
        let resized = used.shared().guest().resize(new, shrink, job);
        resized.map_err(|error| Failure::image(file, &error))?;
        if let Some(front) = &*export.front.lock() {
            front.resized().map_err(|error| {
                let message = format!("has its new size, but its clients were not told: {error}");
                Failure::about(file, message)
            })?;
        }
        Ok(export)
    }

    /// The export of that name.
    pub fn find(&self, name: &str) -> Result<Arc<Export>, Failure> {
        let table = self.table.lock();
        let found = table.exports.iter().find(|export| export.name == name);
        found
            .cloned()
            .ok_or_else(|| self.unknown(&table, format!("there is no export {name:?}")))
    }

    /// The image of an export, kept open for a command about it. Without a name it is the only one.
    pub fn command(&self, name: Option<&str>) -> Result<(Arc<Export>, CommandUse), Failure> {
        let export = match name {
            Some(name) => self.find(name)?,
            None => {
                let table = self.table.lock();
                match table.exports.as_slice() {
                    [one] => Arc::clone(one),
                    [] => return Err(self.unknown(&table, "there are no exports".to_owned())),
                    _ => {
                        let message = "there are several exports, and none was named";
                        return Err(self.unknown(&table, message.to_owned()));
                    }
                }
            }
        };
        match self.images.command(&export.served.image) {
            Some(used) => Ok((export, used)),
            None => {
                let failure = Failure::new(format!("export {:?} is ending", export.name));
                Err(failure.kind(ErrorKind::NotFound))
            }
        }
    }

    fn unknown(&self, table: &Table, message: String) -> Failure {
        let names = table.exports.iter().take(NAMES_TOLD);
        let names: Vec<String> = names.map(|export| format!("{:?}", export.name)).collect();
        let failure = Failure::new(message).kind(ErrorKind::NotFound);
        match names.is_empty() {
            true => failure,
            false if table.exports.len() > NAMES_TOLD => {
                failure.hint(format!("there are {} and more", names.join(", ")))
            }
            false => failure.hint(format!("there are {}", names.join(", "))),
        }
    }

    /// Everything is to end; the second call makes it end at once.
    pub fn stop(&self) {
        let mut table = self.table.lock();
        table.forced = table.stopping;
        table.stopping = true;
        self.changed.notify_all();
    }

    /// Waits until there is a reason to end. Without NBD's server one is that no export is left, unless
    /// the server `stays` for commands.
    pub fn wait(&self, stays: bool) {
        let has_nbd = self.nbd.lock().is_running();
        let goes_on = |table: &mut Table| {
            let empty = table.exports.is_empty() && table.starting.is_empty();
            let unused = table.nbd_over || (!has_nbd && !stays && empty);
            !(table.stopping || unused)
        };
        self.changed.wait_while(&mut self.table.lock(), goes_on);
    }

    /// Ends every export. `false` when that was given up because of a second [`Exporter::stop`].
    pub fn finish(&self) -> Result<bool, Failure> {
        self.table.lock().stopping = true;
        self.drain_nbd();
        if !self.fronts_ended() {
            self.drain_nbd();
            self.exports().iter().for_each(|export| export.stop());
            return Ok(false);
        }
        let outcome = self.join_nbd();
        // Every image is closed, even when another one failed; the first failure is told.
        for export in self.exports() {
            self.bury(&export, Ok(()));
        }
        match self.table.lock().failure.take() {
            Some(failure) => Err(failure),
            None => outcome.map(|()| true),
        }
    }

    /// Stops the front ends and waits for them and for NBD's server; `false` when that was given up.
    fn fronts_ended(&self) -> bool {
        let mut table = self.table.lock();
        loop {
            if table.forced {
                return false;
            }
            let fronts = |export: &&Arc<Export>| !export.config.is_nbd();
            let fronts: Vec<Arc<Export>> = table.exports.iter().filter(fronts).cloned().collect();
            let running = |export: &&Arc<Export>| !export.state.lock().ending;
            let running: Vec<&Arc<Export>> = fronts.iter().filter(running).collect();
            if !running.is_empty() {
                drop(table);
                running.iter().for_each(|export| export.stop());
                table = self.table.lock();
                continue;
            }
            if table.nbd_over && fronts.is_empty() && table.starting.is_empty() {
                return true;
            }
            self.changed.wait(&mut table);
        }
    }
}

/// So many names of exports stand in the error about an unknown one.
const NAMES_TOLD: usize = 8;
