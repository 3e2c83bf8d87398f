//! The qcow2 on-disk format: bytes to types and back, without input or output.
//!
//! Every structure of an image is here as a type with a parser and an encoder; [`check`] and
//! [`plan`] are the two larger machines built from them, and they too only ask for bytes and hand
//! out bytes. Nothing in this crate reads a file, knows a clock or starts a thread.
//!
//! Invariants, for all modules:
//!
//! * Every byte of an image is hostile. A parser checks an offset, count or length against [`limit`]
//!   before arithmetic uses it; no input panics, and none allocates more than the limits say.
//! * A type that exists is legal: what a parser returns needs no second check by its user.
//! * Numbers on disk are big endian. Offsets and lengths are bytes unless the name says otherwise.
//! * Unknown header fields and extensions survive a parse and an encode byte for byte.
//!
//! The source for all of it is QEMU's `docs/interop/qcow2` specification. `docs/format.md` draws the
//! structures and lists where QEMU and the specification differ, and what this crate does there.

#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects
    )
)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod addr;
pub mod allocation;
pub mod bitmap;
mod bytes;
pub mod check;
pub mod compressed;
pub mod error;
pub mod extension;
pub mod feature;
pub mod geometry;
pub mod header;
pub mod l1;
pub mod l2;
pub mod limit;
pub mod plan;
pub mod probe;
pub mod refcount;
pub mod snapshot;

pub use addr::{ClusterIndex, GuestOffset, HostOffset};
pub use allocation::AllocationPolicy;
pub use compressed::CompressedDescriptor;
pub use error::{Corruption, CorruptionKind, Error, ErrorKind};
pub use geometry::{Geometry, Version};
pub use header::Header;
pub use l1::L1Ref;
pub use l2::L2Entry;
pub use probe::ImageFormat;
