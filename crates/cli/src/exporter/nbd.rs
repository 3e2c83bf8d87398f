//! The NBD server of the process: one listener for all exports of this kind.

use std::sync::Arc;
use std::thread::JoinHandle;

use gaur_export::nbd::{self, Listener, Outcome, Place, ServeError, Stop, Uris};

use super::{Exporter, NewExport, Served, lock};
use crate::failure::Failure;
use crate::host_kind::HostKind;

/// Where and how NBD is served.
pub struct NbdSettings {
    /// Where clients knock.
    pub listener: Listener,
    /// The rest; its list of exports is not looked at.
    pub options: nbd::Options,
}

/// The server.
#[derive(Default)]
pub(super) struct Nbd {
    uris: Option<Uris>,
    exports: Vec<(nbd::Export, Arc<Served>)>,
    running: Option<Running>,
}

struct Running {
    stop: Stop,
    thread: JoinHandle<Result<Outcome, ServeError>>,
}

impl Nbd {
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }
}

impl Exporter {
    /// Says where exports will be found.
    pub fn announce_nbd(&self, uris: Uris) {
        lock(&self.nbd).uris = Some(uris);
    }

    /// Where clients find an NBD export of that name, if NBD is served.
    pub fn nbd_uri(&self, export: &str) -> Option<String> {
        lock(&self.nbd).uris.as_ref().map(|uris| uris.of(export))
    }

    /// Starts to serve NBD's exports.
    pub fn start_nbd(self: &Arc<Self>, settings: NbdSettings) -> Result<(), Failure> {
        let NbdSettings {
            listener,
            mut options,
        } = settings;
        let mut nbd = lock(&self.nbd);
        let (exports, served): (Vec<_>, Vec<_>) = nbd.exports.drain(..).unzip();
        options.exports = exports;
        let stop = Stop::new();
        let (exporter, theirs, host) = (Arc::clone(self), stop.clone(), self.host);
        let device = move |place: Place| Ok(served[place.export].device());
        let serve = move || {
            let outcome = match host {
                HostKind::Blocking => nbd::serve_blocking(listener, options, &theirs, device),
                _ => nbd::serve_uring(listener, options, &theirs, device),
            };
            lock(&exporter.table).nbd_over = true;
            exporter.changed.notify_all();
            outcome
        };
        let thread = std::thread::Builder::new().name("nbd-control".to_owned());
        let thread = thread.spawn(serve);
        let thread = thread.map_err(|error| Failure::io("the thread of NBD", &error))?;
        nbd.running = Some(Running { stop, thread });
        Ok(())
    }

    pub(super) fn add_to_nbd(
        &self,
        new: &NewExport,
        served: &Arc<Served>,
    ) -> Result<String, Failure> {
        let mut nbd = lock(&self.nbd);
        let Some(uris) = nbd.uris.clone() else {
            let failure = Failure::new("this server does not serve NBD");
            return Err(failure.hint("it was started with -k, -p or -b if it does"));
        };
        if nbd.is_running() {
            return Err(Failure::new("NBD exports cannot be added to a server yet"));
        }
        let export = nbd::Export {
            name: new.name.clone(),
            description: new.description.clone(),
            read_only: served.read_only(),
        };
        nbd.exports.push((export, Arc::clone(served)));
        Ok(uris.of(&new.name))
    }

    #[allow(dead_code, reason = "for the control socket")]
    pub(super) fn remove_from_nbd(&self, _export: &super::Export) -> Result<(), Failure> {
        Err(Failure::new("NBD exports cannot be removed yet"))
    }

    /// Tells the server to end: in order, and the second time at once.
    pub(super) fn drain_nbd(&self) {
        match &lock(&self.nbd).running {
            Some(running) => running.stop.drain(),
            None => lock(&self.table).nbd_over = true,
        }
    }

    /// Waits for the end of the server.
    pub(super) fn join_nbd(&self) -> Result<(), Failure> {
        let running = lock(&self.nbd).running.take();
        let Some(running) = running else {
            return Ok(());
        };
        match running.thread.join() {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(Failure::new(error.to_string())),
            Err(_) => Err(Failure::new("the thread of NBD failed")),
        }
    }
}
