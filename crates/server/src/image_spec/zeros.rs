//! QEMU's driver `null-co`: zeros that are in no file. Here they can only be read.

use std::ffi::OsStr;

use gaur_engine::Format;

use super::{ImageSpec, OptionReader, Overrides};
use crate::failure::Failure;
use crate::open::Place;
use crate::size::SIZE_MAX;

/// What the image is called in messages.
const NAME: &str = "null-co://";
/// Its size unless one is given, as in QEMU.
const SIZE_BYTES: u64 = 1 << 30;
/// The longest disk, in whole sectors.
const SIZE_BYTES_MAX: u64 = SIZE_MAX & !511;

impl OptionReader {
    pub(super) fn zeros(mut self, given: &OsStr) -> Result<ImageSpec, Failure> {
        let size = self.keys.take_size("size")?.unwrap_or(SIZE_BYTES);
        if size > SIZE_BYTES_MAX {
            return Err(Failure::new(format!("option 'size': {size} is too much")));
        }
        // What is read are zeros in either case, and no time passes.
        self.keys.take_bool("read-zeroes")?;
        self.keys.take_number("latency-ns")?;
        let node = self.node("")?;
        self.check_all_taken("null-co")?;
        let mut changes = Overrides::default();
        changes.merge(&node, &node.clone());
        Ok(ImageSpec {
            given: given.to_owned(),
            shown: NAME.to_owned(),
            path: NAME.into(),
            format: Some(Format::Raw),
            switch: None,
            place: Some(Place::Zeros(size)),
            protocol: true,
            changes,
        })
    }
}
