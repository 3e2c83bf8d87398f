//! Statistics of an open image.

use gaur_block::Errno;

/// What was given back to the host without freeing a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoleStatistics {
    /// Holes made inside clusters.
    pub holes: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// What reads have left in the top image, since it was opened with copy-on-read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyStatistics {
    /// Bytes that the top image holds since.
    pub bytes: u64,
    /// Reads that left nothing, because enough copies were under way.
    pub left_out: u64,
    /// Copies that failed. The reads did not.
    pub failed: u64,
    /// Why the first of them did.
    pub first_failure: Option<Errno>,
}

/// How a metadata cache is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Lookups answered from memory.
    pub hits: u64,
    /// Lookups that had to wait for the image file.
    pub misses: u64,
    /// Most bytes the cache may hold.
    pub budget_bytes: u64,
    /// Bytes it holds now, its index included.
    pub held_bytes: u64,
    /// Bytes of metadata it has in them, as they are in the image file.
    pub covered_bytes: u64,
    /// Slices it has.
    pub slices: u64,
    /// Of those, the slices kept as runs.
    pub run_slices: u64,
    /// Runs in them.
    pub runs: u64,
}
