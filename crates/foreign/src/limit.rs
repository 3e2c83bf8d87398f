//! What an image may ask for at most.

/// Largest disk in bytes: 1 EiB. The formats themselves end at 2 TiB (VHD), 64 TiB (VHDX) and 4 EiB (VDI, with its
/// largest blocks); offsets below leave room for arithmetic.
pub const DISK_BYTES_MAX: u64 = 1 << 60;

/// Smallest and largest block in bytes: the sector that all formats count in, and the largest block of VHDX.
pub const BLOCK_BYTES: core::ops::RangeInclusive<u64> = 512..=256 << 20;

/// Most blocks that one look-up joins to a run: 256 MiB of VMDK grains, and a bound on the time that it takes.
pub const RUN_BLOCKS_MAX: u32 = 4096;
