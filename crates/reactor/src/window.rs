//! Part of a file that is used as a file of its own: the options `offset` and `size` of QEMU's driver `raw`.
//!
//! An offset in the window is translated once, before anything else is done with it. What lies before the window and,
//! if it has an end of its own, behind it is neither read nor written.

use gaur_block::{Errno, Extent, FileLimits, OpenError, Target};

use crate::open::{OpenFile, refused};
use crate::whole::Raw;

/// Which part of a file is used, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Where it begins.
    pub offset_bytes: u64,
    /// How long it is; `None` as far as the file goes, which it grows with.
    pub len_bytes: Option<u64>,
}

impl Window {
    /// Whether it fits a file of `file_len` bytes.
    pub(crate) fn check(self, file_len: u64, limits: FileLimits) -> Result<(), OpenError> {
        let bad = |text: String| Err(refused(Errno::EINVAL, text));
        let Window {
            offset_bytes,
            len_bytes,
        } = self;
        let end = offset_bytes.checked_add(len_bytes.unwrap_or(0));
        if end.is_none_or(|end| end > file_len) {
            let len = len_bytes.map_or(String::new(), |len| format!(" and size {len}"));
            return bad(format!(
                "offset {offset_bytes}{len} lie behind the end of the file, which has {file_len} bytes"
            ));
        }
        let unit = u64::from(limits.request_alignment);
        let ends = len_bytes.is_none_or(|len| len.is_multiple_of(unit)) || end == Some(file_len);
        match offset_bytes.is_multiple_of(unit) && ends {
            true => Ok(()),
            false => bad(format!(
                "offset and size are no multiples of the {unit} bytes in which the file is read and written"
            )),
        }
    }

    /// What may be done with it.
    pub(crate) fn limits(self, file: FileLimits) -> FileLimits {
        FileLimits {
            resizable: file.resizable && self.len_bytes.is_none(),
            ..file
        }
    }

    pub(crate) fn len(self, file_len: u64) -> u64 {
        let rest = file_len.saturating_sub(self.offset_bytes);
        self.len_bytes.unwrap_or(rest)
    }

    /// How much of a range is inside.
    fn inside(self, at: u64, len: u64) -> u64 {
        let rest = self.len_bytes.map(|whole| whole.saturating_sub(at));
        rest.map_or(len, |rest| rest.min(len))
    }

    /// Where in the file a place is that is not behind the end.
    fn place(self, at: u64) -> Result<u64, Errno> {
        at.checked_add(self.offset_bytes).ok_or(Errno::EINVAL)
    }

    pub(crate) fn extent(self, extent: Extent, at: u64) -> Extent {
        Extent {
            len: self.inside(at, extent.len).max(1),
            ..extent
        }
    }
}

impl OpenFile {
    /// Where in the file a range begins that is to be written: all of it is there.
    pub(crate) fn place(&self, at: u64, len: u64) -> Result<u64, Errno> {
        match self.window() {
            None => Ok(at),
            Some(window) if window.inside(at, len) == len => window.place(at),
            Some(_) => Err(Errno::ENOSPC),
        }
    }

    /// The same with a range that may go beyond the end, and what of it is there.
    pub(crate) fn place_of(&self, at: u64, len: u64) -> Result<(u64, u64), Errno> {
        match self.window() {
            None => Ok((at, len)),
            Some(window) => Ok((window.place(at)?, window.inside(at, len))),
        }
    }
}

/// Where in the file a read begins, and what of it is there. The rest, behind the window, is filled with zeros.
pub(crate) async fn place_read<'t, R: Raw>(
    raw: &R,
    at: u64,
    to: Target<'t>,
) -> Result<(u64, Target<'t>), Errno> {
    let len = to.len() as u64;
    let (place, there) = raw.file().place_of(at, len)?;
    if there == len {
        return Ok((place, to));
    }
    let there = usize::try_from(there).map_err(|_| Errno::EINVAL)?;
    match to {
        Target::Memory(memory) => {
            let (front, beyond) = memory.split_at(there);
            beyond.fill_zeros();
            Ok((place, Target::Memory(front)))
        }
        Target::Registered(mut front) => {
            let mut beyond = front;
            beyond.offset += there as u64;
            beyond.len -= there;
            raw.zero_registered(beyond).await?;
            front.len = there;
            Ok((place, Target::Registered(front)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(request_alignment: u32) -> FileLimits {
        FileLimits {
            request_alignment,
            memory_alignment: 1,
            max_transfer: 1 << 20,
            resizable: true,
            discard_zeroes: true,
            read_only: false,
        }
    }

    #[test]
    fn windows_lie_in_their_file_and_on_its_blocks() {
        let check = |offset_bytes, len_bytes, unit| {
            let window = Window {
                offset_bytes,
                len_bytes,
            };
            window.check(10_000, limits(unit)).is_ok()
        };
        assert!(check(10_000, None, 1) && check(10, Some(9_990), 1) && check(4096, None, 4096));
        assert!(!check(10_001, None, 1) && !check(10, Some(9_991), 1));
        assert!(!check(u64::MAX, Some(1), 1) && !check(0, Some(u64::MAX), 1));
        assert!(!check(10, None, 512) && !check(512, Some(1000), 512));
        // The last block of the file is not whole for any user of it.
        assert!(check(512, Some(9_488), 512));
    }

    #[test]
    fn a_window_with_an_end_keeps_its_length() {
        let open = Window {
            offset_bytes: 512,
            len_bytes: None,
        };
        let fixed = Window {
            len_bytes: Some(1024),
            ..open
        };
        assert_eq!((open.len(4096), fixed.len(4096)), (3584, 1024));
        assert!(open.limits(limits(1)).resizable && !fixed.limits(limits(1)).resizable);
        assert_eq!((fixed.inside(1000, 100), fixed.inside(2000, 1)), (24, 0));
    }
}
