//! Management of ublk devices by a process that does not serve them: list, stop, delete.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use super::control::{self, Control};
use super::features::Features;
use super::info::{Info, State};
use super::server::explain_missing;
use super::uapi;
use crate::error::ServeError;

/// Where the kernel lists character devices of ublk.
const CLASS: &str = "/sys/class/ublk-char";

/// How long a server may take to let its device go.
const PATIENCE: Duration = Duration::from_secs(30);

/// What became of a device that was to be deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deletion {
    /// It is gone, and its number is free.
    Gone,
    /// No new request reaches it, but a process still has it open (a mounted file system, a server
    /// that does not end). It goes when they let go.
    Lingering,
}

/// What this kernel's ublk can do.
///
/// # Errors
/// No ublk here, or no permission.
pub fn features() -> Result<Features, ServeError> {
    Control::open()?.features()
}

/// What a device is.
///
/// # Errors
/// There is no such device, or no permission.
pub fn info(id: u32) -> Result<Info, ServeError> {
    find(&mut Control::open()?, id)
}

/// All devices that this user may see, by number.
///
/// # Errors
/// No ublk here, or no permission.
pub fn list() -> Result<Vec<Info>, ServeError> {
    let mut control = Control::open()?;
    let directory = match fs::read_dir(CLASS) {
        Ok(directory) => directory,
        Err(error) => return Err(ServeError::new(format!("{CLASS}: {error}"))),
    };
    let names = directory.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut ids: Vec<u32> = names
        .filter_map(|name| name.strip_prefix("ublkc")?.parse().ok())
        .collect();
    ids.sort_unstable();
    // One that is not for this user, or that has just gone, is not listed.
    Ok(ids
        .into_iter()
        .filter_map(|id| control.info(id).ok())
        .collect())
}

/// Stops a device, whichever process serves it, and takes it away. Requests under way are answered, later ones
/// fail. With `if_unused` nothing happens to one that a process has open.
///
/// # Errors
/// There is no such device, no permission, or it is in use.
pub fn delete(id: u32, if_unused: bool) -> Result<Deletion, ServeError> {
    let mut control = Control::open()?;
    let found = find(&mut control, id)?;
    if if_unused && found.state != State::Dead {
        try_stop(&mut control, &found)?;
    }
    let gone = |errno: gaur_block::Errno| errno.raw() == libc::ENODEV;
    match control.tell(uapi::STOP_DEV, &found, 0) {
        Ok(()) => {}
        Err(errno) if gone(errno) => return Ok(Deletion::Gone),
        Err(errno) => {
            let what = format!("ublk device {id} does not stop");
            return Err(ServeError::because(what, errno));
        }
    }
    let end = Instant::now() + PATIENCE;
    match control.delete(&found, &|| Instant::now() > end) {
        Ok(()) => Ok(Deletion::Gone),
        Err(errno) if gone(errno) => Ok(Deletion::Gone),
        Err(errno) if errno.raw() == libc::EINTR => Ok(Deletion::Lingering),
        Err(errno) => {
            let what = format!("ublk device {id} cannot be deleted");
            Err(ServeError::because(what, errno))
        }
    }
}

fn try_stop(control: &mut Control, found: &Info) -> Result<(), ServeError> {
    let id = found.id;
    if !control.features()?.has(Features::SAFE_STOP) {
        return Err(ServeError::new(format!(
            "this kernel cannot tell whether ublk device {id} is in use (Linux 7.0 can)"
        )));
    }
    match control.tell(uapi::TRY_STOP_DEV, found, 0) {
        Ok(()) => Ok(()),
        Err(errno) if errno.raw() == libc::ENODEV => Ok(()),
        Err(errno) if errno.raw() == libc::EBUSY => Err(ServeError::new(format!(
            "ublk device {id} is in use: {} is open or mounted",
            found.block_path()
        ))),
        Err(errno) => Err(ServeError::because(
            format!("ublk device {id} does not stop"),
            errno,
        )),
    }
}

/// Makes the server of a device end and leave the block device to the next one: requests under way
/// are answered, later ones wait. Returns when the old server is through.
///
/// # Errors
/// There is no such device, it was not made for that, or its server does not let go in time.
pub fn quiesce(id: u32) -> Result<(), ServeError> {
    let mut control = Control::open()?;
    let found = find(&mut control, id)?;
    if control::recoverable(&found) {
        return Ok(());
    }
    if found.state != State::Live {
        return Err(ServeError::new(format!("ublk device {id} is not running")));
    }
    if !found.features.has(Features::QUIESCE) {
        return Err(ServeError::new(format!(
            "ublk device {id} was not made to be quiesced"
        )));
    }
    let end = Instant::now() + PATIENCE;
    while let Err(errno) = control.quiesce(&found, Duration::from_secs(1)) {
        if errno.raw() != libc::EBUSY || Instant::now() > end {
            let what = format!("ublk device {id} cannot be quiesced");
            return Err(ServeError::because(what, errno));
        }
        thread::sleep(Duration::from_millis(5));
    }
    let left = control
        .wait_while(id, PATIENCE, |info| info.state == State::Live)
        .map_err(|errno| ServeError::new(explain_missing(id, errno)))?;
    if control::recoverable(&left) {
        return Ok(());
    }
    Err(ServeError::new(format!(
        "the server of ublk device {id} does not leave it"
    )))
}

fn find(control: &mut Control, id: u32) -> Result<Info, ServeError> {
    control
        .info(id)
        .map_err(|errno| ServeError::new(explain_missing(id, errno)))
}
