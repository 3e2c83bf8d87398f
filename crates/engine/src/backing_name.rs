//! Resolving the name of a backing file in a header.
//!
//! A name is relative to the directory of the image it stands in, as that image was named: symbolic
//! links and `..` are left to the host. A colon before the first slash makes it a protocol, which a
//! plain relative name with a colon avoids by starting with `./`. The rest of `file:`
//! is a path as it is: like QEMU, and unlike what one may expect, a relative one
//! counts from the working directory. To read it otherwise would be to read other data. `nbd:`, `s3:` and
//! their kin are left to the host whole, which opens them where references may lead there.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Why a name cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadName {
    /// There is no name.
    #[error("the name is empty")]
    Empty,
    /// The name contains a zero byte, which no path can.
    #[error("the name contains a zero byte")]
    ZeroByte,
    /// The name asks for a way to reach it that is not supported, `ssh` for example.
    #[error("protocol {0:?} is not supported; files, NBD and stores are")]
    Protocol(String),
    /// A relative name in an image that is no file of a directory.
    #[error("a relative name counts from the image's directory, and an NBD export is in none")]
    NoDirectory,
}

/// The path that `backing`, found in the header of the image opened as `overlay`, stands for. Both are
/// bytes that need not be text.
pub fn resolve(overlay: &Path, backing: &[u8]) -> Result<PathBuf, BadName> {
    if backing.is_empty() {
        return Err(BadName::Empty);
    }
    if backing.contains(&0) {
        return Err(BadName::ZeroByte);
    }
    let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
    match protocol(backing) {
        Some((b"file", b"")) => Err(BadName::Empty),
        Some((b"file", rest)) => Ok(path(rest)),
        Some((nbd, _)) if NBD.contains(&nbd) => Ok(path(backing)),
        Some(_) if gaur_block::is_remote(&path(backing)) => Ok(path(backing)),
        Some((other, _)) => {
            let name = String::from_utf8_lossy(other).into_owned();
            Err(BadName::Protocol(name))
        }
        None if backing.starts_with(b"/") => Ok(path(backing)),
        None if is_nbd(overlay) => Err(BadName::NoDirectory),
        None => {
            let directory = directory(overlay.as_os_str().as_bytes());
            Ok(path(&[directory, backing].concat()))
        }
    }
}

/// What names of NBD exports begin with.
const NBD: [&[u8]; 6] = [
    b"nbd",
    b"nbd+tcp",
    b"nbd+unix",
    b"nbds",
    b"nbds+tcp",
    b"nbds+unix",
];

/// Whether a name is of an NBD export, and no path.
pub(crate) fn is_nbd(name: &Path) -> bool {
    let found = protocol(name.as_os_str().as_bytes());
    found.is_some_and(|(protocol, _)| NBD.contains(&protocol))
}

/// Protocol and rest, if a colon comes before any slash.
fn protocol(name: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = name.iter().position(|byte| b":/".contains(byte))?;
    match name.split_at(at) {
        (before, [b':', rest @ ..]) => Some((before, rest)),
        _ => None,
    }
}

/// The directory of a path with its last slash; nothing for a bare name.
fn directory(path: &[u8]) -> &[u8] {
    let slash = path.iter().rposition(|byte| *byte == b'/');
    slash.map_or(b"", |slash| &path[..=slash])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(overlay: &str, backing: &str) -> String {
        let path = resolve(Path::new(overlay), backing.as_bytes()).unwrap();
        path.into_os_string().into_string().unwrap()
    }

    fn refused(backing: &[u8]) -> BadName {
        resolve(Path::new("dir/top"), backing).unwrap_err()
    }

    #[test]
    fn a_relative_name_counts_from_the_directory_of_the_overlay() {
        assert_eq!(path("top.qcow2", "base.qcow2"), "base.qcow2");
        assert_eq!(path("dir/top.qcow2", "base.qcow2"), "dir/base.qcow2");
        assert_eq!(path("/a/b/top", "c/base"), "/a/b/c/base");
        assert_eq!(path("/top", "base"), "/base");
        assert_eq!(path("a:b/top", "base"), "a:b/base");
    }

    #[test]
    fn parent_directories_are_left_to_the_host_because_links_may_be_in_the_way() {
        assert_eq!(path("a/top", "../base"), "a/../base");
        assert_eq!(path("top", "../../base"), "../../base");
        assert_eq!(path("a/top", "./base"), "a/./base");
    }

    #[test]
    fn an_absolute_name_stands_as_it_is() {
        assert_eq!(path("dir/top", "/images/base"), "/images/base");
        assert_eq!(path("dir/top", "/images/a:b"), "/images/a:b");
    }

    #[test]
    fn the_file_protocol_is_a_path_from_the_working_directory() {
        assert_eq!(path("dir/top", "file:/images/base"), "/images/base");
        assert_eq!(path("dir/top", "file:///images/base"), "///images/base");
        assert_eq!(path("dir/top", "file:base"), "base");
        assert_eq!(refused(b"file:"), BadName::Empty);
    }

    #[test]
    fn names_of_nbd_exports_are_left_as_they_are_and_have_no_directory() {
        for name in ["nbd://host/export", "nbd:host:1", "nbd+unix:///x?socket=/s"] {
            assert_eq!(path("dir/top", name), name);
            let relative = resolve(Path::new(name), b"base");
            assert_eq!(relative, Err(BadName::NoDirectory));
            assert_eq!(path(name, "/base"), "/base");
        }
    }

    #[test]
    fn names_in_stores_are_left_as_they_are_and_relative_ones_count_from_the_key() {
        assert_eq!(path("dir/top", "s3://bucket/base"), "s3://bucket/base");
        assert_eq!(path("s3://bucket/a/top", "base"), "s3://bucket/a/base");
        assert_eq!(path("s3://bucket/a/top", "https://h/b"), "https://h/b");
    }

    #[test]
    fn a_colon_before_the_first_slash_is_a_protocol_and_refused_by_name() {
        for (name, protocol) in [
            ("ssh://host/base", "ssh"),
            ("json:{\"driver\":\"qcow2\"}", "json"),
            ("FILE:/base", "FILE"),
            ("c:base", "c"),
            (":base", ""),
        ] {
            let expected = BadName::Protocol(protocol.to_owned());
            assert_eq!(refused(name.as_bytes()), expected);
        }
        assert_eq!(path("dir/top", "./c:base"), "dir/./c:base");
        assert_eq!(path("dir/top", "x/c:base"), "dir/x/c:base");
    }

    #[test]
    fn names_that_no_path_can_have_are_refused() {
        assert_eq!(refused(b""), BadName::Empty);
        assert_eq!(refused(b"ba\0se"), BadName::ZeroByte);
    }

    /// A user of a Latin-1 system had `m\xfcller.qcow2` under an overlay that QEMU opened and we did not.
    #[test]
    fn names_are_bytes_that_need_not_be_text() {
        let overlay = Path::new(OsStr::from_bytes(b"d\xff/top"));
        let found = resolve(overlay, b"m\xfcller.qcow2").unwrap();
        assert_eq!(found.as_os_str().as_bytes(), b"d\xff/m\xfcller.qcow2");
        let found = resolve(overlay, b"file:\xfc").unwrap();
        assert_eq!(found.as_os_str().as_bytes(), b"\xfc");
        assert_eq!(refused(b"\xfc:x"), BadName::Protocol("\u{fffd}".to_owned()));
    }

    #[test]
    fn the_longest_name_of_a_header_is_kept_whole() {
        let long = "x".repeat(1023);
        assert_eq!(path("dir/top", &long), format!("dir/{long}"));
    }

    #[test]
    fn an_unsupported_protocol_is_printed_so_that_it_cannot_break_the_line() {
        let error = refused(b"a\nb:c");
        assert_eq!(
            error.to_string(),
            r#"protocol "a\nb" is not supported; files, NBD and stores are"#
        );
    }
}
