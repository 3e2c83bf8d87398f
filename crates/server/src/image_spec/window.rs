//! Options of QEMU's driver `raw`, by which an image is a part of its file.

use gaur_reactor::Window;

use super::{OptionReader, Overrides};
use crate::failure::Failure;

/// The unit of `size`.
const SECTOR_BYTES: u64 = 512;

impl OptionReader {
    /// The part of the file that is used, by the options of a raw image or of a driver `raw` between the format and the
    /// file: `driver=qcow2,file.driver=raw,file.offset=..`. Returns where the options of the file are, too, and those of
    /// the node between.
    pub(super) fn window(
        &mut self,
        driver: Option<&str>,
        below: &str,
    ) -> Result<(Option<Window>, String, Overrides), Failure> {
        let own = match driver {
            Some("raw") => self.window_at("")?,
            _ => None,
        };
        let between = format!("{below}driver");
        if below.is_empty() || self.keys.find(&between) != Some("raw") {
            return Ok((own, below.to_owned(), Overrides::default()));
        }
        self.keys.take(&between);
        let window = self.window_at(below)?;
        if own.is_some() && window.is_some() {
            let message = format!("options '{below}offset' and 'offset': a part of a part");
            return Err(Failure::new(message).hint("add the offsets up"));
        }
        let node = self.node(below)?;
        Ok((own.or(window), format!("{below}file."), node))
    }

    fn window_at(&mut self, level: &str) -> Result<Option<Window>, Failure> {
        let offset = self.keys.take_size(&format!("{level}offset"))?;
        let len_bytes = self.keys.take_size(&format!("{level}size"))?;
        if let Some(len) = len_bytes.filter(|len| !len.is_multiple_of(SECTOR_BYTES)) {
            let message = format!("option '{level}size': {len} is no multiple of {SECTOR_BYTES}");
            return Err(Failure::new(message));
        }
        let window = Window {
            offset_bytes: offset.unwrap_or(0),
            len_bytes,
        };
        Ok((offset.is_some() || len_bytes.is_some()).then_some(window))
    }
}
