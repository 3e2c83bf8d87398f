//! A simulated host: disks with volatile and durable sectors, a seeded scheduler, faults.
//!
//! Everything that is chance on a real machine comes from one seed here: which task runs next, which
//! transfer ends first, which unflushed sectors a power cut spares, which request fails. There are
//! no threads and no clock of the system, so the same seed gives the same run, and the hash of the
//! trace says whether it did.
//!
//! * [`Scheduler`] runs tasks and completes I/O in an order of its own choosing.
//! * [`SimHost`] opens [`SimFile`]s, which implement [`gaur_block::File`].
//! * [`SimHost::crash_images`] says what the files may hold after a power cut at this moment;
//!   [`SimHost::from_images`] starts again from there.

#![forbid(unsafe_code)]

mod buffer;
mod crash;
mod disk;
mod fault;
mod file;
mod host;
mod image;
mod operation;
mod random;
mod rotating;
mod scheduler;
mod trace;

pub use buffer::SimBuffer;
pub use crash::Survivors;
pub use fault::{FaultKind, Faults};
pub use file::SimFile;
pub use host::{DiskProfile, SimHost};
pub use image::FileImage;
pub use random::Random;
pub use rotating::Rotating;
pub use scheduler::{Deadlock, Handle, Scheduler, Stop};
pub use trace::Trace;

/// The unit in which a disk keeps or loses what was written, in bytes.
pub const SECTOR_BYTES: u64 = 512;
