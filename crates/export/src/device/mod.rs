//! Devices without a disk, to test and measure front ends alone.

mod memory;
mod null;
mod range;

pub use memory::Memory;
pub use null::Null;
