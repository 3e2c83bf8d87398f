//! Deleting a snapshot.
//!
//! Everything its L1 table leads to loses one reference. What the active image alone still refers to gets
//! its COPIED flag back, in copies of the tables concerned.

use std::collections::BTreeSet;

use futures_util::future::try_join_all;
use gaur_block::File;
use gaur_format::snapshot::Snapshot;

use super::create::Copying;
use super::failure::Failure;
use super::list;
use super::plan::SwitchPlan;
use super::references;
use super::select::find_to_delete;
use super::switch::{Outcome, Switch};
use crate::active::Active;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::range::HostRange;

impl<F: File> Active<'_, F> {
    /// See [`crate::Queue::delete_snapshot`].
    pub(super) async fn delete_snapshot(
        &self,
        which: &str,
        job: &Job,
    ) -> Result<Snapshot, ImageError> {
        const DOING: &str = "cannot delete the snapshot";
        let _held = self.writer.resizing.lock().await;
        let all = self.writer.snapshots.lock().all().to_vec();
        let gone = find_to_delete(&all, which)?;
        if self.writer.snapshots.lock().is_held(&gone.id) {
            let text = format!("snapshot {which:?} is being read; delete it when that has ended");
            return Err(ImageError::new(ErrorKind::Locked, text));
        }
        let delete = async || self.try_delete(gone, &all, job).await;
        self.switch_image(DOING, job, delete).await?;
        Ok(gone.clone())
    }

    async fn try_delete(
        &self,
        gone: &Snapshot,
        all: &[Snapshot],
        job: &Job,
    ) -> Result<(), Failure> {
        let rest: Vec<Snapshot> = all
            .iter()
            .filter(|one| !std::ptr::eq(*one, gone))
            .cloned()
            .collect();
        let table_bytes = list::encode(&rest, self.geometry())?.len() as u64;
        let mut switch = Switch::begin(*self, job);
        switch.take_slots(0)?;
        let entries = self.qcow2.maps.l1.len();
        let tables = switch.snapshot_tables(gone).await?;
        switch.each_table(&tables, false, drop_table).await?;
        let own_l1 = l1_range(gone);
        switch.plan.count_bytes(own_l1, -1)?;
        switch.note_shared(&rest).await?;
        switch.load_counts().await?;
        switch.flag_active().await?;
        switch.write_blocks(false).await?;
        let l1_area = switch.take_area(entries * 8).await?;
        let list_area = switch.list_area(table_bytes).await?;
        let refcount_table = switch.take_refcount_table().await?;
        switch.catch_up(Copying::Delete).await?;
        let last = async |switch: &mut Switch<'_, F>| {
            switch.drop_old_areas()?;
            switch.write_blocks(true).await?;
            Ok(Outcome {
                size_bytes: self.image.size_bytes(),
                l1: (switch.flagged_entries(), l1_area),
                snapshots: (rest, list_area),
                refcount_table,
            })
        };
        switch.finish(Copying::Delete, last).await?;
        let metadata = &self.qcow2.maps.metadata;
        metadata.remove(own_l1.clusters(self.geometry()));
        Ok(())
    }
}

/// L1 tables of snapshots read at once.
const L1_TABLES_AT_ONCE: usize = 32;

/// A table, and everything it refers to, has one reference less.
pub(super) fn drop_table(
    plan: &mut SwitchPlan,
    (_, table): (u64, u64),
    bytes: &mut [u8],
) -> Result<Option<u64>, Failure> {
    plan.refer(bytes, -1)?;
    plan.count(table, -1)?;
    Ok(None)
}

/// Sets the flags in the active image's table with this index as they will be right; where its copy
/// goes if that changes any.
fn flag_table(
    plan: &mut SwitchPlan,
    (index, _): (u64, u64),
    bytes: &mut [u8],
) -> Result<Option<u64>, Failure> {
    let mut slot = plan.slots[index as usize];
    let geometry = plan.geometry;
    let single = |cluster| plan.new_count(cluster).map(|count| count == 1);
    if !references::set_flags(bytes, &geometry, single) {
        return Ok(None);
    }
    if slot.copy == 0 {
        slot.copy = plan.spare()?;
    }
    slot.copied = true;
    slot.counted = true;
    plan.count(slot.table, -1)?;
    plan.slots[index as usize] = slot;
    Ok(Some(slot.copy))
}

/// The L1 table of a snapshot.
fn l1_range(snapshot: &Snapshot) -> HostRange {
    let len = u64::from(snapshot.l1_size) * 8;
    HostRange::new(snapshot.l1_table_offset.0, len)
}

impl<F: File> Switch<'_, F> {
    /// The L2 tables of a snapshot, by L1 index.
    pub(crate) async fn snapshot_tables(
        &mut self,
        snapshot: &Snapshot,
    ) -> Result<Vec<(u64, u64)>, Failure> {
        let bytes = self.read(l1_range(snapshot)).await?;
        let mut tables = Vec::new();
        for (index, raw) in (0..).zip(bytes.as_chunks().0) {
            let slot = self.plan.slot_of(u64::from_be_bytes(*raw))?;
            if slot.table != 0 {
                tables.push((index, slot.table));
            }
        }
        Ok(tables)
    }

    /// Room for the table of snapshots; none if there are none.
    pub(crate) async fn list_area(&mut self, bytes: u64) -> Result<HostRange, Failure> {
        match bytes {
            0 => Ok(HostRange::default()),
            _ => self.take_area(bytes).await,
        }
    }

    /// Reads the counts in force of every block that changes.
    async fn load_counts(&mut self) -> Result<(), Failure> {
        let touched: Vec<u64> = self.plan.deltas.touched().collect();
        let size = self.cluster_size();
        self.job.expect(touched.len() as u64 * size);
        for index in touched {
            let bytes = self.counts_in_force(index).await?;
            self.plan.counts.insert(index, bytes.into_boxed_slice());
            self.job.step(size)?;
        }
        Ok(())
    }

    /// Looks for the active image's tables in the snapshots that stay. The tables' counts do not say it:
    /// after a crash one may be too high.
    async fn note_shared(&mut self, rest: &[Snapshot]) -> Result<(), Failure> {
        let tables = self.active_tables().into_iter();
        let own: BTreeSet<u64> = tables.map(|(_, table)| table).collect();
        for some in rest.chunks(L1_TABLES_AT_ONCE) {
            let this = &*self;
            let reads = some.iter().map(|one| this.read(l1_range(one)));
            for bytes in try_join_all(reads).await? {
                for raw in bytes.as_chunks().0 {
                    // A snapshot that is damaged is nothing to the one that goes.
                    let slot = self.plan.slot_of(u64::from_be_bytes(*raw));
                    let table = slot.map_or(0, |slot| slot.table);
                    if own.contains(&table) {
                        self.plan.shared.insert(table);
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether a table that is not the active image's own will still be shared: all that it refers to is
    /// shared too, then.
    fn stays_shared(&self, table: u64) -> bool {
        self.plan.shared.contains(&table)
    }

    /// Sets the flags of all tables of the active image that need it, in copies.
    async fn flag_active(&mut self) -> Result<(), Failure> {
        let mut tables = Vec::new();
        for (index, slot) in (0..).zip(&self.plan.slots) {
            if slot.table != 0 && (slot.owned || !self.stays_shared(slot.table)) {
                tables.push((index, slot.table));
            }
        }
        self.each_table(&tables, true, flag_table).await
    }

    /// The L1 entry changed, or a table without a copy needs one.
    pub(crate) async fn flag_again(&mut self, index: u64) -> Result<(), Failure> {
        let Some(slot) = self.plan.slots.get(index as usize).copied() else {
            return Ok(());
        };
        if slot.copied {
            self.plan.count(slot.table, 1)?;
        }
        let mut now = self.plan.slot_of(self.active.qcow2.maps.l1.get(index))?;
        now.copy = slot.copy;
        self.plan.slots[index as usize] = now;
        if now.table != 0 && (now.owned || !self.stays_shared(now.table)) {
            self.each_table(&[(index, now.table)], true, flag_table)
                .await?;
        }
        Ok(())
    }

    /// Copies these slices again; answers with the tables that have no copy and need one now.
    pub(crate) async fn flag_slices(&mut self, slices: &[u64]) -> Result<Vec<u64>, Failure> {
        let slice_bytes = self.active.qcow2.maps.slices.slice_bytes();
        let per_table = self.slices_per_table();
        let mut places = Vec::new();
        for slice in slices {
            let index = slice / per_table;
            let slot = self.plan.slots.get(index as usize);
            if let Some(slot) = slot.filter(|slot| slot.table != 0) {
                let to = slot.copied.then_some(slot.copy);
                places.push((index, slice % per_table * slice_bytes, slot.table, to));
            }
        }
        let mut again = Vec::new();
        for (index, at, table, to) in places {
            let mut bytes = vec![0; slice_bytes as usize];
            self.read_active(&[table + at], slice_bytes, &mut bytes)
                .await?;
            let single = |cluster| self.plan.new_count(cluster).map(|count| count == 1);
            let changed = references::set_flags(&mut bytes, self.active.geometry(), single);
            match to {
                Some(to) => self.active.write_file(to + at, &bytes).await?,
                None if changed => again.push(index),
                None => {}
            }
        }
        Ok(again)
    }

    /// Entries of the active L1 table with their flags as they will be right.
    fn flagged_entries(&self) -> Vec<u64> {
        let bits = self.active.geometry().cluster_bits();
        let slots = self.plan.slots.iter();
        let entry = |slot: &super::plan::L1Slot| {
            if slot.copied {
                return SwitchPlan::raw_entry(slot.copy, true);
            }
            let count = self.plan.new_count(slot.table >> bits);
            SwitchPlan::raw_entry(slot.table, count.map_or(slot.owned, |count| count == 1))
        };
        slots.map(entry).collect()
    }
}
