//! What threads share state by: locks and atomics, of the standard library, or under `cfg(loom)` those of
//! the model checker; see `docs/testing.md`.

#[cfg(loom)]
pub(crate) use gaur_model::{atomic, loom::sync::Mutex};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, atomic};
