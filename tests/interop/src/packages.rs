//! Packages of the distribution, unpacked and not installed: programs of theirs that need nothing else.

use std::path::PathBuf;

use crate::guest::{artifact, release};

/// The folder with the files of a package, fetched on first use from the mirror that this machine has its packages from.
#[track_caller]
pub fn unpacked(package: &str) -> PathBuf {
    let fetch = format!("apt-get download -q {package} >&2\ndpkg-deb -x ./*.deb \"$1\"");
    artifact(&format!("package-{package}-{}", release()), &fetch)
}
