//! Statistics of an open image.

/// What was given back to the host without freeing a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoleStatistics {
    /// Holes made inside clusters.
    pub holes: u64,
    /// Bytes of them.
    pub bytes: u64,
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
