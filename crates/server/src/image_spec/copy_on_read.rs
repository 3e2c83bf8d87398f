//! QEMU's filter `copy-on-read`: the image below it, with an option.

use super::{OptionReader, Overrides};
use crate::failure::Failure;

impl OptionReader {
    /// If the options name the filter, what they say of it; those of what lies below it are left.
    pub(super) fn copy_on_read(&mut self) -> Result<Overrides, Failure> {
        const DRIVER: &str = "copy-on-read";
        if self.keys.find("driver") != Some(DRIVER) {
            return Ok(Overrides::default());
        }
        self.keys.take("driver");
        let node = self.node("")?;
        let below = "file.";
        if let Some(key) = self.keys.find_key(|key| !key.starts_with(below)) {
            let message = format!("option '{key}' is unknown (driver {DRIVER})");
            return Err(Failure::new(message));
        }
        self.keys.descend(below);
        let protocols = ["file", "host_device", "nbd"];
        let is_format = !self
            .keys
            .find("driver")
            .is_some_and(|name| protocols.contains(&name));
        if is_format && let Some(name) = self.keys.take("filename") {
            self.keys.add("file.filename", name);
        }
        Ok(Overrides {
            copy_on_read: Some(true),
            ..node
        })
    }
}
