//! One device of the kernel's: making it, asking about it, and its messages.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;
use std::sync::Arc;

use gaur_block::Errno;
use rustix::event::{EventfdFlags, eventfd};

use super::ioctl::{
    self, DeviceConfig, NAME_BYTES, Request, Response, RingConfig, RingEvent, RingInfo,
};
use crate::error::errno_of;
use crate::virtio::config::CONFIG_BYTES;
use crate::virtio::wire::DEVICE_BLOCK;

const CONTROL: &str = "/dev/vduse/control";

/// Entries of a ring.
pub(super) const DEPTH: u16 = 256;

/// What a new device is to be.
pub(super) struct Plan<'a> {
    pub(super) name: &'a str,
    pub(super) features: u64,
    pub(super) config: [u8; CONFIG_BYTES],
    pub(super) rings: u16,
}

/// An open device.
pub(super) struct Device {
    pub(super) fd: Arc<OwnedFd>,
    pub(super) name: String,
}

/// `struct vduse_dev_config` with its configuration space.
#[repr(C)]
struct FullConfig {
    head: DeviceConfig,
    space: [u8; CONFIG_BYTES],
}

/// `struct vduse_config_data` with the capacity.
#[repr(C)]
struct CapacityUpdate {
    offset: u32,
    len: u32,
    sectors: [u8; 8],
}

impl Device {
    /// Makes a device.
    pub(super) fn create(plan: &Plan<'_>) -> Result<Device, Errno> {
        let control = open(CONTROL, 0)?;
        let mut version = 0_u64;
        // SAFETY: the call takes a u64.
        unsafe { ioctl::perform(control.as_fd(), &ioctl::SET_API_VERSION, &raw mut version) }?;
        let mut config = FullConfig {
            head: DeviceConfig {
                name: name_bytes(plan.name),
                vendor_id: 0,
                device_id: DEVICE_BLOCK,
                features: plan.features,
                rings: u32::from(plan.rings),
                alignment: 4096,
                groups: 0,
                address_spaces: 0,
                reserved: [0; 11],
                config_bytes: CONFIG_BYTES as u32,
            },
            space: plan.config,
        };
        // SAFETY: the structure is what the call takes, with `config_bytes` bytes behind it.
        unsafe { ioctl::perform(control.as_fd(), &ioctl::CREATE, &raw mut config) }?;
        let made = Device::open(plan.name).and_then(|device| {
            for index in 0..u32::from(plan.rings) {
                let mut ring = RingConfig {
                    index,
                    max_size: DEPTH,
                    ..RingConfig::default()
                };
                // SAFETY: the structure is what the call takes.
                unsafe { ioctl::perform(device.fd.as_fd(), &ioctl::RING_SETUP, &raw mut ring) }?;
            }
            Ok(device)
        });
        if made.is_err() {
            let _ = destroy(plan.name);
        }
        made
    }

    /// Opens a device that is there.
    pub(super) fn open(name: &str) -> Result<Device, Errno> {
        let fd = open(&format!("/dev/vduse/{name}"), libc::O_NONBLOCK)?;
        Ok(Device {
            fd: Arc::new(fd),
            name: name.to_owned(),
        })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// What the driver has accepted.
    pub(super) fn features(&self) -> Result<u64, Errno> {
        let mut features = 0_u64;
        // SAFETY: the call takes a u64.
        unsafe { ioctl::perform(self.fd(), &ioctl::GET_FEATURES, &raw mut features) }?;
        Ok(features)
    }

    /// A ring as the driver has set it up; `EINVAL` when there is none of that number.
    pub(super) fn ring(&self, index: u32) -> Result<RingInfo, Errno> {
        let mut info = RingInfo {
            index,
            ..RingInfo::default()
        };
        // SAFETY: the structure is what the call takes.
        unsafe { ioctl::perform(self.fd(), &ioctl::RING_GET_INFO, &raw mut info) }?;
        Ok(info)
    }

    /// How many rings it has.
    pub(super) fn rings(&self) -> u16 {
        let rings = (0..=u16::MAX).take_while(|index| self.ring(u32::from(*index)).is_ok());
        u16::try_from(rings.count()).unwrap_or(u16::MAX)
    }

    /// Has the kernel raise `event` when a ring has requests.
    pub(super) fn set_kick(&self, index: u32, event: &OwnedFd) -> Result<(), Errno> {
        let mut kick = RingEvent {
            index,
            fd: event.as_raw_fd(),
        };
        // SAFETY: the structure is what the call takes.
        unsafe { ioctl::perform(self.fd(), &ioctl::RING_SET_KICK, &raw mut kick) }.map(drop)
    }

    /// Tells the driver of another size.
    pub(super) fn resize(&self, sectors: u64) -> Result<(), Errno> {
        let mut update = CapacityUpdate {
            offset: 0,
            len: 8,
            sectors: sectors.to_le_bytes(),
        };
        // SAFETY: the structure is what the call takes, with `len` bytes behind its head.
        unsafe { ioctl::perform(self.fd(), &ioctl::SET_CONFIG, &raw mut update) }?;
        let nothing = ptr::null_mut::<u8>();
        // SAFETY: the call takes nothing.
        unsafe { ioctl::perform(self.fd(), &ioctl::CONFIG_INTERRUPT, nothing) }.map(drop)
    }

    /// The next message of the kernel, which is there.
    pub(super) fn read(&self) -> Result<Request, Errno> {
        let mut request = Request::default();
        let len = size_of::<Request>();
        let fd = self.fd.as_raw_fd();
        // SAFETY: the structure is plain integers, and its length is passed.
        let count = unsafe { libc::read(fd, (&raw mut request).cast(), len) };
        match usize::try_from(count) {
            Ok(count) if count == len => Ok(request),
            Ok(_) => Err(Errno::EIO),
            Err(_) => Err(errno_of(io::Error::last_os_error())),
        }
    }

    /// Answers a message.
    pub(super) fn write(&self, response: &Response) -> Result<(), Errno> {
        let fd = self.fd.as_raw_fd();
        let len = size_of::<Response>();
        // SAFETY: the structure is plain integers without gaps, and its length is passed.
        let count = unsafe { libc::write(fd, ptr::from_ref(response).cast(), len) };
        if count >= 0 {
            Ok(())
        } else {
            Err(errno_of(io::Error::last_os_error()))
        }
    }
}

/// Tells the driver of a ring that requests are done.
pub(crate) fn interrupt(device: &OwnedFd, index: u32) {
    let mut index = index;
    // SAFETY: the call takes a u32. It fails when the driver has gone, who then needs no telling.
    let _ = unsafe { ioctl::perform(device.as_fd(), &ioctl::RING_INTERRUPT, &raw mut index) };
}

/// Removes a device that no process has open and that is not on the bus.
pub(super) fn destroy(name: &str) -> Result<(), Errno> {
    let control = open(CONTROL, 0)?;
    let mut name = name_bytes(name);
    // SAFETY: the call takes an array of that length.
    unsafe { ioctl::perform(control.as_fd(), &ioctl::DESTROY, &raw mut name) }.map(drop)
}

fn name_bytes(name: &str) -> [u8; NAME_BYTES] {
    let mut bytes = [0; NAME_BYTES];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes
}

/// An event counter that blocks who reads it: a ring reads it when it has something.
pub(super) fn event() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC).map_err(errno_of)
}

fn open(path: &str, flags: libc::c_int) -> Result<OwnedFd, Errno> {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(flags);
    options.open(path).map(OwnedFd::from).map_err(errno_of)
}
