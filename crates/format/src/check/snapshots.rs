//! Check stage: the snapshot table.

use alloc::collections::BTreeSet;
use alloc::string::String;
use alloc::vec::Vec;

use crate::check::reader::Range;
use crate::check::tally::Tally;
use crate::geometry::Version;
use crate::header::Header;
use crate::snapshot::{self, Progress, Salvaged, Snapshot};

/// Bytes asked for at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Bytes of an id or a name in a message; a damaged one may be long.
const NAME_BYTES_TOLD: usize = 256;

#[derive(Clone, Debug)]
pub(super) struct SnapshotTable {
    offset: u64,
    count: u32,
    bytes: Vec<u8>,
    /// For a repair: what can be kept of the table, whatever the rest of it is.
    salvage: Option<Salvage>,
}

/// The table that is to take the place of a damaged one.
#[derive(Clone, Debug)]
pub(super) struct TableChange {
    pub(super) snapshots: Vec<Snapshot>,
    /// Which of them get an L1 table of their own, a copy of the one that they share.
    pub(super) shared: Vec<usize>,
    /// What differs, one line each.
    pub(super) actions: Vec<String>,
}

/// The entries of a damaged table as far as they were found.
#[derive(Clone, Debug, Default)]
struct Salvage {
    /// Entries, and whether their extra data was cut.
    found: Vec<(Snapshot, bool)>,
    /// Entries that were looked at, and where the next begins.
    done: u32,
    at: usize,
    /// Where the last entry ends that is one.
    end: usize,
    blank: u32,
    lost: u32,
    /// Where the active L1 table is.
    active_l1: u64,
}

impl Salvage {
    /// Goes on as far as `bytes` allow: how many are needed to go further.
    fn walk(&mut self, bytes: &[u8], count: u32, room: u64) -> Option<u64> {
        while self.done < count {
            match snapshot::salvage_entry(bytes, self.at, room) {
                Salvaged::Need(needed) => return Some(needed),
                Salvaged::Lost => {
                    let left = count.saturating_sub(self.done);
                    self.lost = self.lost.saturating_add(left);
                    self.done = count;
                }
                Salvaged::Entry { snapshot, cut, end } => {
                    self.done = self.done.saturating_add(1);
                    self.at = end;
                    if snapshot.is_blank() {
                        self.blank = self.blank.saturating_add(1);
                    } else {
                        self.end = end;
                        self.found.push((snapshot, cut));
                    }
                }
            }
        }
        None
    }

    /// What is kept, and how the table is to change.
    fn finish(mut self, offset: u64, tally: &mut Tally) -> (Vec<Snapshot>, Option<TableChange>) {
        let table = Range::new(offset, self.end as u64);
        tally.refer(table, 1, format_args!("snapshot table"));
        let (mut kept, mut actions) = (Vec::new(), Vec::new());
        for (mut snapshot, cut) in core::mem::take(&mut self.found) {
            let name = label(&snapshot);
            if let Some(why) = unreadable(&snapshot, tally) {
                actions.push(alloc::format!("{name} is dropped: {why}"));
                continue;
            }
            if cut {
                tally.corrupt(1, format_args!("{name} has too much extra data"));
                actions.push(alloc::format!(
                    "{name}: too much extra data is cut to what is known"
                ));
            }
            if tally.geometry.version() == Version::V3 && snapshot.disk_size.is_none() {
                tally.corrupt(1, format_args!("{name} has incomplete extra data"));
                // What it stands for already.
                snapshot.disk_size = Some(tally.disk_size);
                actions.push(alloc::format!("{name}: incomplete extra data is completed"));
            }
            kept.push(snapshot);
        }
        self.note_lost(tally, &mut actions);
        let shared = self.shared(&kept, tally);
        for snapshot in shared.iter().filter_map(|index| kept.get(*index)) {
            let (name, at) = (label(snapshot), snapshot.l1_table_offset);
            actions.push(alloc::format!(
                "{name} shares the l1 table at {at:#x} and gets a copy of it"
            ));
        }
        let snapshots = kept.clone();
        let change = (!actions.is_empty()).then_some(TableChange {
            snapshots,
            shared,
            actions,
        });
        (kept, change)
    }

    fn note_lost(&self, tally: &mut Tally, actions: &mut Vec<String>) {
        if self.blank > 0 {
            let blank = self.blank;
            tally.corrupt(1, format_args!("snapshot table has {blank} blank entries"));
            actions.push(alloc::format!(
                "snapshot table: {blank} blank entries are dropped"
            ));
        }
        if self.lost > 0 {
            let lost = self.lost;
            tally.corrupt(
                1,
                format_args!("snapshot table: the last {lost} entries cannot be told apart"),
            );
            actions.push(alloc::format!(
                "snapshot table: the last {lost} entries, which cannot be told apart, are dropped"
            ));
        }
    }

    /// Those whose L1 table is the active one or that of a snapshot before them. All copies together are no longer
    /// than the file.
    fn shared(&self, kept: &[Snapshot], tally: &Tally) -> Vec<usize> {
        let mut seen = BTreeSet::from([self.active_l1]);
        let mut left = tally.file_len;
        let mut shared = Vec::new();
        for (index, snapshot) in kept.iter().enumerate() {
            let is_new = snapshot.l1_size == 0 || seen.insert(snapshot.l1_table_offset.0);
            let len = u64::from(snapshot.l1_size).saturating_mul(8);
            if let Some(rest) = left.checked_sub(len).filter(|_| !is_new) {
                left = rest;
                shared.push(index);
            }
        }
        shared
    }
}

/// Why nothing of a snapshot's disk can be read, which is also reported; `None` if something can.
fn unreadable(snapshot: &Snapshot, tally: &mut Tally) -> Option<String> {
    if let Err(error) = snapshot.check(&tally.geometry) {
        tally.corrupt(1, format_args!("{error}"));
        return Some(alloc::format!("{error}"));
    }
    let offset = snapshot.l1_table_offset.0;
    let len = u64::from(snapshot.l1_size).saturating_mul(8);
    let behind = offset.saturating_add(len).saturating_sub(tally.file_len);
    if offset < tally.file_len || behind < tally.geometry.cluster_size() {
        return None;
    }
    let name = label(snapshot);
    tally.refer(
        Range::new(offset, len),
        1,
        format_args!("l1 table of {name}"),
    );
    Some(alloc::format!(
        "its l1 table at {offset:#x} lies outside of the file"
    ))
}

impl SnapshotTable {
    pub(super) fn new(header: &Header) -> SnapshotTable {
        SnapshotTable {
            offset: header.snapshots_offset.0,
            count: header.nb_snapshots,
            bytes: Vec::new(),
            salvage: None,
        }
    }

    /// The same for a repair, which goes on where the table is damaged.
    pub(super) fn salvaging(header: &Header) -> SnapshotTable {
        SnapshotTable {
            salvage: Some(Salvage {
                active_l1: header.l1_table_offset.0,
                ..Salvage::default()
            }),
            ..SnapshotTable::new(header)
        }
    }

    /// So many more entries are lost.
    pub(super) fn lose(&mut self, more: u32) {
        if let Some(salvage) = &mut self.salvage {
            salvage.lost = salvage.lost.saturating_add(more);
        }
    }

    /// What is still missing. The table may end anywhere, so pieces are read ahead, up to the end of
    /// the file.
    pub(super) fn wanted(&mut self, tally: &mut Tally) -> Option<Range> {
        let needed = match &mut self.salvage {
            Some(salvage) => {
                let room = tally.file_len.saturating_sub(self.offset);
                salvage.walk(&self.bytes, self.count, room)?
            }
            None => match snapshot::table_len(&self.bytes, self.count) {
                Ok(Progress::Len(_)) => return None,
                Ok(Progress::Need(needed)) => needed,
                Err(error) => {
                    tally.stop(format_args!("cannot read the snapshots: {error}"));
                    return None;
                }
            },
        };
        let have = self.bytes.len() as u64;
        let offset = self.offset.saturating_add(have);
        let ahead = tally.file_len.saturating_sub(offset).min(PIECE_BYTES);
        Some(Range {
            offset,
            len: needed.saturating_sub(have).max(ahead),
        })
    }

    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The snapshots whose L1 tables can be looked at, and what a repair makes of the table.
    pub(super) fn finish(self, tally: &mut Tally) -> (Vec<Snapshot>, Option<TableChange>) {
        match self.salvage {
            Some(salvage) => salvage.finish(self.offset, tally),
            None => (self.parse(tally), None),
        }
    }

    fn parse(self, tally: &mut Tally) -> Vec<Snapshot> {
        let (all, len) = match snapshot::parse_entries(&self.bytes, self.count) {
            Ok(parsed) => parsed,
            Err(error) => {
                tally.stop(format_args!("cannot read the snapshots: {error}"));
                return Vec::new();
            }
        };
        tally.refer(
            Range::new(self.offset, len),
            1,
            format_args!("snapshot table"),
        );
        let geometry = tally.geometry;
        let mut sound = Vec::new();
        for snapshot in all {
            if geometry.version() == Version::V3 && snapshot.disk_size.is_none() {
                tally.corrupt(
                    1,
                    format_args!("{} has incomplete extra data", label(&snapshot)),
                );
            }
            match snapshot.check(&geometry) {
                Ok(()) => sound.push(snapshot),
                Err(error) => {
                    tally.unfollowed = true;
                    tally.corrupt(1, format_args!("{error}"));
                }
            }
        }
        sound
    }
}

/// How a snapshot is called in messages.
pub(super) fn label(snapshot: &Snapshot) -> String {
    let text = |bytes: &[u8]| {
        let start = bytes.get(..NAME_BYTES_TOLD).unwrap_or(bytes);
        alloc::format!("{}", String::from_utf8_lossy(start).escape_debug())
    };
    alloc::format!(
        "snapshot {} ('{}')",
        text(&snapshot.id),
        text(&snapshot.name)
    )
}
