//! What tests and benchmarks fetch or build once: kernels, a root file system, programs of peers.
//!
//! An artifact is a file or a folder with a name in the cache. It is made under a lock, beside the
//! finished ones, and gets its name with one rename: what has a name is whole, whatever happened to the
//! process that made it, and of several processes that want it at once one makes it and the others
//! wait. The cache is one folder on one file system, `~/.cache/gaur` unless `GAUR_CACHE` names another:
//!
//! ```text
//! NAME          a finished artifact
//! making/NAME   where the holder of the lock makes it
//! locks/NAME    the lock, an empty file
//! ```

#![forbid(unsafe_code)]

mod cache;
mod files;

pub use cache::{BuildLock, Cache};
pub use files::{entries, failed, make_folder, remove, write};
