//! What a stream into an image that is served has done, in JSON.

use serde::{Deserialize, Serialize};

/// A stream of what lies below an image into it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct StreamFacts {
    /// The image.
    pub filename: String,
    /// Bytes of the disk that it holds since.
    pub copied_bytes: u64,
}

impl StreamFacts {
    /// Of the image called `filename`.
    pub fn new(filename: &str, copied_bytes: u64) -> StreamFacts {
        StreamFacts {
            filename: filename.to_owned(),
            copied_bytes,
        }
    }
}
