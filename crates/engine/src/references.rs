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

use crate::backing_name;

/// Which files the images of a chain may refer to, apart from the top one, which the caller names. An NBD export or an
/// object in a store is a file that is in no directory. Other protocols and `json:` are refused in any case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum References {
    /// None: for an image that stands alone, or of whose maker nothing is known.
    Nothing,
    /// Regular files in the directory of the top image, however deep.
    Beside,
    /// These too: regular files in these directories, and these files, block devices or exports.
    Allowed(Vec<PathBuf>),
    /// Any file or block device that the process can read: for images that were made by who opens them.
    Any,
}

impl References {
    /// The places that the chain of the image at `path` may lead to.
    pub fn places(&self, path: &Path) -> Places {
        let own = directory(path);
        let (own, list) = match self {
            References::Nothing => (None, Some(Vec::new())),
            References::Beside => (own, Some(Vec::new())),
            References::Allowed(more) => (own, Some(more.clone())),
            References::Any => (own, None),
        };
        Places {
            own: usize::from(own.is_some() && list.is_some()),
            list: list.map(|list| own.into_iter().chain(list).collect()),
        }
    }

    /// The same for an overlay over the image at `base`, which the caller has named.
    pub fn over(&self, base: &Path) -> References {
        let mut allowed = match self {
            References::Any => return References::Any,
            References::Nothing => return References::Allowed(vec![base.to_owned()]),
            References::Beside => Vec::new(),
            References::Allowed(allowed) => allowed.clone(),
        };
        allowed.push(base.to_owned());
        allowed.extend(directory(base));
        References::Allowed(allowed)
    }
}

/// Where the files of one chain may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// `None` for anywhere.
    list: Option<Vec<PathBuf>>,
    /// How many of them are the image's own directory, which comes first: an NBD export has none.
    own: usize,
}

impl Places {
    /// The same for the host.
    pub fn within(&self) -> Within<'_> {
        match &self.list {
            None => Within::Anywhere,
            Some(places) => Within::Places(places),
        }
    }

    /// The same without the directory of the top image; `None` where that changes nothing, or leaves nothing.
    pub(crate) fn allowed(&self) -> Option<Within<'_>> {
        let (own, allowed) = self.list.as_deref()?.split_at_checked(self.own)?;
        (!own.is_empty() && !allowed.is_empty()).then_some(Within::Places(allowed))
    }

    /// What files need that were opened, some of them perhaps only for the directory of the top image.
    pub(crate) fn needed(&self, by_directory: bool) -> Needed {
        let places = self.list.as_deref();
        let split = places.and_then(|places| places.split_at_checked(self.own));
        Needed {
            directory: split
                .filter(|_| by_directory)
                .and_then(|(own, _)| own.first().cloned()),
            allowed: split.map(|(_, allowed)| allowed.to_vec()),
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

/// The directory that holds the file, if it is a file; the working directory is the empty path.
fn directory(path: &Path) -> Option<PathBuf> {
    (!backing_name::is_nbd(path)).then(|| path.parent().unwrap_or(path).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(references: &References, path: &str) -> Option<Vec<PathBuf>> {
        references.places(Path::new(path)).list
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
        let store = "s3://bucket/dir/top";
        assert_eq!(
            places(&References::Beside, store),
            paths(&["s3://bucket/dir"])
        );
        let nbd = "nbd://host/top";
        assert_eq!(places(&References::Beside, nbd), paths(&[]));
        assert_eq!(places(&allowed, nbd), paths(&["/bases"]));
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
        let nbd = Path::new("nbd://h/base");
        assert_eq!(References::Beside.over(nbd), paths(&["nbd://h/base"]));
    }
}
