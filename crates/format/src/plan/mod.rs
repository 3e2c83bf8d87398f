//! The plan of a new image: which bytes go where, and how large the image would be.
//!
//! Nothing is written here. [`create`] gives the bytes of every table; the caller writes them and keeps the
//! crash rule: all writes but the last, a flush, then the last one, which is the header. A power cut
//! before that leaves a file that is no image yet.

mod create;
mod layout;
mod measure;
mod options;

pub use create::{Plan, create};
pub use measure::{Measure, measure};
pub use options::{CreateOptions, LuksArea, Preallocation};
