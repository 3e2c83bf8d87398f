//! The virtio block device: split virtqueues in the memory of a guest, and the requests on them.
//!
//! What a transport has to say (where the guest's memory is, which rings there are, when they start
//! and stop) comes in through [`server::start`]; [`crate::vhost_user`] and [`crate::vduse`] are the two.
//!
//! The guest is not trusted. It may write anything to its memory at any time, so every value is read
//! once, checked, and used from then on. What a ring must not say ends that ring with a
//! [`violation::Violation`]; what a request must not say fails that request.

mod chain;
pub(crate) mod config;
mod execute;
pub(crate) mod inflight;
pub(crate) mod memory;
pub(crate) mod ring;
pub(crate) mod ring_command;
mod ring_task;
pub(crate) mod rings;
mod running_ring;
pub(crate) mod server;
mod sigbus;
#[cfg(test)]
mod tests;
mod thread_context;
mod violation;
pub(crate) mod wire;
