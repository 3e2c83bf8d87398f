//! The NBD server of the process: one listener for all exports of this kind.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use gaur_engine::{BitmapBits, ErrorKind, Format, OpenOptions};
use gaur_export::nbd::{self, ExportBitmap, Exports, Listener, Outcome, ServeError, Stop, Uris};
use gaur_reactor::{BlockingFile, block_on};

use super::served::Disk;
use super::{Export, Exporter, NewExport, Served};
use crate::failure::Failure;
use crate::host_kind::HostKind;
use crate::open;
use crate::shared_image::SharedImage;

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
            bitmaps: {
                let shown = new.image.bitmap.iter();
                let shown = shown.map(|name| bitmap(name, new, served));
                shown.collect::<Result<_, Failure>>()?
            },
            allocation_depth: new.image.allocation_depth,
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

/// A bitmap that an export shows: of the image, or of the nearest below it that has one of that name. One that records
/// goes on to while it is shown.
fn bitmap(name: &str, new: &NewExport, served: &Served) -> Result<ExportBitmap, Failure> {
    let shared = served.shared();
    let fail = |error| Failure::image(shared.name(), &error);
    let own = block_on(shared.queue::<BlockingFile>().bitmap_bits(name));
    let (stored, size_bytes) = match own {
        Ok(bits) => (bits, u64::MAX),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bitmap_below(name, new, shared)?.ok_or_else(|| fail(error))?
        }
        Err(error) => return Err(fail(error)),
    };
    let (offset, image) = (served.policy.offset_bytes, Arc::clone(shared.image()));
    let called = name.to_owned();
    Ok(ExportBitmap {
        name: name.to_owned(),
        run_at: Arc::new(move |at, len| {
            let at = offset + at;
            let current = image.bitmap_bits_in_memory(&called);
            match size_bytes.saturating_sub(at) {
                // The disk is longer than the one that has the bitmap.
                0 => (len, false),
                left => current
                    .as_ref()
                    .unwrap_or(&stored)
                    .run_at(at, len.min(left)),
            }
        }),
    })
}

/// The bits of a bitmap of an image below, and the size of that one's disk.
fn bitmap_below(
    name: &str,
    new: &NewExport,
    shared: &SharedImage,
) -> Result<Option<(Arc<BitmapBits>, u64)>, Failure> {
    for layer in shared.image().layers().iter().skip(1) {
        if layer.header().is_none() {
            continue;
        }
        let options = OpenOptions {
            format: Some(Format::Qcow2),
            read_only: true,
            backing: false,
            keys: new.image.keys.keys()?,
            ..OpenOptions::new(new.image.references.references())
        };
        let opened = open::open(layer.path(), &options)?;
        let queue = opened.image.queue(opened.files);
        match block_on(queue.bitmap_bits(name)) {
            Ok(bits) => return Ok(Some((bits, opened.image.size_bytes()))),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Failure::image(&layer.name(), &error)),
        }
    }
    Ok(None)
}
