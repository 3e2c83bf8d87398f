//! The NBD server of the process: one listener for all exports of this kind.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use gaur_export::nbd::{self, ExportBitmap, Exports, Listener, Outcome, ServeError, Stop, Uris};
use gaur_reactor::{BlockingFile, block_on};

use super::served::Disk;
use super::{Export, Exporter, NewExport, Served};
use crate::failure::Failure;
use crate::host_kind::HostKind;

/// The server.
#[derive(Default)]
pub(super) struct Nbd {
    uris: Option<Uris>,
    exports: Exports<Disk>,
    /// What stops it, and its thread.
    running: Option<(Stop, ServingThread)>,
}

type ServingThread = JoinHandle<Result<Outcome, ServeError>>;

impl Nbd {
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }
}

impl Exporter {
    /// Says where exports will be found.
    pub fn announce_nbd(&self, uris: Uris) {
        self.nbd.lock().uris = Some(uris);
    }

    /// Where clients find an NBD export of that name, if NBD is served.
    pub fn nbd_uri(&self, export: &str) -> Option<String> {
        self.nbd.lock().uris.as_ref().map(|uris| uris.of(export))
    }

    /// Has an NBD export answer to the empty name too.
    pub fn set_default(&self, export: &str) {
        self.nbd.lock().exports.set_default(export);
    }

    /// Clients of an NBD export.
    pub fn nbd_clients(&self, export: &str) -> Option<usize> {
        let exports = self.nbd.lock().exports.clone();
        exports.clients(export)
    }

    /// Starts to serve NBD's exports.
    /// The list of exports in `options` is not looked at.
    pub fn start_nbd(
        self: &Arc<Self>,
        listener: Listener,
        options: nbd::Options,
    ) -> Result<(), Failure> {
        let mut nbd = self.nbd.lock();
        let (stop, exports) = (Stop::new(), nbd.exports.clone());
        let (exporter, theirs, host) = (Arc::clone(self), stop.clone(), self.host);
        let serve = move || {
            let outcome = match host {
                HostKind::Blocking => exports.serve_blocking(listener, options, &theirs),
                _ => exports.serve_uring(listener, options, &theirs),
            };
            exporter.table.lock().nbd_over = true;
            exporter.changed.notify_all();
            outcome
        };
        let thread = std::thread::Builder::new().name("nbd-control".to_owned());
        let thread = thread.spawn(serve);
        let thread = thread.map_err(|error| Failure::io("the thread of NBD", &error))?;
        nbd.running = Some((stop, thread));
        Ok(())
    }

    pub(super) fn add_to_nbd(
        &self,
        new: &NewExport,
        served: &Arc<Served>,
    ) -> Result<String, Failure> {
        let nbd = self.nbd.lock();
        let Some(uris) = &nbd.uris else {
            let failure = Failure::new("this server does not serve NBD");
            return Err(failure.hint("it does when it is started with -k, -p or -b"));
        };
        let export = nbd::Export {
            name: new.name.clone(),
            description: new.description.clone(),
            read_only: served.read_only,
            bitmap: match &new.image.bitmap {
                None => None,
                Some(name) => Some(bitmap(name, served)?),
            },
        };
        let device = {
            let served = Arc::clone(served);
            move |_thread| Ok(served.device())
        };
        let added = nbd.exports.add(export, device);
        added.map_err(|error| Failure::about(served.name(), error.to_string()))?;
        Ok(uris.of(&new.name))
    }

    /// Takes an export from the server; blocks until its clients are gone.
    pub(super) fn remove_from_nbd(&self, export: &Export, drain: Duration) -> Result<(), Failure> {
        let exports = self.nbd.lock().exports.clone();
        let removed = exports.remove(&export.name, drain);
        removed.map_err(|error| Failure::about(export.served.name(), error.to_string()))
    }

    /// From now on the server stays when its last client has left.
    pub fn keep_nbd(&self) {
        self.nbd.lock().exports.stay();
    }

    /// Tells the server to end: in order, and the second time at once.
    pub(super) fn drain_nbd(&self) {
        match &self.nbd.lock().running {
            Some((stop, _)) => stop.drain(),
            None => self.table.lock().nbd_over = true,
        }
    }

    /// Waits for the end of the server.
    pub(super) fn join_nbd(&self) -> Result<(), Failure> {
        let running = self.nbd.lock().running.take();
        let Some((_, thread)) = running else {
            return Ok(());
        };
        match thread.join() {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(Failure::new(error.to_string())),
            Err(_) => Err(Failure::new("the thread of NBD failed")),
        }
    }
}

/// The bitmap that an export shows, as it is now. It must not change while clients read it.
fn bitmap(name: &str, served: &Served) -> Result<ExportBitmap, Failure> {
    let image = served.shared();
    let fail = |error| Failure::image(image.name(), &error);
    let queue = image.queue::<BlockingFile>();
    let all = block_on(queue.bitmaps()).map_err(fail)?;
    let bits = block_on(queue.bitmap_bits(name)).map_err(fail)?;
    let is_enabled = all.iter().any(|one| one.name == name && one.is_enabled);
    if is_enabled && !served.read_only {
        let what = format!("bitmap {name:?} records, and would change while it is shown");
        let failure = Failure::about(image.name(), what);
        return Err(failure.hint("serve read-only (-r), or 'gaur bitmap --disable' it first"));
    }
    Ok(ExportBitmap {
        name: name.to_owned(),
        run_at: Arc::new(move |offset, len| bits.run_at(offset, len)),
    })
}
