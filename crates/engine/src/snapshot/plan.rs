//! Plan of a switch of the whole image, and what it changes: counts, copies of L2 tables, copies of refcount
//! blocks. Sync; [`super::switch`] does the input and output.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use gaur_block::Errno;
use gaur_format::geometry::Geometry;
use gaur_format::l1::{self, L1Ref};
use gaur_format::{HostOffset, refcount};

use super::deltas::{DeltaError, Deltas};
use super::failure::Failure;
use super::references;
use crate::metadata::freed::FreedBlocks;
use crate::range::{ClusterRange, HostRange};

/// An entry of the active L1 table, and what becomes of its L2 table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct L1Slot {
    /// Host offset of the L2 table; 0 for none.
    pub(crate) table: u64,
    /// It belongs to the active image alone.
    pub(crate) owned: bool,
    /// Host offset of its copy; 0 for none.
    pub(crate) copy: u64,
    /// The copy takes its place. A copy that does not is kept for the next time.
    pub(crate) copied: bool,
    /// What it contributes has been noted.
    pub(crate) counted: bool,
}

/// A refcount block with counts to change, which goes elsewhere.
#[derive(Debug)]
pub(crate) struct Block {
    /// Host offset of the block in force.
    pub(crate) old: u64,
    /// Host offset of the one that takes its place.
    pub(crate) new: u64,
    /// The new one is written as things stand.
    pub(crate) written: bool,
}

/// The plan.
#[derive(Debug)]
pub(crate) struct SwitchPlan {
    pub(crate) geometry: Geometry,
    pub(crate) deltas: Deltas,
    pub(crate) slots: Vec<L1Slot>,
    pub(crate) blocks: BTreeMap<u64, Block>,
    /// Clusters taken and not yet used.
    pub(crate) spare: VecDeque<u64>,
    /// Counts in force of the blocks that the deletion of a snapshot changes.
    pub(crate) counts: BTreeMap<u64, Box<[u8]>>,
    /// Tables of the active image that snapshots refer to which stay.
    pub(crate) shared: BTreeSet<u64>,
    pub(crate) freed: FreedBlocks,
}

impl SwitchPlan {
    /// Nothing changes yet.
    pub(crate) fn new(geometry: Geometry) -> SwitchPlan {
        let per_block = geometry.refcount_block_entries();
        SwitchPlan {
            geometry,
            deltas: Deltas::new(per_block),
            slots: Vec::new(),
            blocks: BTreeMap::new(),
            spare: VecDeque::new(),
            counts: BTreeMap::new(),
            shared: BTreeSet::new(),
            freed: FreedBlocks::new(per_block),
        }
    }

    /// A slot for a raw L1 entry.
    pub(crate) fn slot_of(&self, raw: u64) -> Result<L1Slot, Failure> {
        let table = l1::decode(raw, &self.geometry)?;
        Ok(table.map_or_else(L1Slot::default, |table| L1Slot {
            table: table.offset.0,
            owned: table.copied,
            ..L1Slot::default()
        }))
    }

    /// Changes the count of the cluster at host offset `offset`.
    pub(crate) fn count(&mut self, offset: u64, by: i16) -> Result<(), DeltaError> {
        let cluster = offset >> self.geometry.cluster_bits();
        self.deltas.add(ClusterRange::new(cluster, 1), by)
    }

    /// Changes the counts of all clusters that these bytes touch.
    pub(crate) fn count_bytes(&mut self, range: HostRange, by: i16) -> Result<(), DeltaError> {
        self.deltas.add(range.clusters(&self.geometry), by)
    }

    /// Changes the counts of all that `entries` refer to.
    pub(crate) fn refer(&mut self, entries: &[u8], by: i16) -> Result<(), Failure> {
        let (geometry, deltas) = (self.geometry, &mut self.deltas);
        references::each_run(entries, &geometry, |clusters| {
            deltas.add(clusters, by).map_err(Failure::from)
        })
    }

    /// A cluster for a copy.
    pub(crate) fn spare(&mut self) -> Result<u64, Failure> {
        let cluster = self.spare.pop_front();
        let bits = self.geometry.cluster_bits();
        cluster
            .map(|cluster| cluster << bits)
            .ok_or(Failure::Host(Errno::EIO))
    }

    /// The count that a cluster has in force and will have; `None` where nothing changes.
    pub(crate) fn new_count(&self, cluster: u64) -> Option<u64> {
        let delta = self.deltas.get(cluster);
        if delta == 0 {
            return None;
        }
        let per_block = self.geometry.refcount_block_entries();
        let bytes = self.counts.get(&(cluster / per_block))?;
        let order = self.geometry.refcount_order();
        let now = refcount::get(bytes, order, cluster % per_block);
        Some(now.saturating_add_signed(i64::from(delta)))
    }

    /// Makes the counts in force of block `index`, in `bytes`, those to come, and notes which clusters
    /// are free then.
    pub(crate) fn apply(&mut self, index: u64, bytes: &mut [u8]) -> Result<(), Failure> {
        let order = self.geometry.refcount_order();
        let base = index * self.geometry.refcount_block_entries();
        let mut zeroed = Vec::new();
        let deltas = self.deltas.block(index).unwrap_or(&[]);
        for (within, delta) in (0_u64..).zip(deltas) {
            if *delta == 0 {
                continue;
            }
            let now = refcount::get(bytes, order, within);
            let cluster = base + within;
            let next = now
                .checked_add_signed(i64::from(*delta))
                .ok_or(DeltaError::Negative(cluster))?;
            if now == 0 {
                // A reference to a cluster that counts as free.
                return Err(DeltaError::Negative(cluster).into());
            }
            refcount::set(bytes, order, within, next).map_err(|_| Failure::TooLarge {
                cluster,
                bits: self.geometry.refcount_bits(),
            })?;
            if next == 0 {
                zeroed.push(within);
            }
        }
        self.freed.set_block(index, zeroed.into_iter());
        Ok(())
    }

    /// The raw entry for an L2 table.
    pub(crate) fn raw_entry(table: u64, copied: bool) -> u64 {
        let offset = HostOffset(table);
        l1::encode((table != 0).then_some(L1Ref { offset, copied }))
    }
}
