//! How a server is told to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Ends a server: the first call of [`Stop::drain`] politely, the next one at once. Clones are the
/// same switch; any thread may use it.
#[derive(Clone, Default)]
pub struct Stop {
    asked: Arc<AtomicBool>,
    pub(super) drain: gaur_reactor::Stop,
    pub(super) force: gaur_reactor::Stop,
}

impl Stop {
    /// A switch nobody touched yet.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// First: no client is let in any more, requests under way are finished and answered, new ones
    /// are refused with `ESHUTDOWN`, devices are flushed, connections closed. Again: sockets are
    /// shut down and nothing is waited for.
    pub fn drain(&self) {
        if self.asked.swap(true, Ordering::AcqRel) {
            self.force.stop();
        } else {
            self.drain.stop();
        }
    }
}
