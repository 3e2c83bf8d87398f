//! The narrow waist between the engine, its hosts and its exports.
//!
//! Two traits and the values that cross them. [`File`] is the host side: what the engine needs of
//! whatever holds its bytes. [`Device`] is the guest side: what an export needs of whatever serves
//! its requests. Both are one value per queue, and a queue belongs to one thread, so neither is
//! `Send`. Nothing here does input or output, allocates, or knows a runtime.

#![deny(unsafe_code)]

mod device;
mod errno;
mod file;
mod payload;
mod remote;
#[allow(
    unsafe_code,
    reason = "memory that others change is read and written by raw pointers"
)]
mod segments;
mod within;

pub use device::{Device, DeviceLimits, Request, Status};
pub use errno::Errno;
pub use file::{Access, Extent, File, FileId, FileLimits, Host, OpenError};
pub use payload::{Payload, Registered, Source, Target};
pub use remote::{REMOTE_PROTOCOLS, is_remote};
pub use segments::{Segment, Segments, SegmentsMut};
pub use within::Within;
