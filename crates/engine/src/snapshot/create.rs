//! Creating a snapshot.
//!
//! The L2 tables of the active image are copied without their COPIED flags, and both the snapshot and the
//! active image refer to the copies: the active image makes a table of its own when it next writes
//! there. Tables that are shared with a snapshot already are shared once more as they are.

use gaur_block::File;
use gaur_format::snapshot::Snapshot;
use gaur_format::{HostOffset, limit};

use super::delete::drop_table;
use super::failure::Failure;
use super::plan::SwitchPlan;
use super::references;
use super::switch::{Outcome, Switch};
use super::{NewSnapshot, SavedState, list};
use crate::active::Active;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::metadata::tracker::Changed;
use crate::range::HostRange;

/// Rounds of copying what changed meanwhile before requests are stopped.
pub(crate) const ROUNDS_MAX: usize = 8;
/// So few changed slices are left for the time when requests are stopped.
pub(crate) const SLICES_FEW: usize = 16;
/// Slices read at once when they are copied again.
const SLICES_AT_ONCE: usize = 64;

/// What is to be created.
struct Wanted<'a> {
    entry: &'a Snapshot,
    state: Option<&'a SavedState>,
    size_bytes: u64,
}

impl<F: File> Active<'_, F> {
    /// Makes a snapshot, with the state of a virtual machine if there is one. If this fails, the state's
    /// clusters are still the caller's to give back.
    pub(super) async fn create_snapshot(
        &self,
        new: &NewSnapshot,
        state: Option<&SavedState>,
        job: &Job,
    ) -> Result<Snapshot, ImageError> {
        const DOING: &str = "cannot create the snapshot";
        let _held = self.writer.resizing.lock().await;
        if self.geometry().refcount_max() < 2 {
            let text = "an image with refcount_bits=1 cannot have snapshots; \
                        convert it to one with refcount_bits=16";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        let size_bytes = self.image.size_bytes();
        let all = self.writer.snapshots.lock().all().to_vec();
        let mut entry = new.entry(&all, size_bytes)?;
        entry.vm_state_size = state.map_or(0, |state| state.size_bytes);
        let wanted = Wanted {
            entry: &entry,
            state,
            size_bytes,
        };
        let create = async || self.try_create(&wanted, &all, job).await;
        self.switch_image(DOING, job, create).await
    }

    async fn try_create(
        &self,
        wanted: &Wanted<'_>,
        all: &[Snapshot],
        job: &Job,
    ) -> Result<Snapshot, Failure> {
        let geometry = self.geometry();
        let disk = geometry.l1_entries_for(wanted.size_bytes);
        // The table of an empty disk has an entry too.
        let needed = disk.max(1);
        let own = snapshot_l1_len(disk, wanted)?.max(1);
        let mut all = all.to_vec();
        all.push(wanted.entry.clone());
        let table_bytes = list::encode(&all, geometry)?.len() as u64;
        let mut switch = Switch::begin(*self, job);
        switch.take_slots(needed)?;
        switch.copy_active(needed).await?;
        switch.write_blocks(false).await?;
        let l1_area = switch.take_area(needed * 8).await?;
        let own_area = switch.take_area(own * 8).await?;
        let list_area = switch.take_area(table_bytes).await?;
        let refcount_table = switch.take_refcount_table().await?;
        switch.catch_up(Copying::Create).await?;
        let last = async |switch: &mut Switch<'_, F>| {
            switch.drop_old_areas()?;
            switch.write_blocks(true).await?;
            let active = switch.shared_entries(needed);
            let shared = active.get(..disk as usize).unwrap_or_default();
            let entries = snapshot_l1(shared, own, wanted.state);
            switch.active.write_table(&entries, own_area).await?;
            if let Some(entry) = all.last_mut() {
                entry.l1_table_offset = HostOffset(own_area.start);
                entry.l1_size = entries.len() as u32;
            }
            Ok(Outcome {
                size_bytes: wanted.size_bytes,
                l1: (active, l1_area),
                snapshots: (all.clone(), list_area),
                refcount_table,
            })
        };
        switch.finish(Copying::Create, last).await?;
        let metadata = &self.qcow2.maps.metadata;
        metadata.insert(own_area.clusters(geometry));
        all.pop().ok_or(Failure::Again)
    }
}

/// Entries of the snapshot's L1 table: the disk, and behind it the state of the virtual machine.
fn snapshot_l1_len(disk: u64, wanted: &Wanted<'_>) -> Result<u64, Failure> {
    let last = wanted.state.and_then(|state| state.tables.last());
    let len = disk.saturating_add(last.map_or(0, |(index, _)| index.saturating_add(1)));
    if len > limit::L1_ENTRIES_MAX {
        let text = "the disk and the state need a longer l1 table than is allowed";
        return Err(ImageError::new(ErrorKind::Unsupported, text).into());
    }
    Ok(len)
}

fn snapshot_l1(disk: &[u64], len: u64, state: Option<&SavedState>) -> Vec<u64> {
    let behind = disk.len();
    let mut entries = disk.to_vec();
    entries.resize(len as usize, 0);
    for (index, table) in state.map_or(&[][..], |state| &state.tables) {
        if let Some(slot) = entries.get_mut(behind + *index as usize) {
            *slot = SwitchPlan::raw_entry(*table, false);
        }
    }
    entries
}

/// What copies of the active tables are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copying {
    /// To be shared with a new snapshot: no flags.
    Create,
    /// A snapshot goes: flags where one reference remains.
    Delete,
    /// The active image takes over the tables of a snapshot: no copies.
    Apply,
}

impl<F: File> Switch<'_, F> {
    /// Copies the tables of the first `needed` entries. What is behind them is the state of a virtual
    /// machine that was applied once; the active image gives it up.
    async fn copy_active(&mut self, needed: u64) -> Result<(), Failure> {
        let tables = self.active_tables();
        let (disk, state) = tables.split_at(tables.partition_point(|(index, _)| *index < needed));
        self.each_table(disk, true, share_table).await?;
        if !state.is_empty() {
            // A grow that was given up may have left changes of these in memory. None come from here on: they lie behind
            // the end of the disk.
            self.active.flush_all().await?;
        }
        self.each_table(state, false, drop_table).await
    }

    /// L2 tables of the active image, by L1 index.
    pub(crate) fn active_tables(&self) -> Vec<(u64, u64)> {
        let slots = (0..).zip(&self.plan.slots);
        let tables = slots.filter(|(_, slot)| slot.table != 0);
        tables.map(|(index, slot)| (index, slot.table)).collect()
    }

    /// Entries of the active L1 table, all of whose tables are shared.
    fn shared_entries(&self, needed: u64) -> Vec<u64> {
        let slots = self.plan.slots.iter().take(needed as usize);
        let table = |slot: &super::plan::L1Slot| if slot.copied { slot.copy } else { slot.table };
        slots
            .map(|slot| SwitchPlan::raw_entry(table(slot), false))
            .collect()
    }

    /// Copies again what requests have changed, until little is left to do while they wait.
    pub(crate) async fn catch_up(&mut self, copying: Copying) -> Result<(), Failure> {
        for _ in 0..ROUNDS_MAX {
            let changed = self.take_changed();
            let few = changed.tables.is_empty() && changed.slices.len() <= SLICES_FEW;
            self.copy_again(copying, changed).await?;
            self.write_blocks(false).await?;
            if few {
                break;
            }
        }
        // What was written so far does not hold up the flushes while requests wait.
        self.active.flush_all().await?;
        let changed = self.take_changed();
        self.copy_again(copying, changed).await?;
        self.write_blocks(false).await
    }

    /// Stops requests, copies what is left, and makes the switch to what `last` says.
    pub(crate) async fn finish(
        &mut self,
        copying: Copying,
        last: impl AsyncFnOnce(&mut Self) -> Result<Outcome, Failure>,
    ) -> Result<(), Failure> {
        self.job.step(0)?;
        let active = self.active;
        let (flush, epochs) = (&active.writer.flush, &active.writer.epochs);
        // Requests that wait for a pass would hold up those that wait for the gate.
        flush.rest().await;
        let closed = epochs.gate.close(|| epochs.is_empty()).await;
        let mut result = Err(Failure::Again);
        let pass = async || {
            if copying != Copying::Create {
                // A new snapshot gets every table from memory. Otherwise some stay where they are, and
                // their flags on the disk have to fit the counts to come.
                active.write_back().await?;
            }
            let changed = self.take_changed();
            let prepared = async {
                self.copy_again(copying, changed).await?;
                last(self).await
            };
            result = match prepared.await {
                Ok(outcome) => self.make(outcome).await?,
                Err(failure) => Err(failure),
            };
            drop(closed);
            // Flushes that were asked for meanwhile are served by this pass.
            active.write_back().await
        };
        flush.lead(&active.image.poison, pass).await?;
        result
    }

    /// Copies tables and slices again that have changed.
    async fn copy_again(&mut self, copying: Copying, changed: Changed) -> Result<(), Failure> {
        let mut tables = changed.tables;
        let per_table = self.slices_per_table();
        let slices = changed.slices.into_iter();
        let slices: Vec<u64> = slices
            .filter(|slice| !tables.contains(&(slice / per_table)))
            .collect();
        for some in slices.chunks(SLICES_AT_ONCE) {
            let more = match copying {
                Copying::Create => self.share_slices(some).await?,
                Copying::Delete => self.flag_slices(some).await?,
                Copying::Apply => Vec::new(),
            };
            tables.extend(more);
        }
        for index in tables {
            match copying {
                Copying::Create => self.share_again(index).await?,
                Copying::Delete => self.flag_again(index).await?,
                Copying::Apply => {}
            }
        }
        Ok(())
    }

    pub(crate) fn slices_per_table(&self) -> u64 {
        let guest = self.active.qcow2.maps.guest_bytes_per_slice();
        (self.active.geometry().guest_bytes_per_l2() / guest).max(1)
    }

    /// The L1 entry changed: what was counted for it is taken back, and counted anew.
    async fn share_again(&mut self, index: u64) -> Result<(), Failure> {
        let Some(mut slot) = self.plan.slots.get(index as usize).copied() else {
            return Ok(());
        };
        if slot.counted {
            let source = if slot.copied { slot.copy } else { slot.table };
            let bytes = self
                .read(HostRange::new(source, self.cluster_size()))
                .await?;
            self.cover_blocks();
            self.plan.refer(&bytes, -1)?;
            if slot.copied {
                self.plan.count(slot.copy, -1)?;
                self.plan.count(slot.table, 1)?;
            } else {
                self.plan.count(slot.table, -1)?;
            }
        }
        let kept = slot.copy;
        slot = self.plan.slot_of(self.active.qcow2.maps.l1.get(index))?;
        slot.copy = kept;
        self.plan.slots[index as usize] = slot;
        if slot.table == 0 {
            return Ok(());
        }
        self.each_table(&[(index, slot.table)], true, share_table)
            .await
    }

    /// Copies these slices again, by guest offset over the guest bytes of a slice.
    async fn share_slices(&mut self, slices: &[u64]) -> Result<Vec<u64>, Failure> {
        let slice_bytes = self.active.qcow2.maps.slices.slice_bytes();
        let per_table = self.slices_per_table();
        let mut places = Vec::new();
        for slice in slices {
            let slot = self.plan.slots.get((slice / per_table) as usize);
            if let Some(slot) = slot.filter(|slot| slot.counted && slot.copied) {
                let at = slice % per_table * slice_bytes;
                places.push((slot.copy + at, slot.table + at));
            }
        }
        let (copies, tables): (Vec<u64>, Vec<u64>) = places.iter().copied().unzip();
        let len = places.len() * slice_bytes as usize;
        let (mut old, mut new) = (vec![0; len], vec![0; len]);
        let both = futures_util::join!(
            self.read_all(&copies, slice_bytes, &mut old),
            self.read_active(&tables, slice_bytes, &mut new),
        );
        both.0.and(both.1)?;
        self.cover_blocks();
        self.plan.refer(&old, -1)?;
        self.plan.refer(&new, 1)?;
        references::clear_flags(&mut new, self.active.geometry());
        let places: Vec<Option<u64>> = copies.into_iter().map(Some).collect();
        self.write_some(&places, slice_bytes, &new).await?;
        Ok(Vec::new())
    }
}

/// Counts what a table of the active image refers to once more, for the new snapshot, and says where its
/// copy goes. A table that is shared already is shared as it is.
fn share_table(
    plan: &mut SwitchPlan,
    (index, _): (u64, u64),
    bytes: &mut [u8],
) -> Result<Option<u64>, Failure> {
    let mut slot = plan.slots[index as usize];
    plan.refer(bytes, 1)?;
    slot.counted = true;
    let to = if slot.owned {
        references::clear_flags(bytes, &plan.geometry);
        if slot.copy == 0 {
            slot.copy = plan.spare()?;
        }
        slot.copied = true;
        plan.count(slot.copy, 1)?;
        plan.count(slot.table, -1)?;
        Some(slot.copy)
    } else {
        plan.count(slot.table, 1)?;
        None
    };
    plan.slots[index as usize] = slot;
    Ok(to)
}
