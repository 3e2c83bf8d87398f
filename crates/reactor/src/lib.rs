//! Hosts for the engine: io_uring and blocking system calls.
//!
//! A file is opened once ([`OpenFile`], with the locks QEMU uses) and then used in either of two
//! ways: [`BlockingFile`] on any thread, or [`ReactorFile`] on a thread that runs a [`Reactor`].
//!
//! A reactor drives the tasks of its thread. It waits in an io_uring, and where that is not allowed
//! in `poll(2)`; [`Stream`], [`sleep`] and the rest work with either, and on a thread without a
//! reactor they block. [`Threads`] runs a reactor on each of several threads, and a [`Handle`] sends
//! work to one of them. Nothing moves between threads by itself.
//!
//! Rules: a future with an operation in flight may be dropped, which waits for the kernel to let go
//! of its memory, but must not be leaked. After warm-up the transfers of files and streams allocate
//! nothing; spawning does.

mod address;
mod blocking;
mod command;
mod context;
mod descriptor;
#[cfg_attr(loom, path = "event_modelled.rs")]
mod event;
mod file;
mod inbox;
mod iovecs;
pub mod local;
mod lock;
mod machine;
mod memory;
pub mod nbd;
mod nbd_device;
mod op;
mod open;
mod page_cache;
pub mod pin;
mod race;
mod reactor;
mod readiness;
pub mod remote;
mod ring;
mod secure;
mod shared_words;
mod signal;
mod socket;
mod stop;
mod sync;
mod syscall;
mod task;
mod threads;
mod timer;
mod trim;
mod whole;
mod window;
mod within;

pub use address::{Address, SOCKET_PATH_MAX};
pub use blocking::{BlockingFile, BlockingHost, block_on};
pub use command::command;
pub use context::has_reactor;
pub use descriptor::Descriptor;
pub use file::{ReactorFile, ReactorHost, ThreadFile};
pub use machine::{RandomBytes, processor_time};
pub use memory::Buffer;
pub use nbd_device::{NbdDevice, NbdGeometry};
pub use open::{CreateFile, OpenFile};
pub use race::{Either, race, timeout, yield_now};
pub use reactor::{Config, Driver, Handle, Reactor, buffer, spawn};
pub use secure::SecureStream;
pub use shared_words::SharedWords;
pub use signal::{Signal, Signals, ignore_file_size_signal};
pub use socket::{Listener, Stream};
pub use stop::Stop;
pub use task::JoinHandle;
pub use threads::{Threads, ThreadsConfig};
pub use timer::sleep;
pub use trim::{freed_memory, keep_trimmed, trim_heap, trim_memory};
pub use window::Window;

/// io_uring on this machine.
pub mod uring {
    pub use crate::ring::{EXPORT_BUFFER_FIRST, EXPORT_BUFFERS, Unavailable, available};
}
