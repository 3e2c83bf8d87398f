//! Locks and atomics as the model checker loom knows them, with the interfaces of the real ones, and
//! what runs a model.
//!
//! The engine and the reactor take theirs from here when they are built with `--cfg loom`, so that
//! `cargo xtask model` can run the code that ships through every interleaving. In an ordinary build
//! this crate is empty, and no crate depends on it. See `docs/testing.md`.

#![cfg(loom)]
#![forbid(unsafe_code)]

pub mod atomic;
mod check;
mod lock;
mod task_mutex;

pub use check::{Strength, block_on, check, check_fully, check_weakened};
pub use lock::{Mutex, MutexGuard, OnceLock, RwLock};
pub use loom;
pub use loom::thread;
pub use task_mutex::{TaskMutex, TaskMutexGuard};
