//! Applying a snapshot: the disk becomes what it was when the snapshot was made.
//!
//! The active image shares the snapshot's L2 tables from then on, and what it had itself loses its
//! references. A table that both share already stays as it is. Requests wait until all is done.
//!
//! The state of a machine that lies behind the snapshot's disk stays the snapshot's: a reader looks there,
//! and a disk that grows would come upon it.

use std::collections::BTreeSet;

use gaur_block::File;
use gaur_format::geometry::Version;
use gaur_format::snapshot::Snapshot;

use super::create::Copying;
use super::delete::drop_table;
use super::failure::Failure;
use super::plan::SwitchPlan;
use super::select::find_snapshot;
use super::switch::{Outcome, Switch};
use super::{list, references};
use crate::active::Active;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::range::{GuestRange, HostRange};

impl<F: File> Active<'_, F> {
    /// See [`crate::Queue::apply_snapshot`].
    pub(super) async fn apply_snapshot(
        &self,
        which: &str,
        job: &Job,
    ) -> Result<Snapshot, ImageError> {
        const DOING: &str = "cannot apply the snapshot";
        let _held = self.writer.resizing.lock().await;
        let all = self.writer.snapshots.lock().all().to_vec();
        let wanted = find_snapshot(&all, which)?;
        let size_bytes = self.size_to_apply(wanted)?;
        self.check_bitmaps_fit(size_bytes)?;
        let old_size = self.image.size_bytes();
        let changes = GuestRange::new(0, old_size.max(size_bytes));
        let announced = self.announce_new_disk(size_bytes, changes).await;
        announced.map_err(|errno| ImageError::io(errno, DOING))?;
        let apply = async || self.try_apply(wanted, (size_bytes, &all), job).await;
        self.switch_image(DOING, job, apply).await?;
        self.replace_disk_of_bitmaps(old_size, size_bytes).await;
        Ok(wanted.clone())
    }

    fn size_to_apply(&self, wanted: &Snapshot) -> Result<u64, ImageError> {
        let now = self.image.size_bytes();
        let then = wanted.disk_size.unwrap_or(now);
        if then != now && self.geometry().version() == Version::V2 {
            let text = "the snapshot is of another size, which a version 2 image cannot change to";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        let needed = self.geometry().l1_entries_for(then);
        if !then.is_multiple_of(512) || needed > gaur_format::limit::L1_ENTRIES_MAX {
            let text = format!("the snapshot's size of {then} bytes is not that of a disk");
            return Err(ImageError::new(ErrorKind::Corrupt, text));
        }
        Ok(then)
    }

    async fn try_apply(
        &self,
        wanted: &Snapshot,
        (size_bytes, all): (u64, &[Snapshot]),
        job: &Job,
    ) -> Result<(), Failure> {
        self.flush_all().await?;
        let geometry = self.geometry();
        let entries = geometry.l1_entries_for(size_bytes).max(1);
        let table_bytes = list::encode(all, geometry)?.len() as u64;
        let mut switch = Switch::begin(*self, job);
        let l1_area = switch.take_area(entries * 8).await?;
        let list_area = switch.list_area(table_bytes).await?;
        let refcount_table = switch.take_refcount_table().await?;
        let last = async |switch: &mut Switch<'_, F>| {
            switch.take_slots(0)?;
            let l1 = switch.take_over(wanted, entries).await?;
            switch.drop_old_areas()?;
            switch.write_blocks(true).await?;
            Ok(Outcome {
                size_bytes,
                l1: (l1, l1_area),
                snapshots: (all.to_vec(), list_area),
                refcount_table,
            })
        };
        switch.finish(Copying::Apply, last).await
    }
}

impl<F: File> Switch<'_, F> {
    /// The entries of the active L1 table that share the tables of `wanted`.
    async fn take_over(&mut self, wanted: &Snapshot, entries: u64) -> Result<Vec<u64>, Failure> {
        let tables = self.snapshot_tables(wanted).await?.into_iter();
        let theirs: BTreeSet<(u64, u64)> = tables.filter(|(index, _)| *index < entries).collect();
        let own: BTreeSet<(u64, u64)> = self.active_tables().into_iter().collect();
        let lost: Vec<(u64, u64)> = own.difference(&theirs).copied().collect();
        self.each_table(&lost, false, drop_table).await?;
        let mut l1 = vec![0; entries as usize];
        for (index, table) in own.intersection(&theirs) {
            l1[*index as usize] = SwitchPlan::raw_entry(*table, false);
        }
        let size = self.cluster_size();
        let gained: Vec<(u64, u64)> = theirs.difference(&own).copied().collect();
        self.each_table(&gained, true, |plan, (index, table), bytes| {
            plan.refer(bytes, 1)?;
            // Flags in tables of snapshots mean nothing, and are not to mean anything now.
            let flagged = references::clear_flags(bytes, &plan.geometry);
            let to = if flagged { Some(plan.spare()?) } else { None };
            if to.is_none() {
                plan.count(table, 1)?;
            }
            l1[index as usize] = SwitchPlan::raw_entry(to.unwrap_or(table), flagged);
            Ok(to)
        })
        .await?;
        for raw in &l1 {
            if let Ok(slot) = self.plan.slot_of(*raw)
                && slot.table != 0
            {
                let table = HostRange::new(slot.table, size);
                self.active.qcow2.maps.slices.invalidate(table);
            }
        }
        Ok(l1)
    }
}
