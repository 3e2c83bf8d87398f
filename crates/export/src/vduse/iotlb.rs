//! The driver's memory: windows of device addresses, mapped when they are first needed.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::RwLock;

use super::ioctl::{self, ACCESS_WRITE, IotlbEntry};
use crate::virtio::memory::{Access, GuestMemory, Mapping, Run};

struct Window {
    start: u64,
    last: u64,
    writable: bool,
    mapping: Mapping,
}

/// All windows mapped so far. Rings are stopped before any of them is given up.
pub(super) struct Iotlb {
    device: Arc<OwnedFd>,
    windows: RwLock<Vec<Window>>,
}

impl Iotlb {
    pub(super) fn new(device: &Arc<OwnedFd>) -> Arc<Iotlb> {
        Arc::new(Iotlb {
            device: device.clone(),
            windows: RwLock::default(),
        })
    }

    fn find(&self, address: u64, len: usize, access: Access) -> Option<Run> {
        // A window is added whole, so a panic elsewhere spoils nothing.
        let windows = self.windows.read();
        let window = windows
            .iter()
            .find(|window| (window.start..=window.last).contains(&address))?;
        if access == Access::Write && !window.writable {
            return None;
        }
        window.mapping.run(address - window.start, len)
    }

    /// Maps the window that `address` is in.
    fn map(&self, address: u64) -> Option<()> {
        let mut entry = IotlbEntry {
            start: address,
            last: address,
            ..IotlbEntry::default()
        };
        // SAFETY: the structure is what the call takes; a descriptor that comes back is ours.
        let file = unsafe {
            let fd = ioctl::perform(self.device.as_fd(), &ioctl::IOTLB_GET_FD, &raw mut entry);
            OwnedFd::from_raw_fd(fd.ok()?)
        };
        let len = entry.last.checked_sub(entry.start)?.checked_add(1)?;
        let writable = entry.access & ACCESS_WRITE != 0;
        let len = usize::try_from(len).ok()?;
        let mapping = Mapping::new(file.as_fd(), entry.offset, len, writable).ok()?;
        let window = Window {
            start: entry.start,
            last: entry.last,
            writable,
            mapping,
        };
        let mut windows = self.windows.write();
        let known = windows.iter().any(|other| other.start == window.start);
        if !known {
            windows.push(window);
        }
        Some(())
    }
}

impl GuestMemory for Iotlb {
    fn run(&self, address: u64, len: usize, access: Access) -> Option<Run> {
        if let Some(run) = self.find(address, len, access) {
            return Some(run);
        }
        self.map(address)?;
        self.find(address, len, access)
    }
}
