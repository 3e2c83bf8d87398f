//! Starting a server, and the server itself.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use gaur_block::{Device, Errno};
use gaur_reactor::Stop;
use parking_lot::Mutex;

use super::char_device::CharDevice;
use super::control::{self, Control};
use super::features::Features;
use super::info::{self, Info, State};
use super::options::{Options, ZERO_COPY};
use super::params::{self, Params};
use super::supervisor::{Event, Leaving, Supervisor};
use super::threads::{DeviceThreads, Shared, SizeQuery};
use super::uapi::{self, SECTOR_BYTES};
use crate::error::ServeError;
use crate::front::Front;
use crate::serve::{self, Channel, Geometry, Transport};

/// How long the driver may take to be through with a server that died.
const DEATH: Duration = Duration::from_secs(10);

/// How long a thread may take to say how large its device is.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A served block device. Dropping this value leaves it served.
pub struct Server {
    info: Info,
    events: Channel<Event>,
    server: serve::Server,
}

/// Threads that wait to be told to serve a device.
type Prepared = (CharDevice, DeviceThreads);

/// Makes a block device and serves it. `devices` is called on each of the threads; all of them are
/// queues of one image. The block device is there when this returns.
///
/// # Errors
/// No ublk here, no permission, the number is taken, a device could not be made, or one whose size
/// no block device has.
pub fn start<D, F>(options: Options, devices: F) -> Result<Server, ServeError>
where
    D: Device + 'static,
    F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
{
    options.check()?;
    let mut control = Control::open()?;
    let features = options.wanted(control.features()?)?;
    let queues = options.queues.min(usize::from(u16::MAX)) as u16;
    let wanted = info::request(
        options.id,
        queues,
        options.depth(),
        options.buffer_bytes,
        features,
    );
    let mut info = control.add(&wanted)?;
    if let Some(added) = &options.added {
        added(info.id);
    }
    let prepared = prepare(
        &mut control,
        info,
        &options,
        devices,
        |control, geometry| set_params(control, &mut info, &options, geometry),
    );
    match prepared {
        Ok(prepared) => launch(control, info, prepared, options, false),
        Err(error) => {
            let _ = control.delete_later(&info);
            Err(error)
        }
    }
}

/// Serves a device whose server is gone. Queues, depth and the way of transfer are the device's; of
/// the options only the others count. Requests that were under way come again.
///
/// # Errors
/// There is no such device, it is being served or not made for recovery, or its image has another
/// size that it cannot be told of.
pub fn recover<D, F>(id: u32, options: Options, devices: F) -> Result<Server, ServeError>
where
    D: Device + 'static,
    F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
{
    options.check()?;
    let mut control = Control::open()?;
    let found = control
        .wait_while(id, DEATH, |info| {
            info.state == State::Live && info.server.is_none()
        })
        .map_err(|errno| ServeError::new(explain_missing(id, errno)))?;
    check_recoverable(&found)?;
    begin_recovery(&mut control, &found)?;
    let mut sectors = 0;
    let prepared = prepare(&mut control, found, &options, devices, |_, geometry| {
        sectors = check_same(&found, &options, geometry)?;
        Ok(())
    })?;
    let server = launch(control, found, prepared, options, true)?;
    if sectors * SECTOR_BYTES != found.size_bytes {
        server.resized()?;
    }
    Ok(server)
}

/// Whether the image can be what the block device is; its sectors.
fn check_same(found: &Info, options: &Options, geometry: &Geometry) -> Result<u64, ServeError> {
    let id = found.id;
    if (geometry.limits.read_only || options.read_only) && !found.read_only {
        return Err(ServeError::new(format!(
            "ublk device {id} can be written to, but its image is read-only now"
        )));
    }
    let sectors = params::sectors(geometry.size_bytes, found.read_only)?;
    let same_size = sectors * SECTOR_BYTES == found.size_bytes;
    if !same_size && !found.features.has(Features::UPDATE_SIZE) {
        return Err(ServeError::new(format!(
            "ublk device {id} has {} bytes, the image {}, and this kernel cannot change that",
            found.size_bytes, geometry.size_bytes
        )));
    }
    Ok(sectors)
}

/// Everything up to the first request. `settle` decides, by what the first thread reports, whether the
/// device is served.
fn prepare<D, F>(
    control: &mut Control,
    info: Info,
    options: &Options,
    devices: F,
    settle: impl FnOnce(&mut Control, &Geometry) -> Result<(), ServeError>,
) -> Result<Prepared, ServeError>
where
    D: Device + 'static,
    F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
{
    let char_device = CharDevice::open(info.id)?;
    let threads = DeviceThreads::start(&info, options, devices, |queue| {
        if !options.affinity {
            return Vec::new();
        }
        // Without it the thread runs anywhere.
        let processors = control.affinity(&info, queue).unwrap_or_default();
        match processors.len() {
            // The program that sends the requests runs there too, and the two would take turns.
            0 | 1 => Vec::new(),
            _ => processors,
        }
    })?;
    settle(control, &threads.prepared.report)?;
    Ok((char_device, threads))
}

/// Tells the driver what the block device is.
fn set_params(
    control: &mut Control,
    info: &mut Info,
    options: &Options,
    geometry: &Geometry,
) -> Result<(), ServeError> {
    let read_only = options.read_only || geometry.limits.read_only;
    let params = Params::new(
        params::sectors(geometry.size_bytes, read_only)?,
        geometry.limits,
        read_only,
        info.buffer_bytes,
        info.features.has(ZERO_COPY),
    );
    control
        .set_params(info, params.encode())
        .map_err(|errno| ServeError::because("ublk does not take what the device is", errno))?;
    info.size_bytes = params.size_sectors * SECTOR_BYTES;
    info.read_only = read_only;
    Ok(())
}

/// Lets the threads fetch, shows the block device, and leaves everything to a supervisor.
fn launch(
    control: Control,
    mut info: Info,
    (char_device, threads): Prepared,
    options: Options,
    recovering: bool,
) -> Result<Server, ServeError> {
    let size_queries = Channel::new();
    let shared = Shared {
        info,
        char_device: Arc::new(char_device),
        events: Channel::new(),
        aborted: Arc::default(),
        log: options.log.clone(),
    };
    let events = shared.events.clone();
    let transport = Resizer {
        info,
        size_queries: size_queries.clone(),
        // Of its own: the supervisor blocks in the other.
        control: Mutex::new(Control::open()?),
    };
    let (live, started) = mpsc::channel();
    let (name, place) = (format!("ublk{}", info.id), info.block_path());
    let server = serve::Server::spawn(name, place, Box::new(transport), async move |switch| {
        let (threads, alive) = threads.serve(&shared, &size_queries);
        let supervisor = Supervisor {
            control,
            info,
            options,
            threads,
            alive,
            char_device: shared.char_device,
            events: shared.events,
            leaving: Leaving::No,
        };
        supervisor.run(recovering, live, switch.drain).await
    })?;
    if started.recv().is_err() {
        Box::new(server).finish()?;
        return Err(ServeError::new("a ublk device ended while it was started"));
    }
    info.state = State::Live;
    info.server = Some(std::process::id());
    Ok(Server {
        info,
        events,
        server,
    })
}

fn check_recoverable(info: &Info) -> Result<(), ServeError> {
    let id = info.id;
    if control::recoverable(info) {
        return Ok(());
    }
    let why = match (info.state, info.server) {
        (State::Live, Some(pid)) => format!("is served, by process {pid}"),
        (State::Live, None) => "does not notice that its server is gone".to_owned(),
        (State::Dead, _) => "was stopped: there is nothing to recover".to_owned(),
        (state, _) => format!("is {}", state.name()),
    };
    Err(ServeError::new(format!("ublk device {id} {why}")))
}

/// The driver says that it is busy until it is through with the old server.
fn begin_recovery(control: &mut Control, info: &Info) -> Result<(), ServeError> {
    let end = std::time::Instant::now() + DEATH;
    loop {
        let errno = match control.tell(uapi::START_USER_RECOVERY, info, 0) {
            Ok(()) => return Ok(()),
            Err(errno) => errno,
        };
        let busy = errno.raw() == libc::EBUSY;
        if !busy || std::time::Instant::now() > end {
            let hint = match errno.raw() {
                libc::EINVAL => " (it was made without recovery)",
                libc::EBUSY => " (its last server has not ended)",
                _ => "",
            };
            let what = format!("ublk device {} cannot be recovered{hint}", info.id);
            return Err(ServeError::because(what, errno));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

pub(super) fn explain_missing(id: u32, errno: Errno) -> String {
    match errno.raw() {
        libc::ENODEV | libc::ENOENT => format!("there is no ublk device {id}"),
        libc::EPERM | libc::EACCES => format!("no permission for ublk device {id}"),
        _ => format!("ublk device {id}: {errno}"),
    }
}

fn has_ended(id: u32) -> ServeError {
    ServeError::new(format!("ublk device {id} has ended"))
}

impl Server {
    /// What was made: its number, the paths, what it can do. As it was at the start, except for the
    /// size.
    pub fn info(&self) -> Info {
        self.info
    }

    /// Ends the server and leaves the block device to the next one ([`recover`]): requests under way
    /// are answered, later ones wait.
    ///
    /// # Errors
    /// When the device was not made for that.
    pub fn quiesce(&self) -> Result<(), ServeError> {
        if !self.info.features.has(Features::QUIESCE) {
            return Err(ServeError::new(format!(
                "ublk device {} cannot be left to another server",
                self.info.id
            )));
        }
        self.events.put(Event::Quiesce);
        Ok(())
    }
}

impl Front for Server {
    fn place(&self) -> String {
        self.server.place()
    }

    fn resized(&self) -> Result<(), ServeError> {
        // No thread would answer.
        if self.server.ended().is_stopped() {
            return Err(has_ended(self.info.id));
        }
        self.server.resized()
    }

    fn stop(&self) {
        self.server.stop();
    }

    fn ended(&self) -> Stop {
        self.server.ended()
    }

    fn finish(self: Box<Self>) -> Result<(), ServeError> {
        Box::new(self.server).finish()
    }
}

/// Tells the driver of a new size.
struct Resizer {
    info: Info,
    size_queries: Channel<SizeQuery>,
    control: Mutex<Control>,
}

impl Transport for Resizer {
    fn resized(&self) -> Result<(), ServeError> {
        let id = self.info.id;
        if !self.info.features.has(Features::UPDATE_SIZE) {
            return Err(ServeError::new(format!(
                "this kernel cannot change the size of ublk device {id} while it runs"
            )));
        }
        let mut control = self.control.lock();
        let (query, answer) = mpsc::channel();
        self.size_queries.put(query);
        let size_bytes = answer
            .recv_timeout(ANSWER_TIMEOUT)
            .map_err(|_| has_ended(id))?;
        let sectors = params::sectors(size_bytes, self.info.read_only)?;
        let told = control.tell(uapi::UPDATE_SIZE, &self.info, sectors);
        told.map_err(|errno| {
            ServeError::because(format!("the size of ublk device {id} stays"), errno)
        })
    }

    fn cut_off(&self) -> Result<(), ServeError> {
        let message = "ublk was ended before all requests were answered";
        Err(ServeError::new(message))
    }
}
