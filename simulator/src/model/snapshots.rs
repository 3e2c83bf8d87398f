//! Model of the internal snapshots: which exist, and the content of each.
//!
//! A snapshot that is in the table has one content, which never changes. While one is being made its
//! content is not known yet: it must be a *cut* through the history of the disk, one moment between
//! the call and its return at which every unit held what the snapshot says. Of a change in flight
//! either all is there or nothing, in the table as well as on the disk.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::{Entry, Model, PendingChange, PendingFlush, Tick, Violation};
use crate::content::{Found, Value, ZERO};
use crate::view::Times;

/// A snapshot that a judge has found in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSnapshot {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// When it was made.
    pub times: Times,
    /// The bytes of its disk.
    pub disk: Rc<[u8]>,
    /// The state of the virtual machine.
    pub state: Rc<[u8]>,
}

/// A snapshot that is there.
#[derive(Clone, Debug)]
pub struct ModelSnapshot {
    /// What an image must say of it.
    pub seen: FoundSnapshot,
    /// The values of its units.
    pub values: Rc<[Value]>,
    /// A task is about to change it.
    pub busy: bool,
}

/// Names a change of the table that is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChangeId(u64);

/// A snapshot that is being made.
#[derive(Clone, Debug)]
pub struct PendingCreate {
    /// The name it will have.
    pub name: String,
    /// Its times.
    pub times: Times,
    /// The state it will have.
    pub state: Rc<[u8]>,
}

#[derive(Clone, Debug)]
enum Change {
    Create {
        creation: PendingCreate,
        since: Tick,
        /// Sizes of the disk in units since then.
        sizes: Vec<u32>,
        /// It was found in an image: from then on it has a content.
        seen: Option<FoundSnapshot>,
    },
    Delete {
        id: String,
    },
    Rename {
        id: String,
        name: String,
    },
    /// Only after a kill: it was deleted in the host's cache, and may not have been on the disk.
    Return {
        saved: ModelSnapshot,
    },
}

/// The snapshots of an image.
#[derive(Clone, Debug, Default)]
pub struct Snapshots {
    saved: Vec<ModelSnapshot>,
    changes: BTreeMap<ChangeId, Change>,
    next: u64,
}

/// The disk is being set to the content of a snapshot.
#[derive(Debug)]
pub struct PendingApply {
    issued: Tick,
    len_units: u32,
}

impl Snapshots {
    /// Exactly these, with nothing in flight.
    fn of(saved: Vec<ModelSnapshot>) -> Snapshots {
        Snapshots {
            saved,
            changes: BTreeMap::new(),
            next: 0,
        }
    }

    fn add(&mut self, change: Change) -> ChangeId {
        self.next += 1;
        let id = ChangeId(self.next);
        self.changes.insert(id, change);
        id
    }

    fn position(&self, id: &str) -> Option<usize> {
        self.saved.iter().position(|saved| saved.seen.id == id)
    }

    fn set_busy(&mut self, id: &str, busy: bool) {
        if let Some(at) = self.position(id) {
            self.saved[at].busy = busy;
        }
    }

    /// What may be there beside what is: whether `id` may be gone, and the name it may have.
    fn may_be_gone(&self, id: &str) -> bool {
        let gone = |change: &Change| matches!(change, Change::Delete { id: other } if other == id);
        self.changes.values().any(gone)
    }

    fn may_be_called(&self, id: &str, name: &str) -> bool {
        let called = |change: &Change| matches!(change, Change::Rename { id: of, name: to } if of == id && to == name);
        self.changes.values().any(called)
    }
}

impl Model {
    /// The snapshots that are there for sure.
    pub fn saved(&self) -> &[ModelSnapshot] {
        &self.snapshots.saved
    }

    /// Whether anything about snapshots is in flight.
    pub fn is_changing(&self) -> bool {
        !self.snapshots.changes.is_empty() || self.applying.is_some()
    }

    /// The image has these snapshots, no more and no less.
    pub fn with_snapshots(mut self, seen: Vec<FoundSnapshot>) -> Model {
        let saved = seen.into_iter().map(|seen| self.save(seen)).collect();
        self.snapshots = Snapshots::of(saved);
        self
    }

    fn save(&self, seen: FoundSnapshot) -> ModelSnapshot {
        let unit_bytes = self.script.unit_bytes() as usize;
        let units = seen.disk.chunks_exact(unit_bytes).enumerate();
        let value = |(unit, bytes)| match self.script.decode(unit as u32, bytes) {
            Found::Value(value) => value,
            // The judge that found it has checked every unit.
            Found::Misplaced(..) | Found::Garbage => Value::MAX,
        };
        let values = units.map(value).collect();
        ModelSnapshot {
            seen,
            values,
            busy: false,
        }
    }

    /// A snapshot is about to be made.
    pub fn create(&mut self, creation: PendingCreate) -> ChangeId {
        let since = self.tick();
        // As a read does: what the disk holds now must not be forgotten.
        self.reads.insert(since, 0);
        self.snapshots.add(Change::Create {
            creation,
            since,
            sizes: self.sizes(),
            seen: None,
        })
    }

    /// The disk has, or may soon have, another size.
    pub(super) fn note_size(&mut self, len_units: u32) {
        for change in self.snapshots.changes.values_mut() {
            if let Change::Create { sizes, .. } = change {
                sizes.push(len_units);
            }
        }
    }

    /// A snapshot was made, and this is what it is. What had completed before it was asked for is
    /// durable, and where nothing was in flight the disk is what the snapshot is.
    pub fn end_create(&mut self, change: ChangeId, seen: FoundSnapshot) -> Result<(), String> {
        self.check_new(change, &seen)?;
        let Some(Change::Create { since, .. }) = self.snapshots.changes.remove(&change) else {
            return Err("a snapshot was made that no task asked for".to_owned());
        };
        let saved = self.save(seen);
        self.pin_snapshot(&saved.values, since);
        self.snapshots.saved.push(saved);
        self.reads.remove(&since);
        self.end_flush(PendingFlush { issued: since }, true);
        Ok(())
    }

    fn pin_snapshot(&mut self, values: &[Value], since: Tick) {
        let now = self.tick();
        for unit in self.open.clone() {
            if let Some(&value) = values.get(unit as usize) {
                self.pin_at(unit, value, since, now);
            }
        }
    }

    /// Snapshot `id` is about to be deleted.
    pub fn delete(&mut self, id: &str) -> ChangeId {
        self.snapshots.set_busy(id, true);
        self.snapshots.add(Change::Delete { id: id.to_owned() })
    }

    /// Snapshot `id` is about to be renamed.
    pub fn rename(&mut self, id: &str, name: &str) -> ChangeId {
        self.snapshots.set_busy(id, true);
        let (id, name) = (id.to_owned(), name.to_owned());
        self.snapshots.add(Change::Rename { id, name })
    }

    /// A delete or rename went well.
    pub fn end_change(&mut self, change: ChangeId) {
        match self.snapshots.changes.remove(&change) {
            Some(Change::Delete { id }) => {
                self.snapshots.saved.retain(|saved| saved.seen.id != id);
            }
            Some(Change::Rename { id, name }) => {
                self.snapshots.set_busy(&id, false);
                if let Some(at) = self.snapshots.position(&id) {
                    self.snapshots.saved[at].seen.name = name;
                }
            }
            _ => {}
        }
        self.settle_table();
    }

    /// A change failed, and nothing has changed.
    pub fn undo_change(&mut self, change: ChangeId) {
        match self.snapshots.changes.remove(&change) {
            Some(Change::Create { since, .. }) => {
                self.reads.remove(&since);
            }
            Some(Change::Delete { id } | Change::Rename { id, .. }) => {
                self.snapshots.set_busy(&id, false);
            }
            _ => {}
        }
    }

    /// What the host's cache says of the table is on the disk.
    pub(super) fn settle_table(&mut self) {
        let killed = std::mem::take(&mut self.killed_changes);
        for change in killed {
            self.snapshots.changes.remove(&change);
        }
    }

    /// The disk is about to become what snapshot `id` is.
    pub fn apply(&mut self, id: &str) -> Option<PendingApply> {
        let at = self.snapshots.position(id)?;
        let saved = &mut self.snapshots.saved[at];
        saved.busy = true;
        let values = Rc::clone(&saved.values);
        let issued = self.tick();
        let len_units = values.len() as u32;
        let len = self.units.len().max(values.len());
        self.units.resize_with(len, || vec![Entry::base(ZERO)]);
        for (unit, &value) in values.iter().enumerate() {
            self.units[unit].push(Entry::issued(value, issued));
            self.open.insert(unit as u32);
        }
        self.other_sizes.push(len_units);
        self.note_size(len_units);
        self.applying = Some((issued, len_units));
        Some(PendingApply { issued, len_units })
    }

    /// The disk is what the snapshot is, durably.
    pub fn end_apply(&mut self, applying: &PendingApply) {
        self.applying = None;
        let (issued, len_units) = (applying.issued, applying.len_units);
        let units = 0..len_units;
        self.end(
            PendingChange {
                units,
                issued,
                replaces: true,
            },
            true,
            true,
        );
        self.size = len_units;
        self.other_sizes.clear();
        for entries in self.units.iter_mut().skip(len_units as usize) {
            *entries = vec![Entry::base(ZERO)];
        }
        self.open.split_off(&len_units);
        self.settle_table();
    }

    /// The apply failed, and nothing has changed.
    pub fn undo_apply(&mut self, applying: &PendingApply) {
        self.applying = None;
        self.remove_apply(applying.issued, applying.len_units);
    }

    fn remove_apply(&mut self, issued: Tick, len_units: u32) {
        for unit in 0..len_units {
            self.units[unit as usize].retain(|entry| entry.issued != issued);
            self.forget(unit);
        }
        if let Some(at) = self.other_sizes.iter().rposition(|&one| one == len_units) {
            self.other_sizes.swap_remove(at);
        }
    }

    /// No other task may change snapshot `id`.
    pub fn hold(&mut self, id: &str) {
        self.snapshots.set_busy(id, true);
    }

    /// Others may change it again.
    pub fn release(&mut self, id: &str) {
        self.snapshots.set_busy(id, false);
    }

    /// The disks that may be found while one is being applied: as it was, or all of the other.
    pub(super) fn worlds(&self) -> Option<[Model; 2]> {
        let (issued, len_units) = self.applying?;
        let (mut before, mut after) = (self.clone(), self.clone());
        before.applying = None;
        before.remove_apply(issued, len_units);
        after.end_apply(&PendingApply { issued, len_units });
        Some([before, after])
    }

    /// Checks the snapshots of an image against what may be there.
    pub fn check_snapshots(&mut self, found: &[FoundSnapshot]) -> Result<(), String> {
        for (number, seen) in found.iter().enumerate() {
            let before = &found[..number];
            if before
                .iter()
                .any(|other| other.id == seen.id || other.name == seen.name)
            {
                return Err(format!(
                    "two snapshots are called {} or {}",
                    seen.id, seen.name
                ));
            }
            match self.snapshots.position(&seen.id) {
                Some(at) => self.check_saved(&self.snapshots.saved[at], seen)?,
                None => self.check_unsaved(seen)?,
            }
        }
        let mut last = 0;
        for saved in &self.snapshots.saved {
            let (id, name) = (&saved.seen.id, &saved.seen.name);
            match found.iter().position(|seen| seen.id == *id) {
                None if self.snapshots.may_be_gone(id) => {}
                None => return Err(format!("snapshot {id} ({name}) is gone")),
                Some(at) if at < last => return Err(format!("snapshot {id} ({name}) has moved")),
                Some(at) => last = at,
            }
        }
        Ok(())
    }

    fn check_saved(&self, saved: &ModelSnapshot, seen: &FoundSnapshot) -> Result<(), String> {
        let id = &seen.id;
        if seen.name != saved.seen.name && !self.snapshots.may_be_called(id, &seen.name) {
            return Err(format!(
                "snapshot {id} is called {} instead of {}",
                seen.name, saved.seen.name
            ));
        }
        let renamed = FoundSnapshot {
            name: seen.name.clone(),
            ..saved.seen.clone()
        };
        self.check_same(&renamed, seen)
    }

    fn check_same(&self, expected: &FoundSnapshot, seen: &FoundSnapshot) -> Result<(), String> {
        if expected == seen {
            return Ok(());
        }
        let (id, name) = (&seen.id, &seen.name);
        if (id, name, seen.times) != (&expected.id, &expected.name, expected.times) {
            return Err(format!(
                "snapshot {id} ({name}, {:?}) was {} ({}, {:?})",
                seen.times, expected.id, expected.name, expected.times
            ));
        }
        if seen.disk != expected.disk {
            let what = self.first_difference(&seen.disk, &expected.disk);
            return Err(format!("snapshot {id} ({name}) has changed: {what}"));
        }
        let (one, other) = (&seen.state, &expected.state);
        let at = one
            .iter()
            .zip(other.iter())
            .position(|(one, other)| one != other);
        Err(format!(
            "the state in snapshot {id} ({name}) has changed: {} bytes for {}, first difference {at:?}",
            one.len(),
            other.len()
        ))
    }

    fn first_difference(&self, disk: &[u8], expected: &[u8]) -> String {
        let unit_bytes = self.script.unit_bytes() as usize;
        let pairs = disk.chunks(unit_bytes).zip(expected.chunks(unit_bytes));
        let mut pairs = pairs.enumerate();
        match pairs.find(|(_, (found, expected))| found != expected) {
            None => format!("{} bytes for {}", disk.len(), expected.len()),
            Some((unit, (found, expected))) => format!(
                "unit {unit} holds {} instead of {}",
                self.script.decode(unit as u32, found),
                self.script.decode(unit as u32, expected)
            ),
        }
    }

    /// A snapshot that is not known to be there: it may be in the making, or back from the dead.
    fn check_unsaved(&mut self, seen: &FoundSnapshot) -> Result<(), String> {
        let changes = &self.snapshots.changes;
        let making = changes.iter().find(
            |(_, change)| matches!(change, Change::Create { creation, .. } if creation.name == seen.name),
        );
        if let Some((&id, _)) = making {
            self.check_new(id, seen)?;
            if let Some(Change::Create { seen: known, .. }) = self.snapshots.changes.get_mut(&id) {
                *known = Some(seen.clone());
            }
            return Ok(());
        }
        let mut verdict = Err(format!(
            "snapshot {} ({}) should not be there",
            seen.id, seen.name
        ));
        for change in changes.values() {
            if let Change::Return { saved } = change
                && saved.seen.id == seen.id
                && verdict.is_err()
            {
                verdict = self.check_saved(saved, seen);
            }
        }
        verdict
    }

    /// Checks a snapshot that is in the making.
    fn check_new(&self, change: ChangeId, seen: &FoundSnapshot) -> Result<(), String> {
        let Some(Change::Create {
            creation,
            since,
            sizes,
            seen: known,
        }) = self.snapshots.changes.get(&change)
        else {
            return Err("no such change".to_owned());
        };
        if let Some(known) = known {
            return self.check_same(known, seen);
        }
        let expected = FoundSnapshot {
            name: creation.name.clone(),
            times: creation.times,
            state: Rc::clone(&creation.state),
            ..seen.clone()
        };
        self.check_same(&expected, seen)?;
        let units = (seen.disk.len() as u64 / self.script.unit_bytes()) as u32;
        if !sizes.contains(&units) {
            return Err(format!(
                "the new snapshot {} has {units} units, possible are {sizes:?}",
                seen.name
            ));
        }
        self.check_cut(*since, &seen.disk)
            .map_err(|what| format!("new snapshot {}: {what}", seen.name))
    }

    /// Checks that there was a moment, since `since`, at which the disk held this.
    fn check_cut(&self, since: Tick, disk: &[u8]) -> Result<(), String> {
        let unit_bytes = self.script.unit_bytes() as usize;
        let mut moments = vec![(since, Tick::MAX)];
        for (number, bytes) in disk.chunks_exact(unit_bytes).enumerate() {
            let found = self.script.decode(number as u32, bytes);
            let entries = self.units.get(number).map_or(&[][..], Vec::as_slice);
            let spans: Vec<(Tick, Tick)> = entries
                .iter()
                .filter(|entry| found == Found::Value(entry.value))
                .map(|entry| (entry.issued, entry.superseded.unwrap_or(Tick::MAX)))
                .collect();
            if let [(0, Tick::MAX)] = spans.as_slice() {
                continue;
            }
            let left = intersection(&moments, &spans);
            if left.is_empty() {
                let unit = number as u32;
                let allowed = self.readable(unit, since);
                let late = matches!(found, Found::Value(value) if allowed.contains(&value));
                let wrong = Violation {
                    unit,
                    found,
                    allowed,
                };
                return Err(match late {
                    true => format!("{wrong}, but not together with the units before it"),
                    false => wrong.to_string(),
                });
            }
            moments = left;
        }
        Ok(())
    }

    /// The process was killed, and a reader found these snapshots with the power still on. What was
    /// in flight may or may not be durable.
    pub fn snapshots_survived_kill(&mut self, found: Vec<FoundSnapshot>) {
        let mut old = std::mem::take(&mut self.snapshots);
        // An earlier kill may not have been settled yet.
        let earlier = std::mem::take(&mut self.killed_changes).into_iter();
        let earlier: Vec<Change> = earlier.filter_map(|id| old.changes.remove(&id)).collect();
        self.applying = None;
        let saved = found.into_iter().map(|seen| self.save(seen)).collect();
        let mut new = Snapshots::of(saved);
        for before in &old.saved {
            let (id, name) = (&before.seen.id, &before.seen.name);
            let change = match new.position(id) {
                None => Change::Return {
                    saved: before.clone(),
                },
                Some(at) if new.saved[at].seen.name != *name => Change::Rename {
                    id: id.clone(),
                    name: name.clone(),
                },
                Some(_) => continue,
            };
            self.killed_changes.push(new.add(change));
        }
        let added: Vec<String> = new
            .saved
            .iter()
            .map(|saved| saved.seen.id.clone())
            .filter(|id| old.position(id).is_none())
            .collect();
        let added = added.into_iter().map(|id| Change::Delete { id });
        let possible: Vec<Change> = added.chain(earlier).collect();
        for change in possible {
            self.killed_changes.push(new.add(change));
        }
        self.snapshots = new;
    }
}

/// The moments that lie in one of the spans of both.
fn intersection(one: &[(Tick, Tick)], other: &[(Tick, Tick)]) -> Vec<(Tick, Tick)> {
    let mut both = Vec::new();
    for &(first, end) in one {
        for &(from, to) in other {
            let span = (first.max(from), end.min(to));
            if span.0 < span.1 {
                both.push(span);
            }
        }
    }
    both.sort_unstable();
    // Spans of equal values may overlap.
    both.dedup_by(|next, kept| {
        let joined = next.0 <= kept.1;
        if joined {
            kept.1 = kept.1.max(next.1);
        }
        joined
    });
    both
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::ValueEncoding;

    const TIMES: Times = Times {
        date: (1, 2),
        vm_clock_nsec: 3,
        icount: None,
    };

    fn model() -> Model {
        Model::new(ValueEncoding::new(1, 16), &[5, 5], Rc::new([]))
    }

    fn creation() -> PendingCreate {
        PendingCreate {
            name: "new".to_owned(),
            times: TIMES,
            state: Rc::new([]),
        }
    }

    fn seen(model: &Model, values: [Value; 2]) -> FoundSnapshot {
        FoundSnapshot {
            id: "1".to_owned(),
            name: "new".to_owned(),
            times: TIMES,
            disk: model.script().encode_disk(&values).into(),
            state: Rc::new([]),
        }
    }

    #[test]
    fn a_snapshot_of_a_quiet_disk_is_the_disk_and_stays_so() {
        let mut model = model();
        let write = model.write(0..1, 6);
        model.end(write, true, false);
        let change = model.create(creation());
        assert!(model.check_snapshots(&[]).is_ok());
        assert!(model.check_snapshots(&[seen(&model, [5, 5])]).is_err());
        let right = seen(&model, [6, 5]);
        model.end_create(change, right.clone()).unwrap();
        let write = model.write(0..2, 7);
        model.end(write, true, false);
        assert!(model.check_snapshots(std::slice::from_ref(&right)).is_ok());
        assert!(model.check_snapshots(&[]).is_err());
        assert!(model.check_snapshots(&[seen(&model, [7, 7])]).is_err());
    }

    #[test]
    fn a_snapshot_made_during_writes_is_a_cut_through_them() {
        let mut model = model();
        let change = model.create(creation());
        let first = model.write(0..1, 6);
        model.end(first, true, false);
        let second = model.write(1..2, 7);
        for fine in [[5, 5], [6, 5], [6, 7]] {
            let image = seen(&model, fine);
            assert!(model.clone().check_snapshots(&[image]).is_ok(), "{fine:?}");
        }
        // The second write was issued when the first had completed.
        let wrong = seen(&model, [5, 7]);
        assert!(model.clone().check_snapshots(&[wrong]).is_err());
        let once = seen(&model, [6, 5]);
        assert!(model.check_snapshots(&[once]).is_ok());
        let other = seen(&model, [6, 7]);
        assert!(model.check_snapshots(&[other]).is_err(), "it had a content");
        model.undo_change(change);
        model.end(second, true, false);
        assert!(model.check_snapshots(&[]).is_ok());
    }

    #[test]
    fn snapshot_apply_is_atomic() {
        let mut model = model();
        let change = model.create(creation());
        let image = seen(&model, [5, 5]);
        model.end_create(change, image).unwrap();
        let write = model.write(0..2, 8);
        model.end(write, true, true);
        let applying = model.apply("1").unwrap();
        let bytes = |model: &Model, values: [Value; 2]| model.script().encode_disk(&values);
        assert!(model.check_view(&bytes(&model, [8, 8]), false).is_ok());
        assert!(model.check_view(&bytes(&model, [5, 5]), false).is_ok());
        assert!(model.check_view(&bytes(&model, [5, 8]), false).is_err());
        model.end_apply(&applying);
        assert!(model.check_view(&bytes(&model, [5, 5]), true).is_ok());
        assert!(model.check_view(&bytes(&model, [8, 8]), false).is_err());
    }

    #[test]
    fn a_kill_leaves_both_tables_until_a_flush() {
        let mut model = model();
        let change = model.create(creation());
        let image = seen(&model, [5, 5]);
        model.end_create(change, image.clone()).unwrap();
        model.delete("1");
        model.snapshots_survived_kill(Vec::new());
        assert!(model.check_snapshots(std::slice::from_ref(&image)).is_ok());
        let flush = model.flush();
        model.end_flush(flush, true);
        assert!(model.check_snapshots(&[]).is_ok());
        assert!(model.check_snapshots(&[image]).is_err());
    }
}
