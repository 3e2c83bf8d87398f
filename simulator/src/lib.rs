//! The crash simulator: seeded workloads, power cuts, oracles.
//!
//! A seed decides everything: the shape of an image and its past, the disk it lies on, the requests
//! of several queues, the order in which the host completes them, when the power goes and what it
//! leaves. [`run_seed`] plays one through: load, crash, judge, reopen, several times over.
//!
//! Three judges look at what a power cut leaves: the checker of `gaur-format` (nothing worse than
//! leaks), a [reader of its own](view) whose answers the [model] allows or not, and the engine
//! itself, which must open the image and read the same. For a sample of images QEMU's tools are
//! asked too. How it works and what it has found is in `docs/testing.md`.

#![forbid(unsafe_code)]

mod bitmaps;
pub mod config;
pub mod content;
pub mod data_file;
pub mod encryption;
pub mod extension;
mod handover;
pub mod judge;
pub mod load;
mod machine;
#[cfg(feature = "broken-order")]
mod mixed;
pub mod model;
pub mod prepare;
pub mod qemu;
mod reopen;
mod run;
pub mod shape;
mod stats;
#[cfg(feature = "broken-order")]
pub mod verbs;
pub mod view;
mod watch;

#[cfg(feature = "broken-order")]
pub use mixed::run_mixed;
pub use run::{Failure, Options, Rule, run_seed};
pub use stats::Stats;
