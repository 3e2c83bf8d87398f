//! What the rings of one thread share.

use gaur_block::{Device, Errno, Request};

use crate::serve::{Disk, Geometry, Log, say};

/// The device of a thread, and what is said of it.
pub(super) struct ThreadContext<D> {
    pub(super) device: Disk<D>,
    pub(super) read_only: bool,
    pub(super) log: Option<Log>,
}

impl<D: Device> ThreadContext<D> {
    pub(super) fn new(device: D, read_only: bool, log: Option<Log>) -> ThreadContext<D> {
        ThreadContext {
            read_only: read_only || device.limits().read_only,
            device: Disk::new(device),
            log,
        }
    }

    pub(super) fn geometry(&self) -> Geometry {
        Geometry::of(&*self.device)
    }

    pub(super) async fn flush(&self) -> Result<(), Errno> {
        if self.read_only {
            return Ok(());
        }
        self.device.ask(Request::Flush).await
    }

    pub(super) fn say(&self, line: &str) {
        say(&self.log, line);
    }
}
