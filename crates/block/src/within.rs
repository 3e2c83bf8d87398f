//! Where a file may lie that an image names, and not the user.

use std::path::{Component, Path, PathBuf};

use crate::{Errno, OpenError};

/// The bounds of a reference: which files may be opened by a name that comes out of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Within<'a> {
    /// Any file or device: it is the user who names it.
    ByUser,
    /// Any file or device, by the word of an image that may refer to all.
    Anywhere,
    /// Regular files in these directories, however deep, and these files themselves, which may be
    /// devices. Neither a link nor `..` leads out of a directory, and files that the kernel makes up
    /// (`/proc`) are not in any. The empty path is the working directory.
    Places(&'a [PathBuf]),
}

impl Within<'_> {
    /// Whether a name is within by its letters alone: for hosts whose files have no links.
    pub fn admits(self, name: &Path) -> bool {
        let Within::Places(places) = self else {
            return true;
        };
        let name = without_dots(name);
        places.iter().any(|place| {
            let place = without_dots(place);
            let rest = name.strip_prefix(&place);
            place.has_root() == name.has_root() && rest.is_ok_and(|rest| !rest.starts_with(".."))
        })
    }

    /// The error of a file that is not within.
    pub fn refused(self) -> OpenError {
        let reason = match self {
            Within::Places([]) => "the image may not refer to other files",
            _ => "it is outside of the image's directory, and not allowed",
        };
        OpenError {
            errno: Errno::EXDEV,
            reason: reason.to_owned(),
        }
    }
}

/// The same path without `.` and without `..` behind a name.
fn without_dots(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir if plain.file_name().is_some() => {
                plain.pop();
            }
            Component::ParentDir if plain.has_root() => {}
            other => plain.push(other),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(places: &[&str], name: &str) -> bool {
        let places: Vec<PathBuf> = places.iter().map(PathBuf::from).collect();
        Within::Places(&places).admits(Path::new(name))
    }

    #[test]
    fn a_name_is_within_its_directories_and_no_others() {
        for inside in ["d/a", "d/./a", "d/e/../a", "d/e/f", "x/../d/a"] {
            assert!(admits(&["d/"], inside), "{inside}");
        }
        for outside in ["a", "d/../a", "d/../../d/a", "/d/a", "../d/a", "dd/a"] {
            assert!(!admits(&["d/"], outside), "{outside}");
        }
        assert!(admits(&["d", "/bases"], "/bases/a"));
        assert!(!admits(&["d", "/bases"], "/bases/../a"));
        assert!(admits(&["/dev/sdb"], "/dev/sdb") && !admits(&["/dev/sdb"], "/dev/sda"));
    }

    #[test]
    fn working_directory_admits_neither_absolute_names_nor_its_parent() {
        assert!(admits(&[""], "a") && admits(&[""], "./e/a"));
        assert!(!admits(&[""], "/a") && !admits(&[""], "../a") && !admits(&[""], "e/../../a"));
        assert!(admits(&["../images/"], "../images/a") && !admits(&["../images/"], "../a"));
    }

    #[test]
    fn no_places_admit_nothing_and_anywhere_admits_all() {
        assert!(!admits(&[], "a"));
        assert!(Within::Anywhere.admits(Path::new("/etc/passwd")));
    }
}
