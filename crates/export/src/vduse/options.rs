//! Options of a server.

use crate::serve::Log;
use crate::virtio::server::check;

/// Longest name of a device in bytes.
const NAME_MAX: usize = 128;

/// How a server behaves.
#[derive(Clone)]
pub struct Options {
    /// Name of the device in `/dev/vduse` and on the vDPA bus.
    pub name: String,
    /// Rings, 1 to 256. A device that a killed server left keeps the number it has.
    pub queues: u16,
    /// Threads that serve the rings, at least 1; there are no more than rings.
    pub threads: usize,
    /// Writes are refused, whatever the device says.
    pub read_only: bool,
    /// Where lines about the device go.
    pub log: Option<Log>,
}

impl Options {
    /// One ring on one thread, writable.
    pub fn new(name: impl Into<String>) -> Options {
        Options {
            name: name.into(),
            queues: 1,
            threads: 1,
            read_only: false,
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
        check(self.queues, self.threads)
    }
}
