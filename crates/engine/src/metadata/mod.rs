//! Metadata in memory: mappings, reference counts, claims. Sync only: nothing here waits for input
//! or output, and no lock is held by anybody who does.
//!
//! Lock order: [`claims`], then a part of the [`l2_cache`] or the [`l1_table`], then [`alloc`] or
//! [`fresh`].

pub(crate) mod alloc;
pub(crate) mod area;
pub(crate) mod cache;
pub(crate) mod claims;
pub(crate) mod cluster_set;
pub(crate) mod freed;
pub(crate) mod fresh;
pub(crate) mod grace;
pub(crate) mod holes;
pub(crate) mod l1_table;
pub(crate) mod l2_cache;
pub(crate) mod l2_shard;
pub(crate) mod maps;
pub(crate) mod metadata_set;
pub(crate) mod packed;
pub(crate) mod place_index;
pub(crate) mod tracker;
