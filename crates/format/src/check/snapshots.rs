//! Check stage: the snapshot table.

use alloc::string::String;
use alloc::vec::Vec;

use crate::check::reader::Range;
use crate::check::tally::Tally;
use crate::geometry::Version;
use crate::header::Header;
use crate::snapshot::{self, Progress, Snapshot};

/// Bytes asked for at a time.
const PIECE_BYTES: u64 = 1 << 20;

#[derive(Clone, Debug)]
pub(super) struct SnapshotTable {
    offset: u64,
    count: u32,
    bytes: Vec<u8>,
}

impl SnapshotTable {
    pub(super) fn new(header: &Header) -> SnapshotTable {
        SnapshotTable {
            offset: header.snapshots_offset.0,
            count: header.nb_snapshots,
            bytes: Vec::new(),
        }
    }

    /// What is still missing. The table may end anywhere, so pieces are read ahead, up to the end of
    /// the file.
    pub(super) fn wanted(&self, tally: &mut Tally) -> Option<Range> {
        match snapshot::table_len(&self.bytes, self.count) {
            Ok(Progress::Len(_)) => None,
            Ok(Progress::Need(needed)) => {
                let have = self.bytes.len() as u64;
                let offset = self.offset.saturating_add(have);
                let ahead = tally.file_len.saturating_sub(offset).min(PIECE_BYTES);
                Some(Range {
                    offset,
                    len: needed.saturating_sub(have).max(ahead),
                })
            }
            Err(error) => {
                tally.stop(format_args!("cannot read the snapshots: {error}"));
                None
            }
        }
    }

    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The snapshots whose L1 tables can be looked at.
    pub(super) fn finish(self, tally: &mut Tally) -> Vec<Snapshot> {
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
    let text = |bytes: &[u8]| alloc::format!("{}", String::from_utf8_lossy(bytes).escape_debug());
    alloc::format!(
        "snapshot {} ('{}')",
        text(&snapshot.id),
        text(&snapshot.name)
    )
}
