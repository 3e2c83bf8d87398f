//! Metadata in memory: mappings, reference counts, claims. Sync only: nothing here waits for input
//! or output, and no lock is held by anybody who does.
//!
//! Lock order: [`claims`], then [`maps`], then [`alloc`] or [`fresh`].

pub(crate) mod alloc;
pub(crate) mod cache;
pub(crate) mod claims;
pub(crate) mod cluster_set;
pub(crate) mod fresh;
pub(crate) mod grace;
pub(crate) mod maps;
