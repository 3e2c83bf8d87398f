//! What is noted for a server to come, as long as a device or a machine is there that goes on.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gaur_engine::{OpenOptions, References};
use gaur_export::ublk::Added;

use super::{AddExport, NewExport};
use crate::export_name;
use crate::failure::Failure;
use crate::fronts::FrontConfig;
use crate::kept::Kept;
use crate::notice::say;
use crate::shared_image::refuses_log;
use crate::ublk_state::{self as state, State};

/// What a block device has acknowledged has to be there for its next server, so it has a log of commits
/// (`--handover`) unless the command line names another. Every server of a ublk device has a new one,
/// unless it takes that device over: what is left in an old one may be about an image that another program has
/// changed since. Of the others [`Kept`] knows who was there all the time.
pub fn with_log(mut new: NewExport) -> NewExport {
    let front = &new.front;
    if front.is_nbd() || new.image.handover.is_some() || !new.image.writes_file(&new.spec) {
        return new;
    }
    if let FrontConfig::Ublk(config) = front
        && (config.recover || config.unprivileged)
    {
        return new;
    }
    let base = OpenOptions {
        format: new.image.format,
        ..OpenOptions::new(References::Nothing)
    };
    if let Some(failure) = refuses_log(&new.spec, &base) {
        say(format!("nothing is kept for another server: {failure}"));
        return new;
    }
    let kept = match front {
        FrontConfig::Ublk(_) => new_log().map(|path| new.image.handover = Some(path)),
        front => Kept::for_front(front).map(|kept| new.image.kept = kept.map(Box::new)),
    };
    if let Err(failure) = kept {
        say(format!("nothing is kept for another server: {failure}"));
    }
    new
}

fn new_log() -> Result<PathBuf, Failure> {
    static LOGS: AtomicU32 = AtomicU32::new(0);
    let directory = state::directory();
    state::make(&directory)?;
    let number = LOGS.fetch_add(1, Ordering::Relaxed);
    let path = state::log(&directory, std::process::id(), number);
    // A process of this number that was killed may have left one.
    let _ = std::fs::remove_file(&path);
    Ok(path)
}

/// Has a new ublk device noted as soon as it has a number: the block device that it becomes outlives this
/// process, whenever that is killed.
pub fn notes(new: &NewExport) -> Option<Added> {
    let FrontConfig::Ublk(config) = &new.front else {
        return None;
    };
    if config.recover {
        return None;
    }
    let new = new.clone();
    Some(Arc::new(move |device| note(device, &new)))
}

/// Notes who serves a device now that was taken over.
pub fn note_recovered(place: &str, new: &NewExport) {
    if let FrontConfig::Ublk(config) = &new.front
        && config.recover
        && let Some(device) = number(place)
    {
        note(device, new);
    }
}

/// Notes what a device shows. When that cannot be noted the device works all the same, so it is said
/// and no more.
fn note(device: u32, new: &NewExport) {
    if let Err(failure) = write(device, new) {
        say(format!(
            "'gaur ublk recover {device}' will not work: {failure}"
        ));
    }
}

/// After an export that could not be started: nothing is left for another server. The kernel may have its
/// device for a moment yet. What a server before has left stays.
pub fn forget(new: &NewExport) {
    let FrontConfig::Ublk(config) = &new.front else {
        return;
    };
    if config.recover {
        return;
    }
    let directory = state::directory();
    let its = |state: &State| state.pid == std::process::id() && state.name == new.name;
    for state in State::all(&directory).into_iter().filter(its) {
        state::forget(&directory, state.device);
    }
    if let Some(path) = &new.image.handover {
        state::forget_log(&directory, path);
    }
}

/// Forgets the device at `place`, unless the kernel still has it: then it waits for another server.
pub fn forget_if_gone(place: &str) {
    let Some(device) = number(place) else { return };
    if gaur_export::ublk::info(device).is_err() {
        state::forget(&state::directory(), device);
    }
}

fn write(device: u32, new: &NewExport) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::io(new.spec.path(), &error);
    // What is noted is text.
    export_name::as_text(new.spec.given())?;
    let state = State {
        device,
        pid: std::process::id(),
        name: new.name.clone(),
        image: std::path::absolute(new.spec.file_path()).map_err(failed)?,
        directory: std::path::absolute(Path::new(".")).map_err(failed)?,
        export: AddExport::from(new).fields()?,
    };
    state.write(&state::directory())
}

/// The number in `/dev/ublkbN`.
fn number(place: &str) -> Option<u32> {
    place.strip_prefix("/dev/ublkb")?.parse().ok()
}
