//! QEMU's drivers `null-co` and `null-aio`: zeros that are in no file. What is written to them is dropped.

use std::ffi::OsStr;

use gaur_engine::Format;

use super::{ImageSpec, OptionReader, Overrides};
use crate::failure::Failure;
use crate::open::Place;
use crate::size::SIZE_MAX;

/// What the image is called in messages, and by names.
const NAME: &str = "null-co://";
const OTHER_NAME: &str = "null-aio://";
/// Its size unless one is given, as in QEMU.
const SIZE_BYTES: u64 = 1 << 30;
/// The longest disk, in whole sectors.
const SIZE_BYTES_MAX: u64 = SIZE_MAX & !511;

/// The place that a name stands for, if it is one of these.
pub(super) fn place_of(name: &OsStr) -> Option<Place> {
    (name == NAME || name == OTHER_NAME).then_some(Place::Zeros(SIZE_BYTES))
}

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
