//! Hosts for the engine: io_uring and blocking system calls.
//!
//! A file is opened once ([`OpenFile`], with the locks QEMU uses) and then used in either of two
//! ways: [`BlockingFile`] on any thread, or `ReactorFile` on a thread that runs a reactor.

mod blocking;
mod context;
mod lock;
mod memory;
mod open;
mod syscall;
mod whole;

pub use blocking::{BlockingFile, BlockingHost, block_on};
pub use context::has_reactor;
pub use memory::Buffer;
pub use open::{CreateFile, OpenFile};
