//! What the file system is asked for when a file is made: hints, without which the image is the same.

use gaur_reactor::OpenFile;

use crate::failure::Failure;
use crate::notice::{is_qemu, say};
use crate::options::{OptionList, wrong_value};

/// What QEMU's programs ask for where nothing is said.
const QEMU_EXTENT_SIZE: u32 = 1 << 20;

/// Hints for a new file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileHints {
    nocow: Option<bool>,
    /// 0 for the file system's own; `None` where nothing is said.
    extent_size: Option<u32>,
}

impl FileHints {
    /// Takes them out of a list.
    pub fn take(options: &mut OptionList) -> Result<FileHints, Failure> {
        let nocow = options.take_bool("nocow")?;
        let extent_size = options.take_size("extent_size_hint")?.map(|bytes| {
            let size = u32::try_from(bytes).ok().filter(|size| size % 512 == 0);
            let allowed = "multiples of 512 below 4G";
            size.ok_or_else(|| wrong_value("extent_size_hint", &bytes.to_string(), allowed))
        });
        let extent_size = extent_size.transpose()?;
        Ok(FileHints { nocow, extent_size })
    }

    /// The value of `nocow`, as far as it was given.
    pub fn nocow(self) -> Option<bool> {
        self.nocow
    }

    /// The value of `extent_size_hint`, as far as it was given.
    pub fn extent_size(self) -> Option<u32> {
        self.extent_size
    }

    /// Asks for them. A file system that knows none of it is no reason to fail, and is told of.
    pub fn apply(self, file: &OpenFile, name: &str) {
        let tell = |what: &str, errno| say(format!("{name}: {what} is not set: {errno}"));
        if self.nocow == Some(true)
            && let Err(errno) = file.set_nocow()
            && !is_qemu()
        {
            tell("nocow", errno);
        }
        match self.extent_size {
            Some(0) => {}
            Some(size) => {
                if let Err(errno) = file.set_extent_size(size) {
                    tell("extent_size_hint", errno);
                }
            }
            // Most file systems have no such hint.
            None if is_qemu() => {
                let _ = file.set_extent_size(QEMU_EXTENT_SIZE);
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_read_and_wrong_sizes_are_refused() {
        let taken = |text: &str| FileHints::take(&mut OptionList::parse(&[text.to_owned()])?);
        let hints = taken("nocow=on,extent_size_hint=1M").expect("hints");
        let wanted = FileHints {
            nocow: Some(true),
            extent_size: Some(1 << 20),
        };
        assert_eq!(hints, wanted);
        assert_eq!(taken("size=1M").expect("none"), FileHints::default());
        for wrong in [
            "extent_size_hint=1000",
            "extent_size_hint=4G",
            "nocow=perhaps",
        ] {
            assert!(taken(wrong).is_err(), "{wrong}");
        }
    }
}
