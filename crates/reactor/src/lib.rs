//! Hosts for the engine: io_uring and blocking system calls.
//!
//! A file is opened once ([`OpenFile`], with the locks QEMU uses) and then used in either of two
//! ways: [`BlockingFile`] on any thread, or [`ReactorFile`] on a thread that runs a reactor.

mod blocking;
mod context;
mod file;
mod inbox;
mod lock;
mod memory;
mod op;
mod open;
mod reactor;
mod readiness;
mod ring;
mod syscall;
mod task;
mod timer;
mod whole;

pub use blocking::{BlockingFile, BlockingHost, block_on};
pub use context::has_reactor;
pub use file::{ReactorFile, ReactorHost};
pub use memory::Buffer;
pub use open::{CreateFile, OpenFile};
pub use reactor::{Config, Driver, Handle, Reactor, buffer, spawn};
pub use task::JoinHandle;
pub use timer::sleep;

/// io_uring on this machine.
pub mod uring {
    pub use crate::ring::{Unavailable, available};
}
