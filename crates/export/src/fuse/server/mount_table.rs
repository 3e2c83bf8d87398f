//! What is mounted where, as the kernel lists it for this process. Reading the list asks nothing of
//! the file systems in it, so one whose server hangs blocks no other.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// Source: `proc_pid_mountinfo(5)`.
const LIST: &str = "/proc/self/mountinfo";

/// Something that is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Names the mount as long as it is there.
    pub(super) id: u64,
    /// The device number of the file system.
    pub(super) device: (u32, u32),
    /// The kind of file system, with the part after the dot.
    pub(super) kind: String,
}

/// What is mounted at a path (of which the list has the real one), the last if there are several.
pub(super) fn at(path: &Path) -> Option<Entry> {
    let list = std::fs::read(LIST).ok()?;
    find(&list, path)
}

fn find(list: &[u8], path: &Path) -> Option<Entry> {
    let lines = list.split(|byte| *byte == b'\n');
    lines.rev().find_map(|line| entry(line, path))
}

/// The entry of a line, if it is about this path.
fn entry(line: &[u8], path: &Path) -> Option<Entry> {
    let mut words = line.split(|byte| *byte == b' ');
    let id = text(words.next()?)?.parse().ok()?;
    let (major, minor) = text(words.nth(1)?)?.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let place = unescape(words.nth(1)?);
    if place.as_bytes() != path.as_os_str().as_bytes() {
        return None;
    }
    words.find(|word| *word == b"-")?;
    let kind = text(words.next()?)?.to_owned();
    Some(Entry { id, device, kind })
}

fn text(word: &[u8]) -> Option<&str> {
    std::str::from_utf8(word).ok()
}

/// Blanks, line ends and backslashes are written as a backslash and three octal digits.
fn unescape(word: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, more)) = rest.split_first() {
        let digits = more.get(..3).filter(|_| *first == b'\\');
        let digits = digits.and_then(text);
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &more[3..];
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &[u8] = b"\
22 1 0:21 / /proc rw,nosuid - proc proc rw
98 22 0:50 / /tmp/a\\040b\\134c rw,nosuid shared:4 master:1 - fuse.gaur gaur rw,user_id=0
99 22 0:51 / /tmp/disk rw - fuse.other source rw
100 22 0:52 / /tmp/disk ro - fuse.gaur gaur ro
garbage
";

    fn entry(id: u64, minor: u32) -> Option<Entry> {
        let kind = "fuse.gaur".to_owned();
        let device = (0, minor);
        Some(Entry { id, device, kind })
    }

    #[test]
    fn the_last_mount_at_a_path_is_found() {
        assert_eq!(find(LIST, Path::new("/tmp/disk")), entry(100, 52));
        assert_eq!(find(LIST, Path::new("/tmp")), None);
    }

    #[test]
    fn paths_with_blanks_are_found() {
        assert_eq!(find(LIST, Path::new("/tmp/a b\\c")), entry(98, 50));
    }
}
