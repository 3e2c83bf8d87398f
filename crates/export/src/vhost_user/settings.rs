//! What a client has said about a ring.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gaur_reactor::Descriptor;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::message::RING_LOGGED;
use super::table::Table;
use crate::virtio::inflight::InflightLog;
use crate::virtio::memory::GuestMemory;
use crate::virtio::ring::RingAddresses;
use crate::virtio::ring_command::{CallNotifier, RingSetup};

/// Where a ring is, in the client's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) flags: u32,
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// The used ring in guest memory, for the log of dirty pages.
    pub(super) log: u64,
}

/// A ring.
#[derive(Default)]
pub(super) struct Settings {
    pub(super) size: u32,
    pub(super) addresses: Option<Addresses>,
    /// The next entry of the available ring.
    pub(super) base: u16,
    pub(super) kick: Option<OwnedFd>,
    pub(super) call: Option<OwnedFd>,
    pub(super) error: Option<OwnedFd>,
    pub(super) enabled: bool,
    /// Its task has been told to start.
    pub(super) running: bool,
}

/// What all rings of a client have in common.
pub(super) struct Common<'a> {
    pub(super) table: &'a Arc<Table>,
    pub(super) features: u64,
    pub(super) write_through: &'a Arc<AtomicBool>,
}

impl Settings {
    /// Whether it can run, and is to.
    pub(super) fn wants_to_run(&self) -> bool {
        self.enabled && self.kick.is_some() && self.addresses.is_some() && self.size > 0
    }

    /// All that its task needs.
    pub(super) fn setup(
        &self,
        common: &Common<'_>,
        log: Option<InflightLog>,
    ) -> Result<RingSetup, String> {
        let given = self.addresses.ok_or("a ring without addresses")?;
        let parts = [given.descriptors, given.available, given.used];
        let addresses = RingAddresses::find(self.size, parts, |at, len, _| {
            common.table.by_user_address(at, len)
        })?;
        let memory: Arc<dyn GuestMemory> = common.table.clone();
        let kick = self.kick.as_ref().ok_or("a ring without a kick")?;
        let logged = given.flags & RING_LOGGED != 0;
        Ok(RingSetup {
            addresses,
            memory,
            next: Some(self.base),
            features: common.features,
            write_through: common.write_through.clone(),
            log,
            used_address: logged.then_some(given.log),
            kick: Descriptor::never_blocking(clone(kick)?),
            call: self.call_notifier()?,
            error: self.error.as_ref().map(clone).transpose()?,
        })
    }

    /// How its driver is told of completions.
    pub(super) fn call_notifier(&self) -> Result<CallNotifier, String> {
        Ok(match &self.call {
            Some(call) => CallNotifier::Event(clone(call)?),
            None => CallNotifier::None,
        })
    }
}

fn clone(fd: &OwnedFd) -> Result<OwnedFd, String> {
    fd.try_clone()
        .map_err(|error| format!("cannot duplicate a descriptor: {error}"))
}

/// Makes an eventfd non-blocking, for its reader and its writers.
pub(super) fn event(fd: OwnedFd) -> Result<OwnedFd, String> {
    let flags = fcntl_getfl(&fd);
    match flags.and_then(|flags| fcntl_setfl(&fd, flags | OFlags::NONBLOCK)) {
        Ok(()) => Ok(fd),
        Err(_) => Err("an event counter that cannot be made not to block".to_owned()),
    }
}
