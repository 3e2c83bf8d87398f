//! A vhost-user-blk back end: a virtio block device for a virtual machine monitor, by a Unix socket
//! and shared memory.
//!
//! The protocol is that of QEMU's documentation (`docs/interop/vhost-user.rst`). One client is
//! served at a time; when it leaves, the next may come. The monitor keeps the log of requests in
//! flight ([`crate::virtio`]), so the server may be killed and started again under a guest that runs:
//! the monitor connects again, and what was in flight is done again, in the order in which the guest
//! asked for it.
//!
//! A control thread talks to the client, and rings run on reactor threads.

mod connection;
mod inflight;
mod message;
mod options;
mod rings;
mod server;
mod session;
mod settings;
mod table;
#[cfg(test)]
mod tests;

pub use inflight::is_held;
pub use options::Options;
pub use server::start;
