//! Synchronisation primitives: locks and atomics, all taken from here.
//!
//! In an ordinary build these are the names of the standard library and of `parking_lot`. Under
//! `cfg(loom)` they are those of the model checker, so that `cargo xtask model` can run the code that
//! ships through every interleaving; see `docs/testing.md`.

#[cfg(not(loom))]
pub(crate) use futures_util::lock::Mutex as TaskMutex;
#[cfg(loom)]
pub(crate) use gaur_model::{Mutex, MutexGuard, OnceLock, RwLock, TaskMutex, atomic};
#[cfg(not(loom))]
pub(crate) use parking_lot::{Mutex, MutexGuard, RwLock};
#[cfg(not(loom))]
pub(crate) use std::sync::{OnceLock, atomic};
