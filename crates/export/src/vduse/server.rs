//! The running device: made or taken over, attached to the bus, and taken away again.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use gaur_block::Errno;
use gaur_reactor::{Descriptor, Either, race, sleep};

use super::device::{self, DEPTH, Device, Plan};
use super::log_file::LogFile;
use super::netlink;
use super::options::Options;
use super::session::Session;
use crate::error::ServeError;
use crate::front::Front;
use crate::serve::{Channel, Geometry, Server, say};
use crate::virtio::config::BlockConfig;
use crate::virtio::server::{self, Control, Setup};
use crate::virtio::wire::{SECTOR_BYTES, feature};

/// How often and how far apart it is tried to remove a device that is still in use.
const DESTROY_TRIES: u32 = 200;
const DESTROY_PAUSE: Duration = Duration::from_millis(10);

/// Makes a VDUSE device and attaches it; the disk is there when this returns. A device of that name
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
    let count = left
        .as_ref()
        .map_or(options.queues, |device| device.rings().max(1));
    let setup = Setup {
        name: "vduse",
        peer: "driver",
        place: options.name.clone(),
        threads: options.threads,
        rings: count,
        read_only: options.read_only,
        log: options.log.clone(),
    };
    let prepared = server::prepare(setup, devices)?;
    let (device, log) = match left {
        Some(device) => take_over(&options, device)?,
        None => create(&options, count, prepared.geometry())?,
    };
    let serving = async move |control| serve(Arc::new(device), log, &control).await;
    let mut server = prepared.serve(serving)?;
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
        Some(node) => server.set_place(node),
        None => {
            let line = "no driver has taken the device in; virtio_vdpa makes a disk of it";
            say(&options.log, line);
        }
    }
    Ok(server)
}

/// Makes a new device.
fn create(
    options: &Options,
    rings: u16,
    geometry: Geometry,
) -> Result<(Device, LogFile), ServeError> {
    let config = BlockConfig {
        geometry,
        read_only: options.read_only,
        rings,
        segments: u32::from(DEPTH) - 2,
        // The kernel takes no device whose driver may write to its configuration.
        cache_switch: false,
    };
    let path = LogFile::path(&options.name);
    let log = LogFile::create(path, rings).map_err(ServeError::new)?;
    let device = Device::create(&Plan {
        name: &options.name,
        features: config.features() | feature::ACCESS_PLATFORM,
        config: config.config(true),
        rings,
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
    let path = LogFile::path(&options.name);
    let log = LogFile::open(path, device.rings()).map_err(|reason| {
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

/// Serves the device until it is taken off the bus.
async fn serve(device: Arc<Device>, log: LogFile, control: &Control) -> Result<(), ServeError> {
    let mut session = Session::new(&device, &control.rings, log);
    session.resume().await;
    let messages = readable(&device.fd)?;
    let detaching = Channel::new();
    let mut draining = false;
    let detached = loop {
        let told = race(control.size_changes.take(), messages.readable());
        let event = match draining {
            true => race(detaching.take(), told).await,
            false => match race(control.switch.drain.stopped(), told).await {
                Either::Left(()) => {
                    draining = true;
                    detach(&device.name, &detaching)?;
                    continue;
                }
                Either::Right(told) => Either::Right(told),
            },
        };
        match event {
            Either::Left(detached) => break detached,
            Either::Right(Either::Left(answer)) => {
                let sectors = control.rings.geometry().await.size_bytes / SECTOR_BYTES;
                let told = device.resize(sectors).map_err(|errno| {
                    ServeError::because("the kernel does not take the new size", errno)
                });
                let _ = answer.send(told);
            }
            Either::Right(Either::Right(_)) => session.answer().await.map_err(ServeError::new)?,
        }
    };
    session.halt().await;
    let flushed = control.rings.flush().await;
    // ENODEV: it was not on the bus, or another process has taken it off.
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
fn detach(name: &str, detached: &Channel<Result<(), Errno>>) -> Result<(), ServeError> {
    let (name, detached) = (name.to_owned(), detached.clone());
    let run = move || detached.put(netlink::detach(&name));
    let started = thread::Builder::new()
        .name("vduse-detach".to_owned())
        .spawn(run);
    let started = started.map(drop);
    started.map_err(|error| ServeError::new(format!("cannot start a thread: {error}")))
}
