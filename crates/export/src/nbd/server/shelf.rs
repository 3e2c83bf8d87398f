//! The devices of one thread.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use gaur_block::{Device, Errno, Payload, Request, Tag};

use super::options::{Options, Place};
use crate::error::ServeError;
use crate::nbd::proto::{ExportInfo, Exports};

/// Makes the device of an export for a thread.
pub(super) type Make<D> = Arc<dyn Fn(Place) -> Result<D, String> + Send + Sync>;

/// What one thread serves, and the tags in use on it.
pub(super) struct Shelf<D> {
    pub(super) options: Arc<Options>,
    thread: usize,
    make: Make<D>,
    devices: Vec<OnceCell<Rc<D>>>,
    tags: Tags,
}

impl<D: Device> Shelf<D> {
    pub(super) fn new(options: Arc<Options>, thread: usize, make: Make<D>) -> Shelf<D> {
        let devices = options.exports.iter().map(|_| OnceCell::new()).collect();
        Shelf {
            options,
            thread,
            make,
            devices,
            tags: Tags::default(),
        }
    }

    /// The device of an export, made now if it was not yet.
    pub(super) fn device(&self, export: usize) -> Result<Rc<D>, String> {
        if let Some(device) = self.devices[export].get() {
            return Ok(device.clone());
        }
        let device = Rc::new((self.make)(Place {
            thread: self.thread,
            export,
        })?);
        Ok(self.devices[export].get_or_init(|| device).clone())
    }

    /// Makes every device.
    pub(super) fn fill(&self) -> Result<(), ServeError> {
        for export in 0..self.devices.len() {
            self.device(export).map_err(ServeError::new)?;
        }
        Ok(())
    }

    pub(super) fn tags(&self) -> &Tags {
        &self.tags
    }

    /// Whether writes to an export are refused.
    pub(super) fn read_only(&self, export: usize, device: &D) -> bool {
        self.options.exports[export].read_only || device.limits().read_only
    }

    /// Flushes every device that was made and may have been written. All are tried; the first error
    /// is returned.
    pub(super) async fn flush(&self) -> Result<(), ServeError> {
        let mut outcome = Ok(());
        for (export, device) in self.devices.iter().enumerate() {
            let Some(device) = device.get() else { continue };
            if self.read_only(export, device) {
                continue;
            }
            let tag = self.tags.take();
            let flushed = device.submit(tag, Request::Flush, Payload::None).await;
            self.tags.give(tag);
            if let Err(errno) = flushed {
                outcome = outcome.and(Err(self.flush_failed(export, errno)));
            }
        }
        outcome
    }

    fn flush_failed(&self, export: usize, errno: Errno) -> ServeError {
        let name = &self.options.exports[export].name;
        ServeError::because(format_args!("flush of export {name:?} failed"), errno)
    }
}

impl<D: Device> Exports for Shelf<D> {
    fn count(&self) -> usize {
        self.options.exports.len()
    }

    fn name(&self, export: usize) -> &str {
        &self.options.exports[export].name
    }

    fn description(&self, export: usize) -> &str {
        &self.options.exports[export].description
    }

    fn default_export(&self) -> Option<usize> {
        self.options.default_export
    }

    fn info(&self, export: usize) -> Result<ExportInfo, String> {
        let device = self.device(export)?;
        let read_only = self.read_only(export, &device);
        Ok(ExportInfo {
            size_bytes: device.size_bytes(),
            read_only,
            // A flush covers every queue of a device, so connections may be combined wherever a
            // client can have more than one.
            multi_conn: read_only || self.options.shared != 1,
            preferred_block: device.limits().preferred_block.max(4096),
        })
    }
}

/// Tags of one thread: no two requests in flight on it have the same, whatever connection they
/// came by.
#[derive(Default)]
pub(super) struct Tags {
    free: RefCell<Vec<u32>>,
    next: Cell<u32>,
}

impl Tags {
    pub(super) fn take(&self) -> Tag {
        Tag(self.free.borrow_mut().pop().unwrap_or_else(|| {
            let next = self.next.get();
            self.next.set(next + 1);
            next
        }))
    }

    pub(super) fn give(&self, tag: Tag) {
        self.free.borrow_mut().push(tag.0);
    }
}
