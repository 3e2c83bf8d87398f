//! Layers of images in object stores and on web servers, read by ranges, and the cache that keeps what was read.
//!
//! [`install`] has names like `s3://bucket/key` and `https://host/disk.qcow2` opened wherever this process opens a file
//! for reading. What a name leads to is fetched in chunks of [`CHUNK_BYTES`] and kept in one folder of the
//! machine, which all processes of a user share; a chunk that is there and was verified is read by the host like any
//! file's bytes, without a word to this crate's threads.
//!
//! ```text
//! name.rs      names: what is one, what lies below another
//! store.rs     what answers them: object_store, a web server (web.rs), a registry of containers (oci.rs)
//! attempt.rs   one request, tried until it works or time is up
//! cache.rs     the folder; cache/entry.rs one object in it; cache/evict.rs what makes room
//! layer.rs     the file: who asks for a chunk, and who waits for it
//! published/   images as objects of their own: a manifest, and chunks by content
//! ahead.rs     which chunks will be wanted next
//! ```
//!
//! An object is taken to be immutable. That it is still the same is asked with each request (its ETag); when it is not,
//! reads fail, and nothing of two versions is mixed.

#![forbid(unsafe_code)]

mod ahead;
mod attempt;
mod cache;
mod layer;
mod name;
mod oci;
mod opener;
mod profile;
pub mod published;
mod runtime;
mod settings;
mod store;
mod web;

pub use opener::install;
pub use settings::Settings;

/// Bytes of a chunk: what is fetched, kept and verified as one.
pub const CHUNK_BYTES: u64 = 256 << 10;
