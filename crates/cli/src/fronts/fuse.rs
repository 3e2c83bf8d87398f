//! The image as a raw file.

use std::path::PathBuf;
use std::sync::Arc;

use gaur_export::Front;
use serde::{Deserialize, Serialize};

use crate::exporter::Served;
use crate::failure::Failure;

/// What a file is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Request {
    /// A regular file, in whose place the image appears.
    pub path: PathBuf,
    /// Writes beyond the end make the image larger.
    #[serde(default)]
    pub growable: bool,
}

/// Starts to export `image`.
pub fn start(_request: &Request, image: Arc<Served>) -> Result<Box<dyn Front>, Failure> {
    Err(super::not_built(image.name(), "fuse"))
}
