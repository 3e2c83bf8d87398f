//! The image as a raw file.

use std::path::PathBuf;
use std::sync::Arc;

use gaur_export::{Front, ServeError, fuse};
use serde::{Deserialize, Serialize};

use crate::exporter::Served;

/// Threads that a file gets at most; it has no more than there are processors.
const THREADS_MAX: u16 = 4;
/// A qcow2 image has whole sectors of this many bytes.
const SECTOR_BYTES: u64 = 512;

/// What a file is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// A regular file, in whose place the image appears.
    pub path: PathBuf,
    /// Writes beyond the end make the image larger.
    #[serde(default)]
    pub growable: bool,
}

/// Starts to export `image`.
pub fn start(config: &Config, image: Arc<Served>) -> Result<Box<dyn Front>, ServeError> {
    let mut options = fuse::Options::new(&config.path);
    options.threads = super::threads_for(THREADS_MAX);
    options.read_only = image.read_only;
    options.log = image.log.clone();
    if config.growable {
        let image = Arc::clone(&image);
        options.resize = Some(Arc::new(move |size_bytes| resize(&image, size_bytes)));
    }
    Ok(Box::new(fuse::start(options, move |_| Ok(image.device()))?))
}

/// Makes the image so long, rounded up to what its format can have. Like any file it loses what lies
/// beyond a smaller size.
fn resize(image: &Served, size_bytes: u64) -> Result<(), String> {
    let size_bytes = match image.is_raw() {
        true => size_bytes,
        false => size_bytes
            .checked_next_multiple_of(SECTOR_BYTES)
            .ok_or("it is too large")?,
    };
    let shrinks = size_bytes < image.size_bytes();
    if shrinks && image.is_flat() {
        return Err(image.refuses_to_shrink());
    }
    let guest = image.shared().guest();
    let resized = guest.resize(size_bytes, shrinks, &image.resizing);
    resized.map_err(|error| error.to_string())
}
