//! The exports of a server, which may come and go while it runs.
//!
//! An export has a number that no other export of the server ever has. A thread makes a device for it
//! when a client needs one there and drops it with the last such client, so an export that no client uses
//! is an entry of this list and nothing else.
//!
//! Lock order: [`Shared::list`], then [`Entry::users`]. Neither is held while a device is made or used.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gaur_block::Device;
use parking_lot::{Condvar, Mutex};

use super::client::Client;
use super::options::{Export, Options, Place};
use crate::error::ServeError;
use crate::nbd::proto::wire::{BITMAPS_MAX, STRING_MAX_BYTES};
use crate::serve::Disk;

/// Makes the device of an export for a thread of that number.
type Make<D> = Box<dyn Fn(usize) -> Result<D, String> + Send + Sync>;

/// The exports of a server. Clones are the same list; any thread may use it.
pub struct Exports<D> {
    shared: Arc<Shared<D>>,
}

impl<D> Clone for Exports<D> {
    fn clone(&self) -> Exports<D> {
        Exports {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<D> Default for Exports<D> {
    fn default() -> Exports<D> {
        Exports {
            shared: Arc::new(Shared {
                list: Mutex::new(List {
                    entries: BTreeMap::new(),
                    numbers: HashMap::new(),
                    next: 0,
                    default: None,
                }),
                stay: AtomicBool::new(false),
                failure: Mutex::default(),
            }),
        }
    }
}

struct Shared<D> {
    list: Mutex<List<D>>,
    /// The server stays when its last client has left, whatever its options say.
    stay: AtomicBool,
    /// The first flush that failed, of exports that are there.
    failure: Mutex<Option<ServeError>>,
}

struct List<D> {
    entries: BTreeMap<usize, Arc<Entry<D>>>,
    numbers: HashMap<String, usize>,
    next: usize,
    /// Answers to the empty name, unless one is called that.
    default: Option<usize>,
}

/// One export.
pub(super) struct Entry<D> {
    pub(super) export: Export,
    make: Make<D>,
    users: Mutex<Users>,
    /// Signalled when a client leaves or a device goes.
    quiet: Condvar,
}

/// Who uses an export.
#[derive(Default)]
struct Users {
    clients: BTreeMap<u64, Arc<Client>>,
    devices: usize,
    /// No client is let in any more.
    closing: bool,
    failure: Option<ServeError>,
}

impl<D> Exports<D> {
    /// None yet.
    pub fn new() -> Exports<D> {
        Exports::default()
    }

    /// The exports of `options`, with devices by [`Place`].
    ///
    /// # Errors
    /// When there are none, or they cannot be exported as asked.
    pub fn fixed<F>(options: &Options, devices: F) -> Result<Exports<D>, ServeError>
    where
        F: Fn(Place) -> Result<D, String> + Send + Sync + 'static,
    {
        let exports = Exports::new();
        let devices = Arc::new(devices);
        if options.exports.is_empty() {
            return Err(ServeError::new("there is nothing to export"));
        }
        for (at, export) in options.exports.iter().enumerate() {
            let devices = Arc::clone(&devices);
            exports.add(export.clone(), move |thread| {
                devices(Place { thread, export: at })
            })?;
        }
        if let Some(default) = options.default_export {
            let known = options.exports.get(default);
            let unknown = "the default export is not among the exports";
            let known = known.ok_or_else(|| ServeError::new(unknown))?;
            exports.set_default(&known.name);
        }
        Ok(exports)
    }

    /// Adds an export; clients may choose it from now on. `devices` is called with the number of a
    /// serving thread, on that thread, when a client there needs a device and there is none; all
    /// devices it makes are queues of one disk. The device goes with the last client of the thread.
    ///
    /// # Errors
    /// When an export is called that already, or a text is too long for the protocol.
    pub fn add<F>(&self, export: Export, devices: F) -> Result<(), ServeError>
    where
        F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
    {
        let mut list = self.shared.list.lock();
        let name = &export.name;
        if name.len().max(export.description.len()) > STRING_MAX_BYTES {
            let number = list.next;
            return Err(ServeError::new(format!(
                "export {number} has a name or description longer than {STRING_MAX_BYTES} bytes"
            )));
        }
        if export.bitmaps.len() > BITMAPS_MAX {
            let message = format!("an export shows at most {BITMAPS_MAX} bitmaps");
            return Err(ServeError::new(message));
        }
        if list.numbers.contains_key(name) {
            return Err(ServeError::new(format!("two exports are called {name:?}")));
        }
        let number = list.next;
        list.next += 1;
        list.numbers.insert(name.clone(), number);
        let entry = Entry {
            export,
            make: Box::new(devices),
            users: Mutex::default(),
            quiet: Condvar::new(),
        };
        list.entries.insert(number, Arc::new(entry));
        Ok(())
    }

    /// The export of that name answers to the empty name too, unless one is called that.
    pub fn set_default(&self, name: &str) {
        let mut list = self.shared.list.lock();
        list.default = list.numbers.get(name).copied();
    }

    /// The server stays when its last client has left, whatever it was told when it started.
    pub fn stay(&self) {
        self.shared.stay.store(true, Ordering::Release);
    }

    /// How many clients use an export; `None` when there is none of that name.
    pub fn clients(&self, name: &str) -> Option<usize> {
        let entry = self.named(name)?;
        let count = entry.users.lock().clients.len();
        Some(count)
    }

    /// Takes an export off the list. Clients that use it have their requests under way finished and
    /// answered and further ones refused with `ESHUTDOWN`, its devices are flushed where they were
    /// written to, and its clients hung up on. Blocks the calling thread, which must not be one that
    /// serves, until all of that is done; clients that do not take their replies are hung up on after
    /// `patience`.
    ///
    /// # Errors
    /// When there is no export of that name, or it could not be flushed.
    pub fn remove(&self, name: &str, patience: Duration) -> Result<(), ServeError> {
        let entry = {
            let mut list = self.shared.list.lock();
            let number = list.numbers.remove(name);
            let entry = number.and_then(|number| list.entries.remove(&number));
            if list.default == number {
                list.default = None;
            }
            entry.ok_or_else(|| ServeError::new(format!("there is no export {name:?}")))?
        };
        entry.close(patience)
    }

    fn named(&self, name: &str) -> Option<Arc<Entry<D>>> {
        let list = self.shared.list.lock();
        let number = list.numbers.get(name)?;
        list.entries.get(number).cloned()
    }

    /// The export of that number, if it is still there.
    pub(super) fn entry(&self, number: usize) -> Option<Arc<Entry<D>>> {
        self.shared.list.lock().entries.get(&number).cloned()
    }

    /// The number of the export that a client means by `name`.
    pub(super) fn find(&self, name: &[u8]) -> Option<usize> {
        let list = self.shared.list.lock();
        let text = std::str::from_utf8(name).ok();
        match text.and_then(|name| list.numbers.get(name)) {
            Some(number) => Some(*number),
            None if name.is_empty() => list.default,
            None => None,
        }
    }

    /// Shows names and descriptions, oldest first.
    pub(super) fn list(&self, show: &mut dyn FnMut(&str, &str)) {
        for entry in self.shared.list.lock().entries.values() {
            show(&entry.export.name, &entry.export.description);
        }
    }

    /// All that are there, oldest first.
    pub(super) fn entries(&self) -> Vec<Arc<Entry<D>>> {
        self.shared.list.lock().entries.values().cloned().collect()
    }

    pub(super) fn stays(&self) -> bool {
        self.shared.stay.load(Ordering::Acquire)
    }

    /// The first flush that failed.
    pub(super) fn take_failure(&self) -> Result<(), ServeError> {
        self.shared.failure.lock().take().map_or(Ok(()), Err)
    }

    /// A flush of an export failed.
    pub(super) fn failed(&self, entry: &Entry<D>, error: ServeError) {
        let mut users = entry.users.lock();
        if users.closing {
            // The removal returns it.
            users.failure.get_or_insert(error);
            return;
        }
        drop(users);
        self.shared.failure.lock().get_or_insert(error);
    }
}

impl<D> Entry<D> {
    /// A device for a client on this thread.
    pub(super) fn make(self: &Arc<Self>, thread: usize) -> Result<ExportDevice<D>, String>
    where
        D: Device,
    {
        {
            let mut users = self.users.lock();
            if users.closing {
                return Err(GONE.to_owned());
            }
            users.devices += 1;
        }
        let place = DevicePlace(Arc::clone(self));
        Ok(ExportDevice {
            device: Disk::new((self.make)(thread)?),
            written: std::cell::Cell::new(false),
            users: std::cell::Cell::new(0),
            place,
        })
    }

    /// Lets a client use it; `false` when it is being removed.
    pub(super) fn enter(&self, client: &Arc<Client>) -> bool {
        let mut users = self.users.lock();
        if !users.closing {
            users.clients.insert(client.number, Arc::clone(client));
        }
        !users.closing
    }

    /// A client does not use it any more.
    pub(super) fn leave(&self, client: &Client) {
        self.users.lock().clients.remove(&client.number);
        self.quiet.notify_all();
    }

    fn close(&self, patience: Duration) -> Result<(), ServeError> {
        let deadline = Instant::now() + patience;
        let mut users = self.users.lock();
        users.closing = true;
        for client in users.clients.values() {
            client.drain.stop();
        }
        let mut patient = true;
        while !users.clients.is_empty() || users.devices > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if patient && left.is_zero() {
                patient = false;
                users.clients.values().for_each(|client| client.hang_up());
            }
            // What its devices still work on has to end before they can go.
            match patient {
                true => drop(self.quiet.wait_for(&mut users, left)),
                false => self.quiet.wait(&mut users),
            }
        }
        users.failure.take().map_or(Ok(()), Err)
    }
}

/// Why a client cannot have an export that it could choose a moment ago.
pub(super) const GONE: &str = "the export is not there any more";

/// A device of an export on one thread.
pub(super) struct ExportDevice<D> {
    pub(super) device: Disk<D>,
    /// Something was asked of it that a flush makes durable.
    pub(super) written: std::cell::Cell<bool>,
    /// Connections that use it.
    pub(super) users: std::cell::Cell<u32>,
    /// Declared after the device: who waits for the end of all devices must not find one.
    place: DevicePlace<D>,
}

impl<D> ExportDevice<D> {
    /// Its export.
    pub(super) fn entry(&self) -> &Arc<Entry<D>> {
        &self.place.0
    }
}

/// Counts a device as long as it is there.
struct DevicePlace<D>(Arc<Entry<D>>);

impl<D> Drop for DevicePlace<D> {
    fn drop(&mut self) {
        let mut users = self.0.users.lock();
        users.devices = users.devices.saturating_sub(1);
        drop(users);
        self.0.quiet.notify_all();
    }
}
