//! What the name of a backing file in a header means.
//!
//! A name is relative to the directory of the image it stands in, as that image was named: symbolic
//! links and `..` are left to the host. A colon before the first slash makes it a protocol, which a
//! plain relative name with a colon avoids by starting with `./`. The one protocol understood is
//! `file:`, whose rest is a path as it is: like QEMU, and unlike what one may expect, a relative one
//! counts from the working directory. To read it otherwise would be to read other data.

use std::fmt;

/// Why a name cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BadName {
    /// There is no name.
    Empty,
    /// The name contains a zero byte, which no path can.
    ZeroByte,
    /// The name is not UTF-8.
    NotUtf8,
    /// The name asks for a way to reach it that is not supported, `nbd` for example.
    Protocol(String),
}

impl fmt::Display for BadName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadName::Empty => out.write_str("the name is empty"),
            BadName::ZeroByte => out.write_str("the name contains a zero byte"),
            BadName::NotUtf8 => out.write_str("the name is not valid UTF-8"),
            BadName::Protocol(name) => {
                write!(out, "protocol {name:?} is not supported, only files are")
            }
        }
    }
}

impl std::error::Error for BadName {}

/// The path that `backing`, found in the header of the image opened as `overlay`, stands for.
pub(crate) fn resolve(overlay: &str, backing: &[u8]) -> Result<String, BadName> {
    let name = std::str::from_utf8(backing).map_err(|_| BadName::NotUtf8)?;
    if name.is_empty() {
        return Err(BadName::Empty);
    }
    if name.contains('\0') {
        return Err(BadName::ZeroByte);
    }
    match protocol(name) {
        Some(("file", "")) => Err(BadName::Empty),
        Some(("file", path)) => Ok(path.to_owned()),
        Some((other, _)) => Err(BadName::Protocol(other.to_owned())),
        None if name.starts_with('/') => Ok(name.to_owned()),
        None => Ok(format!("{}{name}", directory(overlay))),
    }
}

/// Protocol and rest, if a colon comes before any slash.
fn protocol(name: &str) -> Option<(&str, &str)> {
    name.split_once(':')
        .filter(|(before, _)| !before.contains('/'))
}

/// The directory of a path with its last slash; nothing for a bare name.
fn directory(path: &str) -> &str {
    path.rfind('/').map_or("", |slash| &path[..=slash])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(overlay: &str, backing: &str) -> String {
        resolve(overlay, backing.as_bytes()).unwrap()
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
        assert_eq!(resolve("top", b"file:"), Err(BadName::Empty));
    }

    #[test]
    fn a_colon_before_the_first_slash_is_a_protocol_and_refused_by_name() {
        for (name, protocol) in [
            ("nbd://host/export", "nbd"),
            ("http://host/base", "http"),
            ("json:{\"driver\":\"qcow2\"}", "json"),
            ("FILE:/base", "FILE"),
            ("c:base", "c"),
            (":base", ""),
        ] {
            let expected = Err(BadName::Protocol(protocol.to_owned()));
            assert_eq!(resolve("dir/top", name.as_bytes()), expected);
        }
        assert_eq!(path("dir/top", "./c:base"), "dir/./c:base");
        assert_eq!(path("dir/top", "x/c:base"), "dir/x/c:base");
    }

    #[test]
    fn names_that_no_path_can_have_are_refused() {
        assert_eq!(resolve("top", b""), Err(BadName::Empty));
        assert_eq!(resolve("top", b"ba\0se"), Err(BadName::ZeroByte));
        assert_eq!(resolve("top", b"ba\xffse"), Err(BadName::NotUtf8));
    }

    #[test]
    fn the_longest_name_of_a_header_is_kept_whole() {
        let long = "x".repeat(1023);
        assert_eq!(path("dir/top", &long), format!("dir/{long}"));
    }

    #[test]
    fn an_unsupported_protocol_is_printed_so_that_it_cannot_break_the_line() {
        let error = resolve("top", b"a\nb:c").unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"protocol "a\nb" is not supported, only files are"#
        );
    }
}
