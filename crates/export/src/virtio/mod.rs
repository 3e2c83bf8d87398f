//! The virtio block device: split virtqueues in the memory of a guest, and the requests on them.
//!
//! What a transport has to say (where the guest's memory is, which rings there are, when they start
//! and stop) comes in through [`crew::Crew`]; [`crate::vhost_user`] and [`crate::vduse`] are the two.
//!
//! The guest is not trusted. It may write anything to its memory at any time, so every value is read
//! once, checked, and used from then on. What a ring must not say ends that ring with a
//! [`violation::Violation`]; what a request must not say fails that request.

mod chain;
pub(crate) mod config;
pub(crate) mod crew;
mod execute;
pub(crate) mod inflight;
mod lane;
mod log;
mod lost;
pub(crate) mod mailbox;
pub(crate) mod memory;
pub(crate) mod order;
mod queue;
pub(crate) mod ring;
mod station;
#[cfg(test)]
mod tests;
mod violation;
pub(crate) mod wire;

pub use log::Log;
