//! Metadata in memory: mappings, reference counts, claims. Sync only: nothing here waits for input
//! or output, and no task that waits holds one of its locks.
//!
//! Lock order: [`claims`], then a part of the [`l2_cache`] or the [`l1_table`], then [`alloc`] or
//! [`zeroed`].

pub(crate) mod alloc;
pub(crate) mod area;
pub(crate) mod cache;
pub(crate) mod changed;
pub(crate) mod claims;
pub(crate) mod cluster_set;
pub(crate) mod epochs;
pub(crate) mod freed;
pub(crate) mod holes;
pub(crate) mod l1_table;
pub(crate) mod l2_cache;
pub(crate) mod l2_shard;
pub(crate) mod maps;
pub(crate) mod metadata_set;
pub(crate) mod packed;
pub(crate) mod slice_index;
pub(crate) mod tracker;
pub(crate) mod zeroed;
