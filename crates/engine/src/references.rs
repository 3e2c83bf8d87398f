//! Which files an image may have opened by naming them.
//!
//! The name of a backing file comes out of an image, which may be made by an attacker: `/etc/shadow`,
//! `../../other-tenant`, `/dev/fd/0`. What is opened is shown to the guest, so it is the caller who says how
//! far such names may lead. What the caller names is always opened.
//!
//! The places are fixed before the first file of a chain is read, and hold for the whole chain. A relative name counts
//! from the image that it stands in, but that image's own directory is no further place: so
//! an image gains nothing by pointing to a trusted one that points elsewhere.

use std::path::{Path, PathBuf};

use gaur_block::Within;

/// Which files the images of a chain may refer to, apart from the top one, which the caller names.
/// Protocols and `json:` are refused in any case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum References {
    /// None: for an image that stands alone, or of whose maker nothing is known.
    Nothing,
    /// Regular files in the directory of the top image, however deep.
    Beside,
    /// These too: regular files in these directories, and these files or block devices.
    Allowed(Vec<PathBuf>),
    /// Any file or block device that the process can read: for images that were made by who opens them.
    Any,
}

impl References {
    /// The places that the chain of the image at `path` may lead to.
    pub fn places(&self, path: &Path) -> Places {
        let beside = || directory(path);
        Places(match self {
            References::Nothing => Some(Vec::new()),
            References::Beside => Some(vec![beside()]),
            // The image's own comes first.
            References::Allowed(more) => Some([vec![beside()], more.clone()].concat()),
            References::Any => None,
        })
    }

    /// The same for an overlay over the image at `base`, which the caller has named.
    pub fn over(&self, base: &Path) -> References {
        let mut allowed = match self {
            References::Any => return References::Any,
            References::Nothing => return References::Allowed(vec![base.to_owned()]),
            References::Beside => Vec::new(),
            References::Allowed(allowed) => allowed.clone(),
        };
        allowed.extend([base.to_owned(), directory(base)]);
        References::Allowed(allowed)
    }
}

/// Where the files of one chain may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places(Option<Vec<PathBuf>>);

impl Places {
    /// The same for the host.
    pub fn within(&self) -> Within<'_> {
        match &self.0 {
            None => Within::Anywhere,
            Some(places) => Within::Places(places),
        }
    }

    /// The same without the directory of the top image; `None` where that changes nothing, or leaves nothing.
    pub(crate) fn allowed(&self) -> Option<Within<'_>> {
        match self.0.as_deref() {
            Some([_, allowed @ ..]) if !allowed.is_empty() => Some(Within::Places(allowed)),
            _ => None,
        }
    }

    /// What files need that were opened, some of them perhaps only for the directory of the top image.
    pub(crate) fn needed(&self, by_directory: bool) -> Needed {
        let places = self.0.as_deref();
        let split = places.map(|places| places.split_first());
        Needed {
            directory: split
                .flatten()
                .filter(|_| by_directory)
                .map(|(directory, _)| directory.clone()),
            allowed: places.map(|places| places.iter().skip(1).cloned().collect()),
        }
    }
}

/// What an image must let its chain refer to, so that certain files can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Needed {
    directory: Option<PathBuf>,
    allowed: Option<Vec<PathBuf>>,
}

impl Needed {
    /// Whether an image that lets its chain refer to `other` has what is needed.
    pub(crate) fn is_met_by(&self, other: &Needed) -> bool {
        let beside = self.directory.is_none() || self.directory == other.directory;
        beside && self.allowed == other.allowed
    }
}

/// The directory that holds the file; the working directory is the empty path.
fn directory(path: &Path) -> PathBuf {
    path.parent().unwrap_or(path).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(references: &References, path: &str) -> Option<Vec<PathBuf>> {
        references.places(Path::new(path)).0
    }

    #[test]
    fn places_are_the_directory_of_the_top_image_and_what_is_allowed() {
        let paths = |list: &[&str]| Some(list.iter().map(PathBuf::from).collect::<Vec<_>>());
        let allowed = References::Allowed(vec!["/bases".into()]);
        assert_eq!(places(&References::Nothing, "d/top"), paths(&[]));
        assert_eq!(places(&References::Beside, "d/top"), paths(&["d"]));
        assert_eq!(places(&References::Beside, "top"), paths(&[""]));
        assert_eq!(places(&allowed, "/d/top"), paths(&["/d", "/bases"]));
        assert_eq!(places(&References::Any, "top"), None);
    }

    #[test]
    fn an_overlay_adds_its_base_and_where_that_may_refer_to() {
        let paths = |list: &[&str]| References::Allowed(list.iter().map(PathBuf::from).collect());
        let base = Path::new("/d/base");
        assert_eq!(References::Nothing.over(base), paths(&["/d/base"]));
        assert_eq!(References::Beside.over(base), paths(&["/d/base", "/d"]));
        let allowed = paths(&["/bases"]).over(base);
        assert_eq!(allowed, paths(&["/bases", "/d/base", "/d"]));
        assert_eq!(References::Any.over(base), References::Any);
    }
}
