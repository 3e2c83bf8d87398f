//! Gaur is a qcow2 storage engine. This is its library: disks that several threads use at once, on io_uring,
//! with crash safety that is tested.
//!
//! ```no_run
//! use gaur::{CreateOptions, Disk, OpenOptions, References};
//!
//! # fn main() -> gaur::Result<()> {
//! let create = CreateOptions::new(10 << 30);
//! Disk::create("disk.qcow2", &create)?;
//! let disk = Disk::open("disk.qcow2", &OpenOptions::new(References::Beside))?;
//! let queue = disk.blocking();
//! queue.write_at(4096, b"hello")?;
//! queue.flush()?;
//! drop(queue);
//! disk.close()
//! # }
//! ```
//!
//! An image whose data is encrypted (LUKS 1, as QEMU has it) is made with a passphrase, and opened with it:
//!
//! ```no_run
//! use gaur::{CreateOptions, Disk, Keys, OpenOptions, Passphrase, References};
//!
//! # fn main() -> gaur::Result<()> {
//! let passphrase = Passphrase::new(b"correct horse battery staple".to_vec());
//! let create = CreateOptions {
//!     passphrase: Some(passphrase.clone()),
//!     ..CreateOptions::new(10 << 30)
//! };
//! Disk::create("secret.qcow2", &create)?;
//! let mut options = OpenOptions::new(References::Beside);
//! options.keys.for_others(passphrase);
//! Disk::open("secret.qcow2", &options)?.close()
//! # }
//! ```
//!
//! [`Keys`] has a passphrase for each layer of a chain that wants one of its own.
//!
//! # Which queue
//!
//! A [`Disk`] is shared by all threads; requests go through queues, which are not. Pick the one that suits
//! the threads that you have:
//!
//! | you have | take | its calls |
//! |---|---|---|
//! | threads that may block | [`Disk::blocking`], a queue for each | return when done |
//! | threads that do nothing but this disk | [`Disk::queue`] and [`Reactor::block_on`] | are futures of the thread |
//! | an event loop of your own (`epoll`) | [`Disk::queue`], the reactor's descriptor and [`Reactor::turn`] | are futures of the thread |
//! | tokio or another executor | [`Disk::start`] | are `Send` futures |
//!
//! `examples/` of this crate has a program for each, one with a queue for each vCPU's thread, one that
//! saves the state of a machine in a snapshot, and a vhost-user-blk back end.
//!
//! # Lifecycle
//!
//! ```text
//! Disk::create ──▶ (a file)
//!                     │
//! Disk::open ─────────┴──▶ Disk ──┬── blocking() ──▶ BlockingQueue   one for each thread, Send
//!   locks the image                ├── queue() ─────▶ Queue           on this thread's Reactor
//!                                  └── start() ─────▶ AsyncQueue      threads of its own, Send + Sync
//!                                                         │
//!                      read_at  write_at  zero  discard   │   any number at once, in no order
//!                      status   grow  snapshots  state    │
//!                                flush ───────────────────┤   what was complete before is durable now
//!                                                         │
//!                                  drop(queue) ◀──────────┘   futures first; AsyncQueue::close().await
//!                                       │
//! Disk::close ◀──── all queues gone ────┘   all is durable, unused space given back, locks released
//! ```
//!
//! A disk that is dropped is closed by the last of its queues. A process that is killed, or a power cut,
//! leaves an image that needs no repair and has everything that was flushed; at worst some clusters have
//! leaked.
//!
//! When a flush fails, or metadata may be half written, the disk takes no more writes: each fails with the
//! first error until the image is opened again. Reads go on.
//!
//! # Memory and threads
//!
//! No request allocates once a queue is warm, except on an [`AsyncQueue`], where a request is a box and
//! has a channel for its answer. Everything is bounded: metadata by [`OpenOptions::cache`], the pool of a
//! reactor by its [`ReactorConfig`], requests under way on an [`AsyncQueue`] by its [`AsyncConfig`]. Requests
//! under way on a [`Queue`] are the caller's to bound. Only [`Disk::start`] starts threads.
//!
//! # The crates below
//!
//! What is not here is in [`engine`], [`reactor`], [`block`] and [`format`](mod@format): a [`Queue`] gives its
//! [`engine::Queue`], and is itself a [`block::Device`].

#![forbid(unsafe_code)]

mod async_queue;
mod blocking;
mod create;
mod disk;
mod error;
mod queue;

pub use async_queue::{AsyncConfig, AsyncQueue};
pub use blocking::{BlockingQueue, StateInput, StateOutput, Waiting};
pub use create::CreateOptions;
pub use disk::{Disk, SharedBases};
pub use error::{Error, Result};
pub use queue::{Queue, Unmap};

pub use gaur_block::{Errno, Status};
pub use gaur_engine::{
    AllocationPolicy, CacheOptions, ErrorKind, Format, Keys, OpenOptions, Passphrase, References,
    Snapshot, VmStateReader, VmStateWriter,
};
pub use gaur_format::plan::Preallocation;
pub use gaur_luks::{Cipher, Encryption, Hash, Iv, KeyBits, Mode};
pub use gaur_reactor::{Config as ReactorConfig, Driver, JoinHandle, Reactor, spawn};

pub use {
    gaur_block as block, gaur_engine as engine, gaur_format as format, gaur_reactor as reactor,
};
