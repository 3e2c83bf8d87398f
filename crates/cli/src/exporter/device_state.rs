//! What is noted of a ublk device for a server to come, as long as the device is there.

use std::path::Path;

use super::{AddExport, NewExport};
use crate::failure::Failure;
use crate::notice::say;
use crate::ublk::state::{self, State};

/// Notes what the device at `place` shows. When that cannot be noted the device works all the same, so it
/// is said and no more.
pub fn note(place: &str, new: &NewExport) {
    if let Some(device) = number(place)
        && let Err(failure) = write(device, new)
    {
        say(format!(
            "'gaur ublk recover {device}' will not work: {failure}"
        ));
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
    let state = State {
        device,
        pid: std::process::id(),
        name: new.name.clone(),
        image: std::path::absolute(new.spec.path()).map_err(failed)?,
        directory: std::path::absolute(Path::new(".")).map_err(failed)?,
        export: AddExport::from(new).fields(),
    };
    state.write(&state::directory())
}

/// The number in `/dev/ublkbN`.
fn number(place: &str) -> Option<u32> {
    place.strip_prefix("/dev/ublkb")?.parse().ok()
}
