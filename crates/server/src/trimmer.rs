//! Returns idle memory of a server to the system.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::exporter::Exporter;
use crate::notice::say;

/// From one look to the next. What was not used between two of them is given back.
const INTERVAL: Duration = Duration::from_secs(5);

/// Looks from now on, as long as the exporter is there. Memory is all that is lost when the thread
/// cannot be had, so that is said and no more.
pub fn start(exporter: &Arc<Exporter>) {
    let exporter = Arc::downgrade(exporter);
    let thread = std::thread::Builder::new().name("trimmer".to_owned());
    if let Err(error) = thread.spawn(move || trim(&exporter)) {
        say(format!("unused memory is kept: {error}"));
    }
}

fn trim(exporter: &Weak<Exporter>) {
    while let Some(alive) = exporter.upgrade() {
        if !alive.pin.is_locked() {
            // What the reactors give back meanwhile goes with the next look.
            gaur_reactor::trim_heap();
            gaur_reactor::trim_memory();
        }
        drop(alive);
        std::thread::sleep(INTERVAL);
    }
}
