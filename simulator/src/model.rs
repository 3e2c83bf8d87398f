//! Model of the guest's disk: for every unit the values that a read may return now, and those that a
//! power cut may leave.
//!
//! Each unit is a register. A request adds an entry when it is issued. When it completes, it
//! *supersedes* every entry whose request had completed before it was issued; of requests that
//! overlap in time any may win. A read may return what was not superseded when it was issued, or
//! what was issued while it ran. After a power cut a unit may hold any entry at all, except those
//! that are *settled*: superseded before a flush was asked for that has since returned, or before
//! a write with FUA that has. That is rule O4, and everything it leaves open.
//!
//! A discard adds zeros and supersedes nothing. A request that failed may have happened.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use crate::content::{Found, Value, ValueEncoding, ZERO};

mod snapshots;

use snapshots::Snapshots;
pub use snapshots::{ChangeId, FoundSnapshot, ModelSnapshot, PendingApply, PendingCreate};

type Tick = u64;

#[derive(Clone, Debug)]
struct Entry {
    value: Value,
    issued: Tick,
    /// `Tick::MAX` while in flight.
    completed: Tick,
    superseded: Option<Tick>,
    /// No power cut brings it back.
    settled: bool,
}

/// What a write, discard or resize in flight gives back when it ends.
#[derive(Debug)]
pub struct PendingChange {
    units: Range<u32>,
    issued: Tick,
    /// Whether it supersedes what was there (a discard does not).
    replaces: bool,
}

/// A read in flight.
#[derive(Debug)]
pub struct PendingRead {
    issued: Tick,
}

/// A flush in flight.
#[derive(Debug)]
pub struct PendingFlush {
    issued: Tick,
}

/// The guest's disk as it should be.
#[derive(Clone, Debug)]
pub struct Model {
    script: ValueEncoding,
    /// What lies below the image.
    below: Rc<[Value]>,
    /// One for each unit of the disk, and more when a longer disk may come back.
    units: Vec<Vec<Entry>>,
    /// Size of the disk in units.
    size: u32,
    /// Units with more than one entry.
    open: BTreeSet<u32>,
    now: Tick,
    reads: BTreeMap<Tick, u32>,
    /// A flush failed: until the image is opened again, reads may give anything, because the host
    /// may have forgotten data for which the engine has a mapping.
    shaken: bool,
    /// Other sizes in units that a power cut may leave. Cleared by `settle_size` alone.
    other_sizes: Vec<u32>,
    /// The internal snapshots.
    snapshots: Snapshots,
    /// Changes of these that a power cut may still take back, because the process was killed.
    killed_changes: Vec<ChangeId>,
    /// An apply in flight: when it was issued, and the size in units that it brings.
    applying: Option<(Tick, u32)>,
}

/// A unit that holds what it must not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The unit.
    pub unit: u32,
    /// What it holds.
    pub found: Found,
    /// What it may hold.
    pub allowed: Vec<Value>,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let allowed: Vec<String> = self
            .allowed
            .iter()
            .map(|&value| Found::Value(value).to_string())
            .collect();
        write!(
            out,
            "unit {} holds {}, allowed: {}",
            self.unit,
            self.found,
            allowed.join(", ")
        )
    }
}

impl Model {
    /// A disk whose units hold these values, all durable, over one that holds `below`.
    pub fn new(script: ValueEncoding, values: &[Value], below: Rc<[Value]>) -> Model {
        Model {
            script,
            below,
            units: values
                .iter()
                .map(|&value| vec![Entry::base(value)])
                .collect(),
            size: values.len() as u32,
            open: BTreeSet::new(),
            now: 1,
            reads: BTreeMap::new(),
            shaken: false,
            other_sizes: Vec::new(),
            snapshots: Snapshots::default(),
            killed_changes: Vec::new(),
            applying: None,
        }
    }

    /// Size of the disk in units.
    pub fn len_units(&self) -> u32 {
        self.size
    }

    /// The same disk, as it was found to be after a power cut or a close.
    pub fn restarted(&self, values: &[Value], snapshots: Vec<FoundSnapshot>) -> Model {
        Model::new(self.script, values, Rc::clone(&self.below)).with_snapshots(snapshots)
    }

    /// The script of the content.
    pub fn script(&self) -> ValueEncoding {
        self.script
    }

    /// The sizes in units that the disk may have after a power cut.
    pub fn sizes(&self) -> Vec<u32> {
        let mut sizes = self.other_sizes.clone();
        sizes.push(self.len_units());
        sizes
    }

    /// A write of `value` to `units` is issued.
    pub fn write(&mut self, units: Range<u32>, value: Value) -> PendingChange {
        self.issue(units, value, true)
    }

    /// A discard is issued.
    pub fn discard(&mut self, units: Range<u32>) -> PendingChange {
        self.issue(units, ZERO, false)
    }

    fn issue(&mut self, units: Range<u32>, value: Value, replaces: bool) -> PendingChange {
        let issued = self.tick();
        for unit in units.clone() {
            self.units[unit as usize].push(Entry::issued(value, issued));
            self.open.insert(unit);
        }
        PendingChange {
            units,
            issued,
            replaces,
        }
    }

    /// A write or discard has ended, well or not; `durable` when it promised to be so by now.
    pub fn end(&mut self, request: PendingChange, well: bool, durable: bool) {
        let now = self.tick();
        for unit in request.units {
            let Some(entries) = self.units.get_mut(unit as usize) else {
                continue;
            };
            for entry in entries.iter_mut() {
                if entry.issued == request.issued {
                    entry.completed = now;
                } else if well && request.replaces && entry.completed < request.issued {
                    entry.superseded.get_or_insert(now);
                    entry.settled |= durable;
                }
            }
            self.forget(unit);
        }
    }

    /// A read is issued.
    pub fn read(&mut self) -> PendingRead {
        let issued = self.tick();
        self.reads.insert(issued, 0);
        PendingRead { issued }
    }

    /// A read of `bytes` from the unit `first` on has ended well; the first unit that is wrong.
    pub fn check_read(
        &mut self,
        read: &PendingRead,
        first: u32,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        if self.shaken {
            return Ok(());
        }
        let now = self.tick();
        for (number, part) in bytes
            .chunks_exact(self.script.unit_bytes() as usize)
            .enumerate()
        {
            let unit = first + number as u32;
            if unit >= self.size {
                // The disk was set to a shorter snapshot meanwhile.
                break;
            }
            let found = self.script.decode(unit, part);
            let allowed = self.readable(unit, read.issued);
            match found {
                Found::Value(value) if allowed.contains(&value) => {
                    self.pin_at(unit, value, read.issued, now);
                }
                _ => {
                    return Err(Violation {
                        unit,
                        found,
                        allowed,
                    });
                }
            }
        }
        Ok(())
    }

    /// Whether every unit may read as zeros, for a caller that was told so since `read`.
    pub fn check_zero(&self, read: &PendingRead, units: Range<u32>) -> Result<(), Violation> {
        for unit in units.start..units.end.min(self.size) {
            let allowed = self.readable(unit, read.issued);
            if !allowed.contains(&ZERO) {
                return Err(Violation {
                    unit,
                    found: Found::Value(ZERO),
                    allowed,
                });
            }
        }
        Ok(())
    }

    /// A read is over.
    pub fn end_read(&mut self, read: PendingRead) {
        self.reads.remove(&read.issued);
    }

    fn readable(&self, unit: u32, since: Tick) -> Vec<Value> {
        let entries = &self.units[unit as usize];
        let live = |entry: &&Entry| entry.superseded.is_none_or(|at| at > since);
        let mut values: Vec<Value> = entries
            .iter()
            .filter(live)
            .map(|entry| entry.value)
            .collect();
        values.dedup();
        values
    }

    /// What was read once, with nothing in flight, stays so.
    fn pin_at(&mut self, unit: u32, value: Value, since: Tick, now: Tick) {
        let Some(entries) = self.units.get_mut(unit as usize) else {
            return;
        };
        let quiet = entries.iter().all(|entry| entry.completed < since);
        if !quiet || entries.len() < 2 {
            return;
        }
        for entry in entries.iter_mut().filter(|entry| entry.value != value) {
            entry.superseded.get_or_insert(now);
        }
    }

    /// The host has failed a flush, of whatever origin: unflushed data may be gone.
    pub fn shake(&mut self) {
        self.shaken = true;
    }

    /// A flush is issued.
    pub fn flush(&mut self) -> PendingFlush {
        PendingFlush {
            issued: self.tick(),
        }
    }

    /// A flush has ended. After one that failed, unflushed data may be gone.
    pub fn end_flush(&mut self, flush: PendingFlush, well: bool) {
        if !well {
            self.shaken = true;
            return;
        }
        self.settle_table();
        for unit in self.open.clone() {
            for entry in &mut self.units[unit as usize] {
                entry.settled |= entry.superseded.is_some_and(|at| at < flush.issued);
            }
            self.forget(unit);
        }
    }

    /// Drops entries that no read can return any more.
    fn forget(&mut self, unit: u32) {
        let oldest = self.reads.keys().next().copied().unwrap_or(Tick::MAX);
        let entries = &mut self.units[unit as usize];
        entries.retain(|entry| {
            !(entry.settled
                && entry
                    .superseded
                    .is_none_or(|superseded| superseded <= oldest))
        });
        if entries.len() < 2 {
            self.open.remove(&unit);
        }
    }

    /// A resize is issued; when it shrinks the disk, nothing else is in flight. It must be followed
    /// by a flush, and that by `settle_size`.
    pub fn resize(&mut self, len_units: u32) -> PendingChange {
        let old = self.size;
        self.note_size(len_units);
        self.other_sizes.push(len_units);
        if len_units >= old {
            let len = self.units.len().max(len_units as usize);
            self.units.resize_with(len, || vec![Entry::base(ZERO)]);
            return self.issue(old..len_units, ZERO, true);
        }
        let cut = self.discard(len_units..old);
        // What is cut off is unmapped before the size changes: what lies below shows.
        for unit in len_units..old {
            let value = self.below.get(unit as usize).copied().unwrap_or(ZERO);
            self.units[unit as usize].push(Entry::issued(value, cut.issued));
        }
        cut
    }

    /// A resize has ended. After one that failed the size is what the engine says it is.
    pub fn end_resize(&mut self, resize: PendingChange, len_units: u32, well: bool) {
        self.end(resize, well, false);
        if well {
            self.other_sizes = vec![self.size];
            self.size = len_units;
        }
    }

    /// A shrink and the flush behind it are over: what is beyond the end is gone.
    pub fn settle_size(&mut self, len_units: u32) {
        self.units.truncate(len_units as usize);
        self.open.split_off(&len_units);
        self.other_sizes.clear();
    }

    /// The writer was killed, and a reader found these values with the power still on: they are
    /// what reads give from now on, and no more durable than before.
    pub fn survived_kill(&mut self, values: &[Value]) {
        let now = self.tick();
        self.reads.clear();
        self.other_sizes.push(self.size);
        self.size = values.len() as u32;
        let len = self.units.len().max(values.len());
        self.units.resize_with(len, || vec![Entry::base(ZERO)]);
        for (entries, &value) in self.units.iter_mut().zip(values) {
            for entry in entries.iter_mut() {
                entry.completed = entry.completed.min(now);
                if entry.value != value {
                    entry.superseded.get_or_insert(now);
                } else if entry.superseded.is_some() && !entry.settled {
                    entry.superseded = None;
                }
            }
        }
    }

    /// Checks what is there after a power cut, or after a close (`exact`), when only what is
    /// readable counts.
    pub fn check_view(&self, bytes: &[u8], exact: bool) -> Result<Vec<Value>, Violation> {
        let Some(worlds) = self.worlds() else {
            return self.check_world(bytes, exact);
        };
        let units = (bytes.len() as u64 / self.script.unit_bytes()) as u32;
        let fits = |world: &&Model| world.sizes().contains(&units);
        let mut outcome = self.check_world(bytes, exact);
        for world in worlds.iter().filter(fits) {
            outcome = world.check_world(bytes, exact);
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    fn check_world(&self, bytes: &[u8], exact: bool) -> Result<Vec<Value>, Violation> {
        let unit_bytes = self.script.unit_bytes() as usize;
        let mut values = Vec::with_capacity(bytes.len() / unit_bytes);
        for (number, part) in bytes.chunks_exact(unit_bytes).enumerate() {
            let unit = number as u32;
            let found = self.script.decode(unit, part);
            let entries = self.units.get(number).map_or(&[][..], Vec::as_slice);
            // Nearly all units have one entry.
            if let ([only], Found::Value(value)) = (entries, found)
                && only.value == value
                && !only.settled
            {
                values.push(value);
                continue;
            }
            let allowed = match (exact, entries) {
                (_, []) => vec![ZERO],
                (true, _) => self.readable(unit, self.now),
                (false, entries) => survivors(entries),
            };
            match found {
                Found::Value(value) if allowed.contains(&value) => values.push(value),
                _ => {
                    return Err(Violation {
                        unit,
                        found,
                        allowed,
                    });
                }
            }
        }
        Ok(values)
    }

    fn tick(&mut self) -> Tick {
        self.now += 1;
        self.now
    }
}

impl Entry {
    fn issued(value: Value, issued: Tick) -> Entry {
        Entry {
            value,
            issued,
            completed: Tick::MAX,
            superseded: None,
            settled: false,
        }
    }

    fn base(value: Value) -> Entry {
        Entry {
            value,
            issued: 0,
            completed: 0,
            superseded: None,
            settled: false,
        }
    }
}

fn survivors(entries: &[Entry]) -> Vec<Value> {
    let mut values: Vec<Value> = entries
        .iter()
        .filter(|entry| !entry.settled)
        .map(|entry| entry.value)
        .collect();
    values.dedup();
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        Model::new(ValueEncoding::new(1, 16), &[5, 5], Rc::new([]))
    }

    fn view(model: &Model, values: [Value; 2]) -> Vec<u8> {
        let mut bytes = vec![0; 32];
        for (unit, part) in bytes.chunks_exact_mut(16).enumerate() {
            model.script.encode(values[unit], unit as u32, part);
        }
        bytes
    }

    #[test]
    fn an_unflushed_write_may_be_lost_and_a_flushed_one_may_not() {
        let mut model = model();
        let write = model.write(0..1, 6);
        model.end(write, true, false);
        assert!(model.check_view(&view(&model, [5, 5]), false).is_ok());
        assert!(model.check_view(&view(&model, [6, 5]), false).is_ok());
        assert!(model.check_view(&view(&model, [5, 5]), true).is_err());
        let flush = model.flush();
        model.end_flush(flush, true);
        assert!(model.check_view(&view(&model, [6, 5]), false).is_ok());
        let wrong = model.check_view(&view(&model, [5, 5]), false).unwrap_err();
        assert_eq!((wrong.unit, wrong.allowed), (0, vec![6]));
    }

    #[test]
    fn a_write_that_completes_during_a_flush_is_not_settled_by_it() {
        let mut model = model();
        let write = model.write(0..1, 6);
        let flush = model.flush();
        model.end(write, true, false);
        model.end_flush(flush, true);
        assert!(model.check_view(&view(&model, [5, 5]), false).is_ok());
    }

    #[test]
    fn a_write_with_fua_settles_its_own_units_only() {
        let mut model = model();
        let other = model.write(1..2, 6);
        model.end(other, true, false);
        let write = model.write(0..1, 7);
        model.end(write, true, true);
        assert!(model.check_view(&view(&model, [7, 5]), false).is_ok());
        assert!(model.check_view(&view(&model, [5, 6]), false).is_err());
    }

    #[test]
    fn overlapping_writes_are_undecided_until_first_read() {
        let mut model = model();
        let (first, second) = (model.write(0..1, 6), model.write(0..1, 7));
        model.end(first, true, false);
        model.end(second, true, false);
        let read = model.read();
        assert!(model.check_read(&read, 0, &view(&model, [6, 5])).is_ok());
        model.end_read(read);
        let read = model.read();
        assert!(model.check_read(&read, 0, &view(&model, [7, 5])).is_err());
    }

    #[test]
    fn a_read_may_see_what_was_overwritten_while_it_ran_and_nothing_older() {
        let mut model = model();
        let write = model.write(0..1, 6);
        model.end(write, true, false);
        let read = model.read();
        let write = model.write(0..1, 7);
        model.end(write, true, false);
        let flush = model.flush();
        model.end_flush(flush, true);
        assert!(model.check_read(&read, 0, &view(&model, [6, 5])).is_ok());
        assert!(model.check_read(&read, 0, &view(&model, [5, 5])).is_err());
        assert!(model.check_view(&view(&model, [6, 5]), false).is_err());
    }

    #[test]
    fn a_discard_leaves_zeros_or_what_was_there() {
        let mut model = model();
        let discard = model.discard(0..2);
        model.end(discard, true, false);
        let flush = model.flush();
        model.end_flush(flush, true);
        assert!(model.check_view(&view(&model, [0, 5]), true).is_ok());
        assert!(model.check_view(&view(&model, [5, 0]), false).is_ok());
        assert!(model.check_view(&view(&model, [6, 0]), false).is_err());
    }
}
