//! A block device of this machine by VDUSE: the kernel's virtio driver in front, this process behind.
//!
//! The kernel's side is described in its `Documentation/userspace-api/vduse.rst`. A device is made
//! with `/dev/vduse/control`, served by `/dev/vduse/NAME` and attached to the vDPA bus by a netlink
//! message; the driver `virtio_vdpa` then shows it as `/dev/vdX`. It outlives the server: when that
//! is killed, requests wait, and the next server of the same name goes on with them, by a log of
//! requests in flight ([`crate::virtio`]) in a file in memory.
//!
//! A control thread answers the kernel's messages, and rings run on reactor threads.

mod device;
mod ioctl;
mod iotlb;
mod log_file;
mod netlink;
mod options;
mod server;
mod session;

pub(crate) use device::interrupt;
pub use options::Options;
pub use server::{is_disk, start};
