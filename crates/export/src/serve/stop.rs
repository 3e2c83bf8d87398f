//! The stop switch of an export or server: drain, then stop now.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_reactor::Stop;

/// Ends a server: the first call of [`StopSwitch::drain`] politely, the next one at once. Clones are the
/// same switch; any thread may use it.
#[derive(Clone, Default)]
pub struct StopSwitch {
    asked: Arc<AtomicBool>,
    /// Raised by the first call.
    pub(crate) drain: Stop,
    /// Raised by the second call.
    pub(crate) now: Stop,
}

impl StopSwitch {
    /// A switch that was not used yet.
    pub fn new() -> StopSwitch {
        StopSwitch::default()
    }

    /// First: no client is let in any more, requests under way are finished and answered, new ones
    /// are refused with `ESHUTDOWN`, devices are flushed, connections closed. Again: sockets are
    /// shut down and nothing is waited for.
    pub fn drain(&self) {
        if self.asked.swap(true, Ordering::AcqRel) {
            self.now.stop();
        } else {
            self.drain.stop();
        }
    }
}
