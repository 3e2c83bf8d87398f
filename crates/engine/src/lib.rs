//! The qcow2 engine: shared image, one queue a thread, ordered metadata.

#![forbid(unsafe_code)]

mod align;
mod compress;
mod error;
mod options;
mod pool;
mod sector_locks;
#[cfg(test)]
mod test_file;

pub use error::{ErrorKind, ImageError};
#[cfg(feature = "broken-order")]
pub use options::BrokenRule;
pub use options::{Format, OpenOptions};
