//! ublk: a device served as a block device of this machine, `/dev/ublkbN`.
//!
//! A thin layer over the interface of the kernel's ublk driver (`include/uapi/linux/ublk_cmd.h` and
//! `Documentation/block/ublk.rst` of Linux; numbers here are of Linux 7.3, what older kernels lack is
//! asked for and done without). [`start`] makes a device, [`recover`] takes over one whose server is
//! gone, and [`list`], [`delete`], [`quiesce`] and [`features`] manage devices.
//!
//! Threads: requests run on the serving threads of `serve` (`threads`, `queue`), through whose
//! rings both the driver's commands and the requests of the image go. The control thread (`supervisor`)
//! waits for the end and sends the commands that may block (`control`). No thread ever opens the block
//! device: one that waited for itself would wait for ever.

mod char_device;
mod control;
mod features;
mod info;
mod manage;
mod options;
mod params;
mod queue;
mod server;
mod supervisor;
mod threads;
mod transfer;
mod uapi;

pub use crate::error::ServeError;
pub use features::Features;
pub use info::{Info, State};
pub use manage::{Deletion, delete, features, info, list, quiesce};
pub use options::{Added, Options, ZeroCopy};
pub use server::{Server, recover, start};
