//! A walk over all L1 tables and then all L2 tables that changes their entries.

use alloc::vec::{self, Vec};

use crate::addr::{ClusterIndex, HostOffset};
use crate::bytes;
use crate::check::machine::{Check, L1Place};
use crate::check::mapping::{L2Tables, UseCounts};
use crate::check::reader::{Range, Reader};
use crate::check::repair::Repaired;
use crate::check::repair::entries::{Aim, Rules};
use crate::check::tally::Tally;
use crate::{l1, l2};

#[derive(Clone, Debug)]
pub(super) struct Walk {
    aim: Aim,
    waiting: vec::IntoIter<L1Place>,
    place: L1Place,
    reader: Reader,
    /// Nothing else claims the table that is being read.
    sole_owner: bool,
    found: L2Tables,
    /// The L2 table that is being read.
    current: Option<UseCounts>,
}

impl Walk {
    pub(super) fn new(check: &Check, aim: Aim) -> Walk {
        // Copied flags mean something in the active tables only.
        let places = check.l1_tables.iter().copied();
        let places: Vec<L1Place> = places
            .filter(|place| aim == Aim::Fix || place.active)
            .collect();
        Walk {
            aim,
            waiting: places.into_iter(),
            place: L1Place {
                offset: 0,
                entries: 0,
                active: false,
            },
            reader: Reader::default(),
            sole_owner: false,
            found: L2Tables::new(),
            current: None,
        }
    }

    pub(super) fn wanted(&mut self, check: &Check) -> Option<Range> {
        let tally = &check.tally;
        loop {
            if let Some(wanted) = self.reader.wanted() {
                return Some(wanted);
            }
            let Some(place) = self.waiting.next() else {
                break;
            };
            let len = u64::from(place.entries).saturating_mul(8);
            self.place = place;
            self.reader = Reader::new(place.offset, len, tally.file_len);
            self.sole_owner = is_claimed_once(tally, place.offset, len);
        }
        let size = tally.geometry.cluster_size();
        while let Some((offset, uses)) = self.found.pop_first() {
            // A table that something else claims as well is left alone.
            let cluster = tally.geometry.cluster_of(HostOffset(offset));
            if tally.references_to(cluster) == uses.all {
                self.current = Some(uses);
                return Some(Range::new(offset, size));
            }
        }
        None
    }

    pub(super) fn feed(
        &mut self,
        check: &Check,
        range: Range,
        table: &mut [u8],
        result: &mut Repaired,
    ) {
        match self.current.take() {
            Some(uses) => self.l2_table(&check.tally, range.offset, uses, table, result),
            None => {
                self.l1_piece(&check.tally, table, result);
                self.reader.advance(range.len);
            }
        }
    }

    /// The last read failed.
    pub(super) fn failed(&mut self, len: u64) {
        if self.current.take().is_none() {
            self.reader.advance(len);
        }
    }

    fn l1_piece(&mut self, tally: &Tally, piece: &mut [u8], result: &mut Repaired) {
        let active = self.place.active;
        let rules = Rules {
            tally,
            aim: self.aim,
            active,
        };
        for (number, slot) in piece.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let old = u64::from_be_bytes(*slot);
            if old == 0 {
                continue;
            }
            let new = match self.sole_owner {
                true => rules.l1(old),
                false => old,
            };
            if new != old {
                let index = self.reader.index.saturating_add(number as u64);
                let table = self.place.offset;
                result.corruption(|| {
                    alloc::format!(
                        "l1 table at {table:#x}, index {index}: {old:#018x} becomes {new:#018x}"
                    )
                });
                *slot = new.to_be_bytes();
            }
            self.note_l2_table(tally, new);
        }
    }

    fn note_l2_table(&mut self, tally: &Tally, raw: u64) {
        if let Ok(Some(table)) = l1::decode(raw, &tally.geometry)
            && table.offset.0 < tally.file_len
        {
            let uses = self.found.entry(table.offset.0).or_default();
            uses.all = uses.all.saturating_add(1);
            uses.active = uses.active.saturating_add(u64::from(self.place.active));
        }
    }

    fn l2_table(
        &self,
        tally: &Tally,
        offset: u64,
        uses: UseCounts,
        table: &mut [u8],
        result: &mut Repaired,
    ) {
        let geometry = tally.geometry;
        let rules = Rules {
            tally,
            aim: self.aim,
            active: uses.active > 0,
        };
        for index in 0..geometry.l2_entries() {
            let Some((raw, bitmap)) = l2::raw_at(table, index, &geometry) else {
                break;
            };
            if raw == 0 && bitmap == 0 {
                continue;
            }
            let new = rules.l2(raw, bitmap);
            if new == (raw, bitmap) {
                continue;
            }
            result.corruption(|| {
                let words = |raw: u64, bitmap: u64| match geometry.extended_l2() {
                    true => alloc::format!("{raw:#018x} {bitmap:#018x}"),
                    false => alloc::format!("{raw:#018x}"),
                };
                let (old, new) = (words(raw, bitmap), words(new.0, new.1));
                alloc::format!("l2 table at {offset:#x}, index {index}: {old} becomes {new}")
            });
            let at = index.saturating_mul(geometry.l2_entry_size()) as usize;
            bytes::put(table, at, &new.0.to_be_bytes());
            if geometry.extended_l2() {
                bytes::put(table, at.saturating_add(8), &new.1.to_be_bytes());
            }
        }
    }
}

/// Whether a table is the only owner of all its clusters.
pub(super) fn is_claimed_once(tally: &Tally, offset: u64, len: u64) -> bool {
    let first = tally.geometry.cluster_of(HostOffset(offset)).0;
    let last = offset.saturating_add(len.saturating_sub(1));
    let last = tally.geometry.cluster_of(HostOffset(last)).0;
    (first..=last).all(|cluster| tally.references_to(ClusterIndex(cluster)) == 1)
}
