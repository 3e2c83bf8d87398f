//! A new refcount table with new blocks, for an image whose own are damaged, missing or in use twice.
//!
//! They lie behind the end of the file, where nothing refers to, so that until the header leads to them nothing has
//! changed. Their counts are the references found, or the old counts where these are higher: what
//! nothing refers to any more, the old table among it, is counted down later. Blocks come first, then
//! the table.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::addr::{ClusterIndex, HostOffset};
use crate::bytes;
use crate::check::machine::Check;
use crate::check::repair::Repaired;
use crate::check::tally::Tally;
use crate::geometry::Geometry;
use crate::limit;
use crate::refcount;

/// Most rounds until the place of the blocks counts the blocks themselves; every round adds one at least.
const ROUNDS_MAX: usize = 64;

#[derive(Clone, Debug)]
pub(super) struct Rebuild {
    geometry: Geometry,
    /// First cluster of the new blocks.
    first: u64,
    /// Indexes of the blocks in the table, ascending.
    blocks: Vec<u64>,
    table_clusters: u64,
    next: usize,
}

/// The count for a cluster as far as it is known.
fn wanted_count(tally: &Tally, cluster: u64) -> u64 {
    let cluster = ClusterIndex(cluster);
    let old = tally.refcount_of(cluster).unwrap_or(0);
    old.max(tally.references_to(cluster))
}

/// Whether a cluster is referred to that no block counts.
pub(super) fn lacks_block(check: &Check) -> bool {
    let tally = &check.tally;
    let mut cluster = 0;
    while let Some(used) = tally
        .next_used(cluster)
        .filter(|used| *used < tally.clusters)
    {
        cluster = used.saturating_add(1);
        let index = tally.geometry.refcount_table_index(ClusterIndex(used));
        if check.refcounts.block(tally, index).is_some() {
            cluster = index
                .saturating_add(1)
                .saturating_mul(tally.geometry.refcount_block_entries());
        } else if tally.references_to(ClusterIndex(used)) > 0 {
            return true;
        }
    }
    false
}

/// Indexes of the blocks that have counts.
fn used_blocks(tally: &Tally) -> BTreeSet<u64> {
    let mut blocks = BTreeSet::new();
    let mut cluster = 0;
    while let Some(used) = tally
        .next_used(cluster)
        .filter(|used| *used < tally.clusters)
    {
        cluster = used.saturating_add(1);
        if wanted_count(tally, used) > 0 {
            let index = tally.geometry.refcount_table_index(ClusterIndex(used));
            blocks.insert(index);
            let next = index.saturating_add(1);
            cluster = next.saturating_mul(tally.geometry.refcount_block_entries());
        }
    }
    blocks
}

impl Rebuild {
    /// `None` when the table would be longer than any may be, or lie where an entry points already.
    pub(super) fn plan(tally: &Tally, file_len: u64) -> Option<Rebuild> {
        let geometry = tally.geometry;
        let first = tally
            .clusters
            .max(geometry.clusters_for(file_len))
            .max(geometry.clusters_for(tally.outside_end));
        let mut blocks = used_blocks(tally);
        let mut table_clusters = 1;
        for _ in 0..ROUNDS_MAX {
            let end = first
                .saturating_add(blocks.len() as u64)
                .saturating_add(table_clusters);
            let low = geometry.refcount_table_index(ClusterIndex(first));
            let high = geometry.refcount_table_index(ClusterIndex(end.saturating_sub(1)));
            let before = (blocks.len(), table_clusters);
            blocks.extend(low..=high);
            let entries = blocks.last().copied().unwrap_or(0).saturating_add(1);
            let len = entries.saturating_mul(8);
            let end_bytes = geometry.cluster_start(ClusterIndex(end)).0;
            if len > limit::REFCOUNT_TABLE_BYTES_MAX || end_bytes > tally.outside_far {
                return None;
            }
            table_clusters = geometry.clusters_for(len);
            if (blocks.len(), table_clusters) == before {
                return Some(Rebuild {
                    geometry,
                    first,
                    blocks: blocks.into_iter().collect(),
                    table_clusters,
                    next: 0,
                });
            }
        }
        None
    }

    /// Tells what is repaired by it.
    pub(super) fn note(&self, tally: &Tally, result: &mut Repaired) {
        let at = self.table_offset();
        result.corruption(|| alloc::format!("refcount table and blocks are built anew at {at:#x}"));
        let mut cluster = 0;
        while let Some(used) = tally
            .next_used(cluster)
            .filter(|used| *used < tally.clusters.min(tally.planned))
        {
            cluster = used.saturating_add(1);
            let old = tally.refcount_of(ClusterIndex(used)).unwrap_or(0);
            let new = tally.references_to(ClusterIndex(used));
            if old < new {
                let at = self.geometry.cluster_start(ClusterIndex(used));
                result.corruption(|| {
                    alloc::format!("cluster {used} at {at:#x}: refcount {old} becomes {new}")
                });
            }
        }
    }

    fn table_cluster(&self) -> u64 {
        self.first.saturating_add(self.blocks.len() as u64)
    }

    fn table_offset(&self) -> HostOffset {
        self.geometry
            .cluster_start(ClusterIndex(self.table_cluster()))
    }

    /// The header's fields that lead to the new table: its offset and its length.
    pub(super) fn header_bytes(&self) -> Vec<u8> {
        let mut bytes = self.table_offset().0.to_be_bytes().to_vec();
        bytes.extend_from_slice(&(self.table_clusters as u32).to_be_bytes());
        bytes
    }

    /// The next write: a block, or in the end the table.
    pub(super) fn next_write(&mut self, tally: &Tally) -> Option<(u64, Vec<u8>)> {
        let number = self.next;
        self.next = number.saturating_add(1);
        match self.blocks.get(number) {
            Some(block) => {
                let cluster = self.first.saturating_add(number as u64);
                let offset = self.geometry.cluster_start(ClusterIndex(cluster));
                Some((offset.0, self.block(tally, *block)))
            }
            None if number == self.blocks.len() => Some((self.table_offset().0, self.table())),
            None => None,
        }
    }

    fn block(&self, tally: &Tally, block: u64) -> Vec<u8> {
        let geometry = self.geometry;
        let mut bytes = alloc::vec![0; geometry.cluster_size() as usize];
        let entries = geometry.refcount_block_entries();
        let start = block.saturating_mul(entries);
        let end = self.table_cluster().saturating_add(self.table_clusters);
        for index in 0..entries {
            let cluster = start.saturating_add(index);
            let count = match (self.first..end).contains(&cluster) {
                true => 1,
                false if cluster < tally.clusters => wanted_count(tally, cluster),
                false => 0,
            };
            // A count that was read or found fits.
            let _ = refcount::set(&mut bytes, geometry.refcount_order(), index, count);
        }
        bytes
    }

    fn table(&self) -> Vec<u8> {
        let len = self
            .table_clusters
            .saturating_mul(self.geometry.cluster_size());
        let mut table = alloc::vec![0; len as usize];
        for (number, block) in self.blocks.iter().enumerate() {
            let cluster = self.first.saturating_add(number as u64);
            let offset = self.geometry.cluster_start(ClusterIndex(cluster));
            let raw = refcount::encode_table_entry(Some(offset));
            let at = (*block as usize).saturating_mul(8);
            bytes::put(&mut table, at, &raw.to_be_bytes());
        }
        table
    }
}
