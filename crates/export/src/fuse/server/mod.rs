//! The server: a mount ([`mount`], [`fusermount`]), the kernel's device ([`device`]), threads that serve
//! what it hands out ([`crew`], [`post`], [`execute`]), and a keeper of it all ([`keeper`]).
//!
//! Threads: each serving thread has a reactor, a queue of the disk and its own descriptor of the
//! kernel's device, so requests and their answers never change threads. What waits for something
//! that the serving threads may have to do themselves, unmounting and resizing, runs on the keeper's
//! thread. Nobody here opens or asks about the mounted file by its path: that would wait for
//! ourselves.

mod crew;
mod device;
mod execute;
mod file;
mod fusermount;

mod keeper;
mod mount;
mod mount_table;
mod options;
mod post;
mod slot;
mod start;

pub use options::{AllowOther, Log, Options, Resize};
pub use start::Server;
