//! The devices of one thread.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use gaur_block::{Device, Request};

use super::client::Client;
use super::exports::{ExportDevice, Exports, GONE};
use super::options::Options;
use super::pool::Budget;
use crate::error::ServeError;
use crate::nbd::proto::wire::{
    ALLOCATION_CONTEXT, ALLOCATION_CONTEXT_ID, BITMAP_CONTEXT, BITMAP_CONTEXT_ID, DEPTH_CONTEXT,
    DEPTH_CONTEXT_ID,
};
use crate::nbd::proto::{self, ExportInfo};

/// What one thread serves.
pub(super) struct ThreadExports<D> {
    pub(super) options: Arc<Options>,
    pub(super) exports: Exports<D>,
    pub(super) budget: Arc<Budget>,
    thread: usize,
    /// The devices that connections of this thread use, by the number of their export.
    devices: RefCell<HashMap<usize, Weak<ExportDevice<D>>>>,
}

impl<D: Device> ThreadExports<D> {
    pub(super) fn new(
        options: Arc<Options>,
        exports: Exports<D>,
        budget: Arc<Budget>,
        thread: usize,
    ) -> ThreadExports<D> {
        ThreadExports {
            options,
            exports,
            budget,
            thread,
            devices: RefCell::default(),
        }
    }

    /// The device of an export, made now if no connection of this thread uses it.
    fn device(&self, export: usize) -> Result<Rc<ExportDevice<D>>, String> {
        let known = self.devices.borrow().get(&export).and_then(Weak::upgrade);
        if let Some(device) = known {
            return Ok(device);
        }
        let entry = self.exports.entry(export).ok_or(GONE)?;
        let device = Rc::new(entry.make(self.thread)?);
        let mut devices = self.devices.borrow_mut();
        devices.insert(export, Rc::downgrade(&device));
        Ok(device)
    }

    /// Makes every device once, to find out whether that works.
    pub(super) fn try_all(&self) -> Result<(), String> {
        for entry in self.exports.entries() {
            drop(entry.make(self.thread)?);
        }
        Ok(())
    }

    /// Lets a client use an export.
    pub(super) fn enter(
        &self,
        export: usize,
        client: &Arc<Client>,
    ) -> Result<ExportGuard<D>, String> {
        let device = self.device(export)?;
        if !device.entry().enter(client) {
            return Err(GONE.to_owned());
        }
        device.users.set(device.users.get() + 1);
        let client = Arc::clone(client);
        Ok(ExportGuard { device, client })
    }

    /// A client is through with an export. The last one on this thread has the device flushed if it may
    /// have been written to.
    pub(super) async fn leave(&self, guard: ExportGuard<D>) {
        let device = &guard.device;
        if device.users.get() == 1 && device.written.replace(false) {
            let flushed = device.device.ask(Request::Flush);
            if let Err(errno) = flushed.await {
                let name = &device.entry().export.name;
                let what = format_args!("flush of export {name:?} failed").to_string();
                let error = ServeError::because(what, errno);
                self.exports.failed(device.entry(), error);
            }
        }
        drop(guard);
        let mut devices = self.devices.borrow_mut();
        devices.retain(|_, device| device.strong_count() > 0);
    }
}

/// A client that uses an export.
pub(super) struct ExportGuard<D> {
    pub(super) device: Rc<ExportDevice<D>>,
    client: Arc<Client>,
}

impl<D> Drop for ExportGuard<D> {
    /// Also after a panic, so that a removal does not wait for a client that is gone.
    fn drop(&mut self) {
        let users = &self.device.users;
        users.set(users.get().saturating_sub(1));
        self.device.entry().leave(&self.client);
    }
}

/// What a handshake on this thread may talk about.
impl<D: Device> proto::Exports for ThreadExports<D> {
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

    fn contexts(&self, export: usize) -> Vec<(u32, String)> {
        let mut all = vec![(ALLOCATION_CONTEXT_ID, ALLOCATION_CONTEXT.to_owned())];
        if let Some(entry) = self.exports.entry(export) {
            if entry.export.allocation_depth {
                all.push((DEPTH_CONTEXT_ID, DEPTH_CONTEXT.to_owned()));
            }
            let names = entry.export.bitmaps.iter().map(|bitmap| &bitmap.name);
            let names = names.map(|name| format!("{BITMAP_CONTEXT}{name}"));
            all.extend((BITMAP_CONTEXT_ID..).zip(names));
        }
        all
    }

    fn info(&self, export: usize) -> Result<ExportInfo, String> {
        let device = self.device(export)?;
        let limits = device.device.limits();
        let read_only = device.entry().export.read_only || limits.read_only;
        Ok(ExportInfo {
            size_bytes: device.device.size_bytes(),
            read_only,
            // A flush covers every queue of a device, so connections may be combined wherever a
            // client can have more than one.
            multi_conn: self.options.shared != 1,
            preferred_block: match self.options.preferred_block {
                Some(told) => told,
                None => limits.preferred_block.max(4096),
            },
        })
    }
}
