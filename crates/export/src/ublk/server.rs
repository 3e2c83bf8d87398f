//! Starting a server, and the server itself.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use gaur_block::{Device, Errno};
use gaur_reactor::{Handle, Stop};

use super::channel::Channel;
use super::control::{self, Control};
use super::features::Features;
use super::info::{self, Info, State};
use super::options::{Options, ZERO_COPY};
use super::params::{self, Params};
use super::supervisor::{Event, Leaving, Outcome, Supervisor};
use super::threads::{self, DeviceThreads, Make};
use super::uapi::SECTOR_BYTES;
use crate::error::ServeError;
use crate::front::Front;

/// How long the driver may take to be through with a server that died.
const DEATH: Duration = Duration::from_secs(10);

/// A served block device. Dropping this value leaves it served.
pub struct Server {
    info: Info,
    events: Mutex<mpsc::Sender<Event>>,
    outcome: Arc<Outcome>,
    stopping: AtomicBool,
    /// The thread whose device is asked for its size, and a way to tell the driver.
    resize: Mutex<(Handle, Control)>,
}

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
    let info = control.add(&wanted)?;
    if let Some(added) = &options.added {
        added(info.id);
    }
    let make: Make<D> = Arc::new(devices);
    let prepared = prepare(&mut control, info, &options, &make);
    match prepared {
        Ok((info, channel, threads)) => launch(control, info, options, channel, threads, false),
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
    let make: Make<D> = Arc::new(devices);
    let channel = Arc::new(Channel::open(id)?);
    let threads = start_crew(&mut control, &found, &options, &make)?;
    let sectors = match check_same(&found, &options, &threads) {
        Ok(sectors) => sectors,
        Err(error) => {
            threads::dismiss(threads.running);
            return Err(error);
        }
    };
    let server = launch(control, found, options, channel, threads, true)?;
    if sectors * SECTOR_BYTES != found.size_bytes {
        server.resized()?;
    }
    Ok(server)
}

/// Whether the image can be what the block device is; its sectors.
fn check_same(found: &Info, options: &Options, threads: &DeviceThreads) -> Result<u64, ServeError> {
    let id = found.id;
    if (threads.limits.read_only || options.read_only) && !found.read_only {
        return Err(ServeError::new(format!(
            "ublk device {id} can be written to, but its image is read-only now"
        )));
    }
    let sectors = params::sectors(threads.size_bytes, found.read_only)?;
    let same_size = sectors * SECTOR_BYTES == found.size_bytes;
    if !same_size && !found.features.has(Features::UPDATE_SIZE) {
        return Err(ServeError::new(format!(
            "ublk device {id} has {} bytes, the image {}, and this kernel cannot change that",
            found.size_bytes, threads.size_bytes
        )));
    }
    Ok(sectors)
}

/// Everything up to the first request of a new device.
fn prepare<D: Device + 'static>(
    control: &mut Control,
    mut info: Info,
    options: &Options,
    make: &Make<D>,
) -> Result<(Info, Arc<Channel>, DeviceThreads), ServeError> {
    let channel = Arc::new(Channel::open(info.id)?);
    let threads = start_crew(control, &info, options, make)?;
    match set_params(control, &mut info, options, &threads) {
        Ok(()) => Ok((info, channel, threads)),
        Err(error) => {
            threads::dismiss(threads.running);
            Err(error)
        }
    }
}

/// Tells the driver what the block device is.
fn set_params(
    control: &mut Control,
    info: &mut Info,
    options: &Options,
    threads: &DeviceThreads,
) -> Result<(), ServeError> {
    let read_only = options.read_only || threads.limits.read_only;
    let params = Params::new(
        params::sectors(threads.size_bytes, read_only)?,
        threads.limits,
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

fn start_crew<D: Device + 'static>(
    control: &mut Control,
    info: &Info,
    options: &Options,
    make: &Make<D>,
) -> Result<DeviceThreads, ServeError> {
    DeviceThreads::start(info, options, make, |queue| {
        if !options.affinity {
            return Vec::new();
        }
        // Without it the thread runs anywhere.
        let processors = control.affinity(info, queue).unwrap_or_default();
        match processors.len() {
            // The program that sends the requests runs there too, and the two would take turns.
            0 | 1 => Vec::new(),
            _ => processors,
        }
    })
}

/// Lets the threads fetch, shows the block device, and leaves everything to a supervisor.
fn launch(
    mut control: Control,
    mut info: Info,
    options: Options,
    channel: Arc<Channel>,
    threads: DeviceThreads,
    recovering: bool,
) -> Result<Server, ServeError> {
    let second = Control::open()?;
    let handle = threads
        .size_of()
        .ok_or_else(|| ServeError::new("a ublk device needs a thread"))?;
    let (events_send, events) = mpsc::channel();
    threads.begin(&channel, &events_send);
    let early = RefCell::new(Vec::new());
    // Anything that is told now is that something is wrong, and the driver would wait for ever.
    let give_up = || {
        early.borrow_mut().extend(events.try_iter());
        !early.borrow().is_empty()
    };
    let started = if recovering {
        control.end_recovery(&info, &give_up)
    } else {
        control.start(&info, &give_up)
    };
    let leaving = match started {
        Ok(()) => Leaving::No,
        Err(_) => Supervisor::after_failure(&info, recovering),
    };
    let supervisor = Supervisor {
        control,
        info,
        options,
        running: threads.running,
        channel,
        early: early.take(),
        events,
        leaving,
    };
    if let Err(errno) = started {
        let why = explain_start(&info, errno);
        return Err(match (leaving, supervisor) {
            (Leaving::No, _) => ServeError::new(why),
            (_, supervisor) => {
                ServeError::new(supervisor.run().err().map_or(why, |e| e.to_string()))
            }
        });
    }
    info.state = State::Live;
    info.server = Some(std::process::id());
    let outcome = Arc::new(Outcome::default());
    let told = outcome.clone();
    thread::Builder::new()
        .name(format!("ublk{}", info.id))
        .spawn(move || told.tell(supervisor.run()))
        .map_err(|error| ServeError::new(format!("no thread for ublk: {error}")))?;
    Ok(Server {
        info,
        events: Mutex::new(events_send),
        outcome,
        stopping: AtomicBool::new(false),
        resize: Mutex::new((handle, second)),
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
        let errno = match control.start_recovery(info) {
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

fn explain_start(info: &Info, errno: Errno) -> String {
    let id = info.id;
    match errno.raw() {
        libc::EINTR => format!("ublk device {id} did not start: requests cannot be fetched"),
        _ => format!("the kernel does not start ublk device {id}: {errno}"),
    }
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
        self.tell(Event::Quiesce);
        Ok(())
    }

    fn tell(&self, event: Event) {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        // The supervisor has gone once it has ended.
        let _ = events.send(event);
    }
}

impl Front for Server {
    fn place(&self) -> String {
        self.info.block_path()
    }

    fn resized(&self) -> Result<(), ServeError> {
        let id = self.info.id;
        if !self.info.features.has(Features::UPDATE_SIZE) {
            return Err(ServeError::new(format!(
                "this kernel cannot change the size of ublk device {id} while it runs"
            )));
        }
        let mut resize = self.resize.lock().unwrap_or_else(PoisonError::into_inner);
        let (handle, control) = &mut *resize;
        let size_bytes = threads::ask_size(handle)
            .ok_or_else(|| ServeError::new(format!("ublk device {id} has ended")))?;
        let sectors = params::sectors(size_bytes, self.info.read_only)?;
        control.update_size(&self.info, sectors).map_err(|errno| {
            ServeError::because(format!("the size of ublk device {id} stays"), errno)
        })
    }

    fn stop(&self) {
        if self.stopping.swap(true, Ordering::AcqRel) {
            let message = "ublk was ended before all requests were answered";
            self.outcome.tell(Err(ServeError::new(message)));
        } else {
            self.tell(Event::Stop);
        }
    }

    fn ended(&self) -> Stop {
        self.outcome.ended.clone()
    }

    fn finish(self: Box<Self>) -> Result<(), ServeError> {
        self.outcome.wait()
    }
}
