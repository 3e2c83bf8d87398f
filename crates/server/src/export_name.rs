//! Names: of exports after their images, and of images in JSON.

use std::ffi::OsStr;
use std::path::Path;

use crate::failure::Failure;

/// An image that is named to another process, in JSON.
pub fn as_text(file: &OsStr) -> Result<String, Failure> {
    file.to_str().map(str::to_owned).ok_or_else(|| {
        let message = "its path is not valid UTF-8, and it is told to the server in JSON";
        Failure::about(file, message).hint("a link by another name will do")
    })
}

/// A file's name without its extension.
pub fn stem(file: &str) -> String {
    let stem = Path::new(file).file_stem();
    stem.map_or_else(
        || "disk".to_owned(),
        |stem| stem.to_string_lossy().into_owned(),
    )
}
