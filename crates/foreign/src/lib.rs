//! Images of other programs, for reading: VDI, VHD, VHDX and VMDK. Bytes to types, without input or output.
//!
//! All four are the same idea. A disk is cut into blocks of one size (a VMDK calls them grains), and a table says for
//! each block where in the file it is, if it is anywhere; or the disk lies there in one piece. So each format has a
//! module that reads its header and makes a [`Disk`], and [`map`] looks up guest offsets in any of them.
//!
//! Every byte is hostile. What a header says is checked against [`limit`] and the length of the file before
//! arithmetic uses it; no input panics. Tables are not held here: the caller reads the entries that a look-up asks
//! for, and keeps as many as it likes.
//!
//! What has a parent (differencing VHD and VHDX, VMDK and VDI snapshots) is refused by name. What the log of a VHDX
//! says is laid over its tables. Sources: VirtualBox's `VDICore.h` as documented by its users, Microsoft's "Virtual Hard Disk Image Format
//! Specification" 1.0 and MS-VHDX, VMware's "Virtual Disk Format 1.1". Where practice differs, what QEMU 10 reads.

#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects
    )
)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod bytes;
pub mod error;
mod format;
pub mod limit;
pub mod map;
pub mod vdi;
pub mod vhd;
pub mod vhdx;
pub mod vmdk;

pub use error::{Damage, Error};
pub use format::Format;
pub use map::{Disk, Extent, Kind, Lookup};
