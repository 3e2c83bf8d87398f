//! Cluster layout of a new image: header, refcount table, refcount blocks, L1 table, LUKS header, L2 tables
//! and data clusters, in this order, each a run of clusters.

use crate::geometry::Geometry;

/// Clusters of each part. The sums stay far below 2^64: a disk has at most 2^52 clusters, and the
/// tables for them are fewer still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) refcount_table: u64,
    pub(super) refcount_blocks: u64,
    pub(super) l1: u64,
    pub(super) luks: u64,
    pub(super) l2: u64,
    pub(super) data: u64,
}

/// Clusters of the refcount table and of its blocks that count `clusters` other clusters and
/// themselves.
pub(super) fn refcount_clusters(geometry: &Geometry, clusters: u64) -> (u64, u64) {
    let (mut table, mut blocks) = (0u64, 0u64);
    loop {
        let all = clusters.saturating_add(table).saturating_add(blocks);
        let more_blocks = all.div_ceil(geometry.refcount_block_entries().max(1));
        let more_table = geometry.clusters_for(more_blocks.saturating_mul(8));
        // Both only grow, and by ever smaller steps: a block counts at least 64 clusters.
        if (more_table, more_blocks) == (table, blocks) {
            return (table, blocks);
        }
        (table, blocks) = (more_table, more_blocks);
    }
}

impl Layout {
    /// The layout for a disk of `size_bytes`, with space for its data or without.
    pub(super) fn new(
        geometry: &Geometry,
        size_bytes: u64,
        luks_bytes: u64,
        preallocated: bool,
    ) -> Layout {
        let luks = geometry.clusters_for(luks_bytes);
        let l2_tables = geometry.l1_entries_for(size_bytes);
        let l1 = geometry.clusters_for(l2_tables.saturating_mul(8));
        let (l2, data) = if preallocated {
            // Those of a data file are not in the image.
            let data = match geometry.data_file() {
                true => 0,
                false => geometry.clusters_for(size_bytes),
            };
            (l2_tables, data)
        } else {
            (0, 0)
        };
        let others = 1u64
            .saturating_add(l1)
            .saturating_add(luks)
            .saturating_add(l2)
            .saturating_add(data);
        let (refcount_table, refcount_blocks) = refcount_clusters(geometry, others);
        Layout {
            refcount_table,
            refcount_blocks,
            l1,
            luks,
            l2,
            data,
        }
    }

    pub(super) const REFCOUNT_TABLE_START: u64 = 1;

    pub(super) fn refcount_blocks_start(&self) -> u64 {
        self.refcount_table
            .saturating_add(Layout::REFCOUNT_TABLE_START)
    }

    pub(super) fn l1_start(&self) -> u64 {
        self.refcount_blocks_start()
            .saturating_add(self.refcount_blocks)
    }

    pub(super) fn luks_start(&self) -> u64 {
        self.l1_start().saturating_add(self.l1)
    }

    pub(super) fn l2_start(&self) -> u64 {
        self.luks_start().saturating_add(self.luks)
    }

    pub(super) fn data_start(&self) -> u64 {
        self.l2_start().saturating_add(self.l2)
    }

    /// Clusters of the file.
    pub(super) fn end(&self) -> u64 {
        self.data_start().saturating_add(self.data)
    }

    /// Clusters of tables.
    pub(super) fn tables(&self) -> u64 {
        self.data_start()
    }
}
