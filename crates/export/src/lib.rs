//! Front ends that serve a [`gaur_block::Device`] to clients, one module and one feature each.
//!
//! A front end takes a function that makes devices: it is called on each of the threads on which
//! requests run, because a device belongs to one thread. All of them are queues of one image.

pub mod device;
mod error;
mod front;
#[cfg(feature = "fuse")]
pub mod fuse;
#[cfg(feature = "nbd")]
pub mod nbd;
mod serve;
#[cfg(feature = "ublk")]
pub mod ublk;
#[cfg(feature = "vduse")]
pub mod vduse;
#[cfg(feature = "vhost-user")]
pub mod vhost_user;
#[cfg(any(feature = "vhost-user", feature = "vduse"))]
#[cfg_attr(
    not(all(feature = "vhost-user", feature = "vduse")),
    allow(dead_code, reason = "each transport needs its own part")
)]
mod virtio;

pub use error::ServeError;
pub use front::Front;
pub use serve::{Log, Server};
