//! Options of a server.

use std::path::PathBuf;

use crate::serve::Log;
use crate::virtio::wire::{ID_BYTES, RING_MAX};

/// Longest name of a device in bytes.
const NAME_MAX: usize = 128;

/// How a server behaves.
#[derive(Clone)]
pub struct Options {
    /// Name of the device in `/dev/vduse` and on the vDPA bus.
    pub name: String,
    /// Rings, 1 to 256. A device that a killed server left keeps the number it has.
    pub queues: u16,
    /// Entries of a ring, a power of two from 4 to 1024.
    pub depth: u16,
    /// Threads that serve the rings, at least 1; there are no more than rings.
    pub threads: usize,
    /// The reactor each of them runs.
    pub reactor: gaur_reactor::Config,
    /// Writes are refused, whatever the device says.
    pub read_only: bool,
    /// The disk's serial number, at most 20 bytes.
    pub serial: String,
    /// Folder for the log of requests in flight. It should be in memory and must survive the server.
    pub state_folder: PathBuf,
    /// Where lines about the device go.
    pub log: Option<Log>,
}

impl Options {
    /// One ring of 256 entries on one thread, 16 MiB for requests in pieces, writable, state in
    /// `/dev/shm`.
    pub fn new(name: impl Into<String>) -> Options {
        Options {
            name: name.into(),
            queues: 1,
            depth: 256,
            threads: 1,
            reactor: gaur_reactor::Config::default(),
            read_only: false,
            serial: "gaur".to_owned(),
            state_folder: PathBuf::from("/dev/shm"),
            log: None,
        }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let name = &self.name;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(plain) {
            return Err(format!(
                "the name {name:?} is not 1 to {NAME_MAX} letters, digits, hyphens, dots and underlines"
            ));
        }
        if name == "control" || name.starts_with('.') {
            return Err(format!("the name {name:?} cannot be a device's"));
        }
        if self.queues == 0 || self.queues > 256 {
            return Err("the number of queues must be 1 to 256".to_owned());
        }
        if !self.depth.is_power_of_two() || self.depth < 4 || self.depth > RING_MAX {
            return Err(format!(
                "the depth of a queue must be a power of two from 4 to {RING_MAX}"
            ));
        }
        if self.threads == 0 {
            return Err("the number of threads must be 1 at least".to_owned());
        }
        if self.serial.len() > ID_BYTES {
            return Err(format!("the serial number is longer than {ID_BYTES} bytes"));
        }
        Ok(())
    }
}
