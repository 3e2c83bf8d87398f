//! The running device: made or taken over, attached to the bus, and taken away again.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use gaur_block::Errno;
use gaur_reactor::{Config, Descriptor, Driver, Either, Reactor, Stop, Threads, race, sleep};

use super::device::{self, Device, Plan};
use super::log_file::LogFile;
use super::netlink;
use super::options::Options;
use super::session::Session;
use crate::error::ServeError;
use crate::front::Front;
use crate::virtio::config::Face;
use crate::virtio::crew::{Crew, CrewOptions, Rings};
use crate::virtio::mailbox::Mailbox;
use crate::virtio::order::Shape;
use crate::virtio::wire::{SECTOR_BYTES, feature};

/// How long whoever resized the device waits until the driver was told.
const TELL_TIMEOUT: Duration = Duration::from_secs(10);

/// How often and how far apart it is tried to remove a device that is still in use.
const DESTROY_TRIES: u32 = 200;
const DESTROY_PAUSE: Duration = Duration::from_millis(10);

/// For the control thread.
enum News {
    /// The size has changed; who wants to know whether the driver was told.
    Resized(mpsc::Sender<Result<(), ServeError>>),
    /// The device is off the bus, or cannot be taken off.
    Detached(Result<(), Errno>),
}

/// What the control thread shares with the server.
#[derive(Clone)]
struct Switches {
    drain: Stop,
    force: Stop,
    ended: Stop,
    news: Mailbox<News>,
}

/// A VDUSE device that is served.
pub struct Server {
    place: String,
    switches: Switches,
    threads: Threads,
    control: JoinHandle<Result<(), ServeError>>,
    stops: Mutex<u32>,
}

impl Server {
    /// Makes the device and attaches it; the disk is there when this returns. A device of that name
    /// that a killed server left is taken over, with all that is in flight. `devices` is called on
    /// each thread.
    ///
    /// # Errors
    /// When an option makes no sense, the kernel has no VDUSE or does not let us use it, another
    /// process serves the device, or a device cannot be made.
    pub fn start<D, F>(options: Options, devices: F) -> Result<Server, ServeError>
    where
        D: gaur_block::Device + 'static,
        F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
    {
        options.check().map_err(ServeError::new)?;
        let left = match Device::open(&options.name) {
            Ok(device) => Some(device),
            Err(Errno::ENOENT) => None,
            Err(errno) => return Err(cannot_open(&options.name, errno)),
        };
        let crew = Crew::start(crew_options(&options, left.as_ref()), devices)?;
        let rings = crew.rings();
        let made = gaur_reactor::block_on(rings.shape());
        let made = match left {
            Some(device) => take_over(&options, device),
            None => create(&options, &rings, made),
        };
        let (device, log) = match made {
            Ok(made) => made,
            Err(error) => {
                rings.dismiss();
                crew.threads.join();
                return Err(error);
            }
        };
        let switches = Switches {
            drain: Stop::new(),
            force: Stop::new(),
            ended: Stop::new(),
            news: Mailbox::new(),
        };
        let (inner, device) = (switches.clone(), Arc::new(device));
        let control = thread::Builder::new()
            .name("vduse".to_owned())
            .spawn(move || control(device, log, &rings, &inner))
            .map_err(|error| ServeError::new(format!("cannot start a thread: {error}")))?;
        let mut server = Server {
            place: options.name.clone(),
            switches,
            threads: crew.threads,
            control,
            stops: Mutex::new(0),
        };
        // The control thread answers what the kernel asks while this goes on.
        match netlink::attach(&options.name) {
            Ok(()) => {}
            // It is there already.
            Err(errno) if errno.raw() == libc::EEXIST => {}
            Err(errno) => {
                server.stop();
                let _ = Box::new(server).finish();
                let name = &options.name;
                return Err(ServeError::because(
                    format_args!("cannot attach {name} to the vDPA bus"),
                    errno,
                ));
            }
        }
        match block_device(&options.name) {
            Some(node) => server.place = node,
            None => {
                if let Some(log) = &options.log {
                    log("no driver has taken the device in; virtio_vdpa makes a disk of it");
                }
            }
        }
        Ok(server)
    }
}

fn crew_options(options: &Options, left: Option<&Device>) -> CrewOptions {
    CrewOptions {
        name: "vduse",
        threads: options.threads,
        rings: left.map_or(options.queues, |device| device.rings().max(1)),
        reactor: options.reactor,
        read_only: options.read_only,
        serial: options.serial.clone(),
        log: options.log.clone(),
    }
}

/// Makes a new device.
fn create(options: &Options, rings: &Rings, shape: Shape) -> Result<(Device, LogFile), ServeError> {
    let face = Face {
        shape,
        read_only: options.read_only,
        rings: rings.count() as u16,
        segments: u32::from(options.depth) - 2,
        // The kernel takes no device whose driver may write to its configuration.
        cache_switch: false,
    };
    let path = LogFile::path(&options.state_folder, &options.name);
    let log = LogFile::create(path, face.rings, options.depth).map_err(ServeError::new)?;
    let device = Device::create(&Plan {
        name: &options.name,
        features: face.features() | feature::ACCESS_PLATFORM,
        config: face.config(true),
        rings: face.rings,
        depth: options.depth,
    });
    match device {
        Ok(device) => Ok((device, log)),
        Err(errno) => {
            log.remove();
            Err(cannot_open(&options.name, errno))
        }
    }
}

/// Goes on with a device that was left.
fn take_over(options: &Options, device: Device) -> Result<(Device, LogFile), ServeError> {
    let path = LogFile::path(&options.state_folder, &options.name);
    let log = LogFile::open(path, device.rings(), options.depth).map_err(|reason| {
        let name = &options.name;
        ServeError::new(format!(
            "the VDUSE device {name} was left by another server, and what is in flight is not known: {reason}"
        ))
    })?;
    Ok((device, log))
}

fn cannot_open(name: &str, errno: Errno) -> ServeError {
    let hint = match errno {
        Errno::ENOENT => "; is the module vduse loaded?",
        Errno::EBUSY => "; another process serves it",
        Errno::EACCES | Errno::EPERM => "; /dev/vduse belongs to root",
        _ => "",
    };
    ServeError::new(format!(
        "cannot make the VDUSE device {name}: {errno}{hint}"
    ))
}

/// Whether a device of that name is a disk of this machine. One that is has been so since its server made
/// it, even if that was killed.
pub fn is_disk(name: &str) -> bool {
    block_device(name).is_some()
}

/// The disk that the kernel made of a device on the bus.
fn block_device(name: &str) -> Option<String> {
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let list = std::fs::read_dir(folder).into_iter().flatten().flatten();
        list.map(|entry| entry.path()).collect()
    };
    let bus = Path::new("/sys/bus/vdpa/devices").join(name);
    let disks = entries(&bus).into_iter().map(|folder| folder.join("block"));
    let disk = disks.flat_map(|folder| entries(&folder)).next()?;
    let disk = disk.file_name()?.to_str()?;
    Some(format!("/dev/{disk}"))
}

impl Front for Server {
    fn place(&self) -> String {
        self.place.clone()
    }

    fn resized(&self) -> Result<(), ServeError> {
        let (answer, told) = mpsc::channel();
        self.switches.news.put(News::Resized(answer));
        told.recv_timeout(TELL_TIMEOUT)
            .unwrap_or_else(|_| Err(ServeError::new("the driver was not told of the new size")))
    }

    fn stop(&self) {
        let mut stops = self.stops.lock().unwrap_or_else(PoisonError::into_inner);
        *stops += 1;
        match *stops {
            1 => self.switches.drain.stop(),
            _ => self.switches.force.stop(),
        }
    }

    fn ended(&self) -> Stop {
        self.switches.ended.clone()
    }

    fn finish(self: Box<Self>) -> Result<(), ServeError> {
        let outcome = self
            .control
            .join()
            .unwrap_or_else(|_| Err(ServeError::new("the control thread panicked")));
        if self.switches.force.is_stopped() {
            // Joining would wait for the very requests that the second stop does not wait for.
            core::mem::forget(self.threads);
        } else {
            self.threads.join();
        }
        outcome
    }
}

/// Raised when the control thread ends, however it does.
struct Ended(Stop);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.stop();
    }
}

fn control(
    device: Arc<Device>,
    log: LogFile,
    rings: &Rings,
    switches: &Switches,
) -> Result<(), ServeError> {
    let _ended = Ended(switches.ended.clone());
    let config = Config {
        driver: Driver::Fallback,
        ..Config::default()
    };
    let reactor = Reactor::new(&config)
        .map_err(|errno| ServeError::because("cannot start the control loop", errno))?;
    reactor.block_on(async {
        match race(
            serve(device, log, rings, switches),
            switches.force.stopped(),
        )
        .await
        {
            Either::Left(outcome) => outcome,
            // The device stays, as if this process had been killed.
            Either::Right(()) => Ok(()),
        }
    })
}

/// Serves the device until it is taken off the bus.
async fn serve(
    device: Arc<Device>,
    log: LogFile,
    rings: &Rings,
    switches: &Switches,
) -> Result<(), ServeError> {
    let mut session = Session::new(&device, rings, log);
    session.resume().await;
    let messages = readable(&device.fd)?;
    let mut draining = false;
    let detached = loop {
        let told = race(switches.news.take(), messages.readable());
        let event = if draining {
            Either::Right(told.await)
        } else {
            race(switches.drain.stopped(), told).await
        };
        match event {
            Either::Left(()) => {
                draining = true;
                detach(&device.name, &switches.news)?;
            }
            Either::Right(Either::Left(News::Detached(outcome))) => break outcome,
            Either::Right(Either::Left(News::Resized(answer))) => {
                let sectors = rings.shape().await.size_bytes / SECTOR_BYTES;
                let told = device.resize(sectors).map_err(|errno| {
                    ServeError::because("the kernel does not take the new size", errno)
                });
                let _ = answer.send(told);
            }
            Either::Right(Either::Right(_)) => session.answer().await.map_err(ServeError::new)?,
        }
    };
    session.halt().await;
    let flushed = rings.flush().await;
    rings.dismiss();
    // ENODEV: it was not on the bus, or somebody has taken it off.
    if let Err(errno) = detached
        && errno.raw() != libc::ENODEV
    {
        return Err(ServeError::because(
            "cannot take the device off the vDPA bus",
            errno,
        ));
    }
    session.remove_log();
    let name = device.name.clone();
    drop((session, messages, device));
    flushed.and(destroy(&name).await)
}

/// Removes the device. The last task of a ring may hold it for a moment longer.
async fn destroy(name: &str) -> Result<(), ServeError> {
    let mut left = DESTROY_TRIES;
    loop {
        match device::destroy(name) {
            Err(Errno::EBUSY) if left > 0 => {
                left -= 1;
                sleep(DESTROY_PAUSE).await;
            }
            outcome => {
                return outcome.map_err(|errno| {
                    let what = format_args!("cannot remove the VDUSE device {name}");
                    ServeError::because(what, errno)
                });
            }
        }
    }
}

fn readable(fd: &OwnedFd) -> Result<Descriptor, ServeError> {
    let own = fd.try_clone();
    let own =
        own.map_err(|error| ServeError::new(format!("cannot duplicate a descriptor: {error}")))?;
    Ok(Descriptor::new(own))
}

/// Takes the device off the bus on a thread of its own, because the kernel asks us while it does.
fn detach(name: &str, news: &Mailbox<News>) -> Result<(), ServeError> {
    let (name, news) = (name.to_owned(), news.clone());
    let run = move || news.put(News::Detached(netlink::detach(&name)));
    let started = thread::Builder::new()
        .name("vduse-detach".to_owned())
        .spawn(run);
    let started = started.map(drop);
    started.map_err(|error| ServeError::new(format!("cannot start a thread: {error}")))
}
