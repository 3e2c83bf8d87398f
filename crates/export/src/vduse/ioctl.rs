//! The kernel's interface (`include/uapi/linux/vduse.h`, version 0) as numbers and structures.

use std::os::fd::{AsRawFd, BorrowedFd};

use gaur_block::Errno;

use crate::error::errno_of;

/// `VDUSE_ACCESS_WO`; with `VDUSE_ACCESS_RO` it is `VDUSE_ACCESS_RW`.
pub(super) const ACCESS_WRITE: u8 = 2;

/// Longest name with its final zero byte.
pub(super) const NAME_BYTES: usize = 256;

/// Kinds of message.
pub(super) mod message {
    pub(crate) const GET_RING_STATE: u32 = 0;
    pub(crate) const SET_STATUS: u32 = 1;
    pub(crate) const UPDATE_IOTLB: u32 = 2;
}

/// Bits of the device's status (virtio 1.3, section 2.1).
pub(super) mod status {
    pub(crate) const DRIVER_OK: u8 = 4;
}

/// `struct vduse_dev_config` without the configuration space behind it.
#[repr(C)]
pub(super) struct DeviceConfig {
    pub(super) name: [u8; NAME_BYTES],
    pub(super) vendor_id: u32,
    pub(super) device_id: u32,
    pub(super) features: u64,
    pub(super) rings: u32,
    pub(super) alignment: u32,
    pub(super) groups: u32,
    pub(super) address_spaces: u32,
    pub(super) reserved: [u32; 11],
    pub(super) config_bytes: u32,
}

/// `struct vduse_iotlb_entry`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IotlbEntry {
    pub(super) offset: u64,
    pub(super) start: u64,
    pub(super) last: u64,
    pub(super) access: u8,
    pub(super) padding: [u8; 7],
}

/// `struct vduse_vq_config`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RingConfig {
    pub(super) index: u32,
    pub(super) max_size: u16,
    pub(super) reserved: u16,
    pub(super) group: u32,
    pub(super) reserved2: [u16; 10],
}

/// `struct vduse_vq_info` of a split ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RingInfo {
    pub(super) index: u32,
    pub(super) size: u32,
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    pub(super) next: u16,
    pub(super) state_rest: [u16; 3],
    pub(super) ready: u8,
    pub(super) padding: [u8; 7],
}

/// `struct vduse_vq_eventfd`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RingEvent {
    pub(super) index: u32,
    pub(super) fd: i32,
}

/// `struct vduse_dev_request`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Request {
    pub(super) kind: u32,
    pub(super) id: u32,
    pub(super) reserved: [u32; 4],
    pub(super) content: [u32; 32],
}

/// `struct vduse_dev_response`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Response {
    pub(super) id: u32,
    /// 0: done; 1: not.
    pub(super) result: u32,
    pub(super) reserved: [u32; 4],
    pub(super) content: [u32; 32],
}

/// A call with what it passes and which way.
pub(super) struct Call(libc::Ioctl);

const WRITE: u32 = 1;
const READ: u32 = 2;

const fn call(direction: u32, number: u32, len: usize) -> Call {
    Call(((direction << 30) | ((len as u32) << 16) | (0x81 << 8) | number) as libc::Ioctl)
}

pub(super) const CREATE: Call = call(WRITE, 0x02, size_of::<DeviceConfig>());
pub(super) const DESTROY: Call = call(WRITE, 0x03, NAME_BYTES);
pub(super) const SET_API_VERSION: Call = call(WRITE, 0x01, 8);
pub(super) const IOTLB_GET_FD: Call = call(READ | WRITE, 0x10, size_of::<IotlbEntry>());
pub(super) const GET_FEATURES: Call = call(READ, 0x11, 8);
pub(super) const SET_CONFIG: Call = call(WRITE, 0x12, 8);
pub(super) const CONFIG_INTERRUPT: Call = call(0, 0x13, 0);
pub(super) const RING_SETUP: Call = call(WRITE, 0x14, size_of::<RingConfig>());
pub(super) const RING_GET_INFO: Call = call(READ | WRITE, 0x15, size_of::<RingInfo>());
pub(super) const RING_SET_KICK: Call = call(WRITE, 0x16, size_of::<RingEvent>());
pub(super) const RING_INTERRUPT: Call = call(WRITE, 0x17, 4);

const _: () = {
    assert!(size_of::<DeviceConfig>() == 336);
    assert!(size_of::<IotlbEntry>() == 32);
    assert!(size_of::<RingConfig>() == 32);
    assert!(size_of::<RingInfo>() == 48);
    assert!(size_of::<Request>() == 152);
    assert!(size_of::<Response>() == 152);
};

/// Makes a call.
///
/// # Safety
/// `argument` is what the call takes, with all that lies behind it.
pub(super) unsafe fn perform<T>(
    fd: BorrowedFd<'_>,
    call: &Call,
    argument: *mut T,
) -> Result<i32, Errno> {
    loop {
        // SAFETY: the caller's promise.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), call.0, argument) };
        if result >= 0 {
            return Ok(result);
        }
        match errno_of(std::io::Error::last_os_error()) {
            Errno::EINTR => {}
            errno => return Err(errno),
        }
    }
}
