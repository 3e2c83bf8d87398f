//! The serving core: threads, workers and the lifecycle of an export, whatever its clients speak.
//!
//! Contract, the same for every front end:
//!
//! - **Start.** [`Prepared::start`] starts the serving threads, and each makes its device on its own
//!   reactor. Only when all have one does the front end show itself to clients and call
//!   [`Prepared::serve`]; otherwise dropping it ends the threads, and nothing was visible.
//! - **Requests** of a connection or ring go to [`Workers`]: tasks that serve one request each at a time.
//!   [`InFlight`] counts what is under way, so that a drain can wait for it. A device that panics costs
//!   its request and what the front end gives up for it ([`PanicGuard`]), never the process.
//! - **Drain.** The first [`Front::stop`](crate::Front::stop): no further requests are taken, those under way
//!   are answered, devices are flushed, threads join.
//! - **Stop now.** The second: nothing is waited for. Serving threads are left running with what they have.
//! - **Ended.** A flag that is raised when the control thread ends, also by a panic, or by a stop now that
//!   cannot wait for it.
//! - **Size changed.** [`Transport::resized`] tells the clients that can be told.
//!
//! A front end is a protocol, a transport, and one control thread ([`Server::spawn`]) that runs an
//! asynchronous loop on a reactor without a ring and gets messages by a [`Channel`].

#![cfg_attr(
    not(all(feature = "nbd", feature = "ublk", feature = "vduse", feature = "fuse")),
    allow(
        dead_code,
        unused_imports,
        reason = "each front end needs its own part"
    )
)]

mod channel;
mod disk;
mod log;
mod server;
mod stop;
mod threads;
mod workers;

pub(crate) use channel::Channel;
pub(crate) use disk::Disk;
pub use log::Log;
pub(crate) use log::say;
pub use server::Server;
pub(crate) use server::{Transport, control_reactor};
pub use stop::StopSwitch;
pub(crate) use threads::{Geometry, Prepared, ServingThreads};
pub(crate) use workers::{InFlight, OnDrop, PanicGuard, Serve, Workers};
