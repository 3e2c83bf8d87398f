//! Every limit of this crate, with where it comes from.
//!
//! A structure that breaks one is refused before memory is taken for it. The numbers are those of
//! QEMU where QEMU has one, so that an image one of the two opens is opened by the other.

/// Smallest `cluster_bits`: 512-byte clusters. The specification's own minimum.
pub const CLUSTER_BITS_MIN: u32 = 9;

/// Largest `cluster_bits`: 2 MiB clusters. The specification names no maximum; QEMU's is this.
pub const CLUSTER_BITS_MAX: u32 = 21;

/// Smallest `cluster_bits` with extended L2 entries: 32 subclusters of at least 512 bytes.
pub const CLUSTER_BITS_MIN_EXTENDED: u32 = 14;

/// Largest `refcount_order`: refcounts of 64 bits.
pub const REFCOUNT_ORDER_MAX: u32 = 6;

/// The only `refcount_order` of version 2: 16 bits.
pub const REFCOUNT_ORDER_V2: u32 = 4;

/// Host offsets in L1 and L2 entries are bits 9 to 55, so all of an image lies below this.
pub const HOST_END: u64 = 1 << 56;

/// Longest L1 table in bytes (QEMU): 4 Mi entries, 2 PiB of disk with 64 KiB clusters. It also
/// keeps every guest offset below 2^61: 2^22 entries, each mapping at most 2^18 clusters of 2^21.
pub const L1_BYTES_MAX: u64 = 32 << 20;

/// Entries of the longest L1 table.
pub const L1_ENTRIES_MAX: u64 = L1_BYTES_MAX / 8;

/// Longest refcount table in bytes (QEMU).
pub const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;

/// Most internal snapshots (QEMU).
pub const SNAPSHOTS_MAX: u32 = 65_536;

/// Longest snapshot table in bytes (QEMU): 1 KiB for each of the most snapshots.
pub const SNAPSHOT_TABLE_BYTES_MAX: u64 = 64 << 20;

/// Longest extra data of one snapshot in bytes (QEMU).
pub const SNAPSHOT_EXTRA_BYTES_MAX: u32 = 1024;

/// Longest backing file name in bytes (the specification).
pub const BACKING_NAME_BYTES_MAX: u32 = 1023;

/// Most dirty bitmaps (QEMU).
pub const BITMAPS_MAX: u32 = 65_535;

/// Longest bitmap directory in bytes (QEMU): 1 KiB for each of the most bitmaps.
pub const BITMAP_DIRECTORY_BYTES_MAX: u64 = 65_535 * 1024;

/// Most entries of one bitmap table (QEMU): 2^27, 1 GiB of table.
pub const BITMAP_TABLE_ENTRIES_MAX: u32 = 0x800_0000;

/// Most bytes of one bitmap's bits (QEMU): 512 MiB.
pub const BITMAP_BYTES_MAX: u64 = 0x2000_0000;

/// Longest bitmap name in bytes (QEMU).
pub const BITMAP_NAME_BYTES_MAX: u16 = 1023;

/// Smallest granularity of a bitmap as a power of two (QEMU): 512 bytes.
pub const BITMAP_GRANULARITY_BITS_MIN: u8 = 9;

/// Largest granularity of a bitmap as a power of two (QEMU): 2 GiB.
pub const BITMAP_GRANULARITY_BITS_MAX: u8 = 31;

/// Most images in a backing chain. Nothing in the format bounds it; each open layer costs a file
/// descriptor and memory, and a loop the file system hides must end somewhere.
pub const CHAIN_DEPTH_MAX: usize = 512;

/// Most bytes of tables in a plan for a new image. It is held in memory before it is written, and
/// only preallocation makes it long: 1 GiB of L2 tables map 8 TiB with 64 KiB clusters.
pub const PLAN_BYTES_MAX: u64 = 1 << 30;

/// Most clusters of a file the checker looks at: 2 PiB in clusters of 64 KiB (QEMU: the largest `int`, an eighth
/// of 1 PiB). A page of 4096 with the same count takes 16 bytes in each of its two maps, 128 MiB for 1 PiB;
/// a page of different counts 512 bytes or more.
pub const CHECK_CLUSTERS_MAX: u64 = 1 << 35;

/// Most bytes the checker keeps. Beyond it the check ends with an error: an image that gets there
/// is larger than 512 TiB and scattered, or made to exhaust memory.
pub const CHECK_MEMORY_BYTES_MAX: u64 = 2 << 30;

/// Most findings the checker keeps as text; all of them are counted.
pub const CHECK_FINDINGS_MAX: usize = 1000;
