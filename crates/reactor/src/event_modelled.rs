//! The event of a reactor in a model: there is no kernel to wait in.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::PoisonError;

use gaur_block::Errno;
use gaur_model::loom::sync::Condvar;

use crate::sync::Mutex;

/// Readable from [`Event::raise`] to [`Event::clear`].
pub(crate) struct Event {
    raised: Mutex<bool>,
    changed: Condvar,
}

impl Event {
    pub(crate) fn new() -> Result<Event, Errno> {
        Ok(Event {
            raised: Mutex::new(false),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn raise(&self) {
        *self.raised.lock() = true;
        self.changed.notify_all();
    }

    pub(crate) fn clear(&self) {
        *self.raised.lock() = false;
    }

    /// What the kernel does with a thread that waits until the event is readable.
    #[cfg(test)]
    pub(crate) fn wait(&self) {
        let mut raised = self.raised.lock();
        while !*raised {
            let woken = self.changed.wait(raised);
            raised = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        -1
    }
}
