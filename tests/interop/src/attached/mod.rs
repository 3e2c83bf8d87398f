//! Images as block devices of the kernel: over nbd, ublk and VDUSE. For tests that run in the guest of
//! `cargo xtask vm test`.

mod device;
mod nbd;
mod pinned;
mod shape;
mod ublk;
mod vduse;

pub use device::{Attached, DeviceKind, assert_leaks_at_worst, attach, attach_lasting};
pub use pinned::Footprint;
pub use shape::Shape;
