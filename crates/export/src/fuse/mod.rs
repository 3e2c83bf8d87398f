//! Exports as a raw file at a path: the disk of an image for programs that know only files.
//!
//! A regular file that exists is covered by a mount of the kernel's FUSE; what is seen at its path
//! is the disk, until the export ends. [`proto`] is the kernel's protocol without input and output,
//! [`start`] serves a device with it.
//!
//! ```no_run
//! use gaur_export::Front;
//! use gaur_export::device::Memory;
//! use gaur_export::fuse::{self, Options};
//!
//! let disk = Memory::new(1 << 30);
//! let server = fuse::start(Options::new("/tmp/disk.raw"), move |_| Ok(disk.clone()))?;
//! server.stop();
//! Box::new(server).finish()?;
//! # Ok::<(), gaur_export::ServeError>(())
//! ```

pub mod proto;
mod server;

pub use server::{AllowOther, Options, Resize, start};
