//! The devices of one thread.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use gaur_block::{Device, Payload, Request};

use super::client::Client;
use super::exports::{Exports, GONE, Stand};
use super::options::Options;
use super::pool::Budget;
use crate::error::ServeError;
use crate::nbd::proto::{self, ExportInfo};

/// What one thread serves.
pub(super) struct Shelf<D> {
    pub(super) options: Arc<Options>,
    pub(super) exports: Exports<D>,
    pub(super) budget: Arc<Budget>,
    thread: usize,
    /// The devices that connections of this thread use, by the number of their export.
    devices: RefCell<HashMap<usize, Weak<Stand<D>>>>,
}

impl<D: Device> Shelf<D> {
    pub(super) fn new(
        options: Arc<Options>,
        exports: Exports<D>,
        budget: Arc<Budget>,
        thread: usize,
    ) -> Shelf<D> {
        Shelf {
            options,
            exports,
            budget,
            thread,
            devices: RefCell::default(),
        }
    }

    /// The device of an export, made now if no connection of this thread uses it.
    fn device(&self, export: usize) -> Result<Rc<Stand<D>>, String> {
        let known = self.devices.borrow().get(&export).and_then(Weak::upgrade);
        if let Some(stand) = known {
            return Ok(stand);
        }
        let entry = self.exports.entry(export).ok_or(GONE)?;
        let stand = Rc::new(entry.make(self.thread)?);
        let mut devices = self.devices.borrow_mut();
        devices.insert(export, Rc::downgrade(&stand));
        Ok(stand)
    }

    /// Makes every device once, to find out whether that works.
    pub(super) fn try_all(&self) -> Result<(), ServeError> {
        for entry in self.exports.entries() {
            drop(entry.make(self.thread).map_err(ServeError::new)?);
        }
        Ok(())
    }

    /// Lets a client use an export.
    pub(super) fn enter(&self, export: usize, client: &Arc<Client>) -> Result<Visit<D>, String> {
        let stand = self.device(export)?;
        if !stand.entry().enter(client) {
            return Err(GONE.to_owned());
        }
        stand.users.set(stand.users.get() + 1);
        let client = Arc::clone(client);
        Ok(Visit { stand, client })
    }

    /// A client is through with an export. The last one on this thread has the device flushed if it may
    /// have been written to.
    pub(super) async fn leave(&self, visit: Visit<D>) {
        let stand = &visit.stand;
        if stand.users.get() == 1 && stand.written.replace(false) {
            let flushed = stand.device.submit(Request::Flush, Payload::None);
            if let Err(errno) = flushed.await {
                let name = &stand.entry().export.name;
                let what = format_args!("flush of export {name:?} failed").to_string();
                let error = ServeError::because(what, errno);
                self.exports.failed(stand.entry(), error);
            }
        }
        drop(visit);
        let mut devices = self.devices.borrow_mut();
        devices.retain(|_, stand| stand.strong_count() > 0);
    }
}

/// A client that uses an export.
pub(super) struct Visit<D> {
    pub(super) stand: Rc<Stand<D>>,
    client: Arc<Client>,
}

impl<D> Drop for Visit<D> {
    /// Also after a panic, so that nobody waits for a client that is gone.
    fn drop(&mut self) {
        let users = &self.stand.users;
        users.set(users.get().saturating_sub(1));
        self.stand.entry().leave(&self.client);
    }
}

/// What a handshake on this thread may talk about.
impl<D: Device> proto::Exports for Shelf<D> {
    fn list(&self, show: &mut dyn FnMut(&str, &str)) {
        self.exports.list(show);
    }

    fn find(&self, name: &[u8]) -> Option<usize> {
        self.exports.find(name)
    }

    fn names(&self, export: usize) -> (String, String) {
        match self.exports.entry(export) {
            Some(entry) => (entry.export.name.clone(), entry.export.description.clone()),
            None => Default::default(),
        }
    }

    fn info(&self, export: usize) -> Result<ExportInfo, String> {
        let stand = self.device(export)?;
        let limits = stand.device.limits();
        let read_only = stand.entry().export.read_only || limits.read_only;
        Ok(ExportInfo {
            size_bytes: stand.device.size_bytes(),
            read_only,
            // A flush covers every queue of a device, so connections may be combined wherever a
            // client can have more than one.
            multi_conn: read_only || self.options.shared != 1,
            preferred_block: limits.preferred_block.max(4096),
        })
    }
}
