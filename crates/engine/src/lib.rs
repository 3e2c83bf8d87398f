//! The qcow2 engine: shared image, one queue a thread, ordered metadata.

#![forbid(unsafe_code)]

mod error;
mod options;

pub use error::{ErrorKind, ImageError};
#[cfg(feature = "broken-order")]
pub use options::BrokenRule;
pub use options::{Format, OpenOptions};
