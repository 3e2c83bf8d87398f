//! The server: a mount ([`mount`], [`fusermount`]), the kernel's device ([`device`]), threads that serve
//! what it hands out ([`start`], [`reader`], [`execute`]), and a control thread ([`control`]).
//!
//! Threads: each serving thread has a reactor, a queue of the disk and its own descriptor of the
//! kernel's device, so requests and their answers never change threads. What waits for something
//! that the serving threads may have to do themselves, unmounting and resizing, runs on the control
//! thread. No thread of this process opens or asks about the mounted file by its path: that would wait for
//! ourselves.

mod control;
mod device;
mod execute;
mod file;
mod fusermount;
mod mount;
mod mount_table;
mod options;
mod reader;
mod request_buffer;
mod start;

pub use options::{AllowOther, Options, Resize};
pub use start::start;
