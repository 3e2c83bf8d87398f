//! What threads share state by: locks of `parking_lot` and atomics of the standard library, or under
//! `cfg(loom)` those of the model checker; see `docs/testing.md`.

#[cfg(loom)]
pub(crate) use gaur_model::{Mutex, atomic};
#[cfg(not(loom))]
pub(crate) use {parking_lot::Mutex, std::sync::atomic};
