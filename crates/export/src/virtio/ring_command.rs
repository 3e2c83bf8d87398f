//! Commands of the control thread to the task of a ring.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gaur_block::Errno;
use gaur_reactor::Descriptor;

use super::inflight::InflightLog;
use super::memory::GuestMemory;
use super::ring::RingAddresses;
use crate::serve::{Channel, Geometry};

/// The call notification of a ring: tells its driver that requests are done.
pub(crate) enum CallNotifier {
    /// The driver polls.
    None,
    /// An eventfd.
    Event(OwnedFd),
    /// A ring of a VDUSE device.
    #[cfg(feature = "vduse")]
    Vduse { device: Arc<OwnedFd>, index: u32 },
}

impl CallNotifier {
    /// Sends the notification.
    pub(crate) fn notify(&self) {
        match self {
            CallNotifier::None => {}
            CallNotifier::Event(fd) => raise(fd),
            #[cfg(feature = "vduse")]
            CallNotifier::Vduse { device, index } => crate::vduse::interrupt(device, *index),
        }
    }
}

/// Adds one to an eventfd.
pub(crate) fn raise(event: &OwnedFd) {
    // It fails when the counter is full, and then the other side has been told, or when the client gave us
    // something else, which is its own loss.
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

/// All that a ring needs to run.
pub(crate) struct RingSetup {
    pub(crate) addresses: RingAddresses,
    pub(crate) memory: Arc<dyn GuestMemory>,
    /// The next entry of the available ring; `None` for the one behind those that were used.
    pub(crate) next: Option<u16>,
    /// What the driver accepted.
    pub(crate) features: u64,
    pub(crate) write_through: Arc<AtomicBool>,
    pub(crate) log: Option<InflightLog>,
    /// Guest address of the used ring, when what is written there goes into the log of dirty pages.
    pub(crate) used_address: Option<u64>,
    pub(crate) kick: Descriptor,
    pub(crate) call: CallNotifier,
    /// Raised when the ring is given up.
    pub(crate) error: Option<OwnedFd>,
}

/// A command to the task of one ring.
pub(crate) enum RingCommand {
    /// Run. Nothing is answered: a ring that cannot says so in the log.
    Start(Box<RingSetup>),
    /// Take no more requests; answer with the next entry of the available ring once those under way
    /// are done, `None` when it did not run.
    Stop(Channel<Option<u16>>),
    /// Say which entry of the available ring is next; `None` when it does not run.
    #[cfg(feature = "vduse")]
    Position(Channel<Option<u16>>),
    /// Use another call notification.
    Call(CallNotifier),
    /// Say what the device is like.
    Geometry(Channel<Geometry>),
    /// Make all that was written durable.
    Flush(Channel<Result<(), Errno>>),
    /// End, when not running.
    End,
}
