//! Published images: a disk as objects of a store, a manifest and chunks that are named by their content.
//!
//! The format is in `docs/published.md`. Chunks are immutable, shared by all images of a folder, and found right by their
//! digest whenever they are read; the manifest is put last, so that what it names is there.
//!
//! ```text
//! manifest.rs  the manifest: reading it piece by piece, writing it
//! chunk.rs     a chunk: its digest, its object's name, packing
//! place.rs     where the objects of an image are
//! image.rs     a published image, for reading
//! publisher.rs what puts one there
//! collector.rs what removes chunks that no image names
//! ```

mod chunk;
mod collector;
mod image;
mod manifest;
mod place;
mod publisher;

pub use chunk::{Digest, Stored};
pub use collector::{Garbage, collect};
pub use image::PublishedImage;
pub use manifest::{Builder, Manifest, Parent};
pub(crate) use place::Place;
pub use place::SUFFIX;
pub use publisher::{Counts, Outcome, Publisher};

/// Bytes of the guest's disk in a chunk: as many as the cache of layers keeps and verifies as one.
pub const CHUNK_BYTES: u64 = crate::CHUNK_BYTES;
