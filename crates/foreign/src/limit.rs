//! What an image may ask for at most.

/// Largest disk in bytes: 1 EiB. The formats themselves end at 2 TiB (VHD), 64 TiB (VHDX) and 4 EiB (VDI, with its
/// largest blocks); offsets below leave room for arithmetic.
pub const DISK_BYTES_MAX: u64 = 1 << 60;

/// Smallest and largest block in bytes: the sector that all formats count in, and the largest block of VHDX.
pub const BLOCK_BYTES: core::ops::RangeInclusive<u64> = 512..=256 << 20;

/// Most blocks that one look-up joins to a run: 256 MiB of VMDK grains, and a bound on the time that it takes.
pub const RUN_BLOCKS_MAX: u32 = 4096;

/// Smallest and largest grain of a VMDK in bytes; all writers known make 64 KiB. A compressed one is held in memory.
pub const GRAIN_BYTES: core::ops::RangeInclusive<u64> = 512..=2 << 20;

/// Entries of a VMDK's table; all writers known make 512, which is what QEMU reads at most.
pub const GRAIN_TABLE_ENTRIES: core::ops::RangeInclusive<u64> = 1..=512;

/// Longest directory of a VMDK in bytes: of 128 TiB in grains of 64 KiB, twice what VMware has.
pub const DIRECTORY_BYTES_MAX: u64 = 16 << 20;

/// Longest log of a VHDX that is replayed, in bytes; it is held in memory. Hyper-V and QEMU make one of 1 MiB.
pub const VHDX_LOG_BYTES_MAX: u64 = 64 << 20;

/// Longest descriptor of a VMDK in bytes. One of 10 TiB in files of 2 GiB has 300 KiB.
pub const DESCRIPTOR_BYTES_MAX: u64 = 1 << 20;

/// Most extents of a VMDK, each of which may be a file that is held open: 2 TiB in files of 2 GiB, as the kernel's usual
/// limit of open files allows.
pub const EXTENTS_MAX: usize = 1000;
