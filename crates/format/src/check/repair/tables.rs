//! A new snapshot table in place of a damaged one, with new L1 tables for snapshots that share theirs; a new
//! directory of bitmaps; new L2 tables for entries of the active L1 table that share theirs.
//!
//! They go behind the end of the file, where nothing refers to. Their clusters are counted first, then they are written,
//! then the header's fields, or the entries, switch to each table in one write. What only the old tables referred to is counted down with the other
//! leaks.

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

use crate::addr::{ClusterIndex, HostOffset};
use crate::bitmap;
use crate::check::bitmaps::DirectoryChange;
use crate::check::machine::Check;
use crate::check::mapping::SharedTable;
use crate::check::reader::{Range, Reader};
use crate::check::repair::walk::is_claimed_once;
use crate::check::snapshots::TableChange;
use crate::check::tally::Tally;
use crate::extension::{self, BitmapsExtension};
use crate::geometry::Geometry;
use crate::header::{Header, field};
use crate::l1::COPIED;
use crate::snapshot;

/// Bytes of a new table that are written at once.
const PIECE_BYTES: usize = 1 << 20;

/// Most L2 tables that are copied, and most bytes of them. More are not damage but an attack: a small file must not fill
/// a disk.
const TABLE_COPIES_MAX: u64 = 1024;
const TABLE_COPIES_BYTES_MAX: u64 = 128 << 20;

/// What is written whole or not at all.
const SECTOR_BYTES: u64 = 512;

/// An L1 or L2 table that is copied.
#[derive(Clone, Debug)]
struct Copy {
    reader: Reader,
    entry_bytes: usize,
    /// Where its next piece goes.
    to: u64,
}

/// A table in memory.
#[derive(Clone, Debug)]
struct Table {
    at: u64,
    bytes: Vec<u8>,
    written: usize,
}

/// How the header changes.
#[derive(Clone, Debug)]
pub(super) enum Switch {
    /// The bytes at this offset become these.
    To(u64, Vec<u8>),
    /// The extension of the bitmaps, which is here, goes, and its autoclear bit.
    NoBitmaps(u64),
    /// The L1 entry at this offset becomes this one.
    L1Entry(u64, u64),
}

#[derive(Clone, Debug)]
pub(super) struct NewTables {
    geometry: Geometry,
    /// Where the clusters lie, and where they end.
    first: u64,
    end: u64,
    tables: VecDeque<Table>,
    copies: VecDeque<Copy>,
    pub(super) switches: Vec<Switch>,
    pub(super) actions: Vec<String>,
}

impl NewTables {
    /// `None` where nothing can be put behind the end of the file, and where nothing is to change.
    pub(super) fn plan(check: &mut Check, file_len: u64) -> Option<NewTables> {
        let (snapshots, bitmaps) = (check.table_change.take(), check.directory_change.take());
        let shared = core::mem::take(&mut check.shared_tables);
        if snapshots.is_none() && bitmaps.is_none() && shared.is_empty() {
            return None;
        }
        let (tally, geometry) = (&check.tally, check.tally.geometry);
        let first = tally
            .clusters
            .max(geometry.clusters_for(file_len))
            .max(geometry.clusters_for(tally.outside_end));
        let mut new = NewTables {
            geometry,
            first,
            end: first,
            tables: VecDeque::new(),
            copies: VecDeque::new(),
            switches: Vec::new(),
            actions: Vec::new(),
        };
        if let Some(change) = snapshots {
            new.snapshots(change, file_len)?;
        }
        if let Some(change) = bitmaps {
            new.bitmaps(change, &check.header)?;
        }
        new.own_tables(shared, check);
        let fits = geometry.cluster_start(ClusterIndex(new.end)).0 <= tally.outside_far;
        (new.end == first || fits).then_some(new)
    }

    /// Takes clusters for `len` bytes.
    fn take(&mut self, len: u64) -> u64 {
        let at = self.geometry.cluster_start(ClusterIndex(self.end)).0;
        self.end = self.end.saturating_add(self.geometry.clusters_for(len));
        at
    }

    fn table(&mut self, at: u64, bytes: Vec<u8>) {
        let written = 0;
        self.tables.push_back(Table { at, bytes, written });
    }

    fn snapshots(&mut self, mut change: TableChange, file_len: u64) -> Option<()> {
        let len = snapshot::encode_table(&change.snapshots).len() as u64;
        let offset = self.take(len);
        for index in change.shared {
            let snapshot = change.snapshots.get_mut(index)?;
            let len = u64::from(snapshot.l1_size).saturating_mul(8);
            let to = self.take(len);
            let reader = Reader::new(snapshot.l1_table_offset.0, len, file_len);
            self.copies.push_back(Copy {
                reader,
                entry_bytes: 8,
                to,
            });
            snapshot.l1_table_offset = HostOffset(to);
        }
        let mut fields = (change.snapshots.len() as u32).to_be_bytes().to_vec();
        let place = if len > 0 { offset } else { 0 };
        fields.extend_from_slice(&place.to_be_bytes());
        self.table(offset, snapshot::encode_table(&change.snapshots));
        self.switches.push(Switch::To(field::NB_SNAPSHOTS, fields));
        self.actions.extend(change.actions);
        Some(())
    }

    /// `None` where the extension cannot be changed by a write of one sector.
    fn bitmaps(&mut self, change: DirectoryChange, header: &Header) -> Option<()> {
        let extension = header.extension_at(extension::BITMAPS)?;
        self.actions.extend(change.actions);
        if change.bitmaps.is_empty() {
            self.switches.push(Switch::NoBitmaps(extension));
            return Some(());
        }
        let directory = bitmap::encode_directory(&change.bitmaps, &self.geometry).ok()?;
        let pointer = BitmapsExtension {
            count: change.bitmaps.len() as u32,
            directory_len_bytes: directory.len() as u64,
            directory_offset: HostOffset(self.take(directory.len() as u64)),
        };
        self.table(pointer.directory_offset.0, directory);
        let (at, data) = (extension.saturating_add(8), pointer.encode().data);
        let last = at.saturating_add(data.len() as u64).saturating_sub(1);
        self.switches.push(Switch::To(at, data));
        (at / SECTOR_BYTES == last / SECTOR_BYTES).then_some(())
    }

    /// Gives entries of the active L1 table that share an L2 table copies of it. Not where something else claims the L1
    /// table, where there are too many, or where they do not fit; and not where refcounts are too narrow for the data
    /// that such tables have in common: a program that writes would take it for its own.
    fn own_tables(&mut self, shared: Vec<SharedTable>, check: &Check) {
        let (tally, l1) = (&check.tally, check.header.l1_table_offset.0);
        let len = u64::from(check.header.l1_size).saturating_mul(8);
        let size = self.geometry.cluster_size();
        let count = shared.len() as u64;
        let most = TABLE_COPIES_MAX.min(TABLE_COPIES_BYTES_MAX.checked_div(size).unwrap_or(0));
        let end = ClusterIndex(self.end.saturating_add(count));
        let fits = self.geometry.cluster_start(end).0 <= tally.outside_far;
        if count > most || !fits || tally.unfollowed || !is_claimed_once(tally, l1, len) {
            return;
        }
        for SharedTable { l1_index, offset } in shared {
            let to = self.take(size);
            self.copies.push_back(Copy {
                reader: Reader::new(offset, size, tally.file_len),
                entry_bytes: self.geometry.l2_entry_size() as usize,
                to,
            });
            let entry = l1.saturating_add(l1_index.saturating_mul(8));
            self.switches.push(Switch::L1Entry(entry, to));
            self.actions.push(alloc::format!(
                "l1 index {l1_index} shares the l2 table at {offset:#x} and gets a copy of it"
            ));
        }
    }

    /// Counts the clusters as if they were referred to already.
    pub(super) fn refer(&self, tally: &mut Tally) {
        tally.plan(self.first, self.end.saturating_sub(self.first));
    }

    /// The next write of a table.
    pub(super) fn next_write(&mut self, tally: &Tally) -> Option<(u64, Vec<u8>)> {
        while let Some(table) = self.tables.front_mut() {
            let rest = table.bytes.get(table.written..).unwrap_or_default();
            let piece = rest.get(..PIECE_BYTES).unwrap_or(rest).to_vec();
            if piece.is_empty() {
                self.tables.pop_front();
                continue;
            }
            let at = table.at.saturating_add(table.written as u64);
            table.written = table.written.saturating_add(piece.len());
            return Some((at, whole_clusters(at, piece, tally)));
        }
        None
    }

    /// The next piece of a table that is to be copied.
    pub(super) fn wanted(&mut self) -> Option<Range> {
        while let Some(copy) = self.copies.front() {
            match copy.reader.wanted() {
                Some(range) => return Some(range),
                None => self.copies.pop_front(),
            };
        }
        None
    }

    /// Where the piece goes, and its bytes: copied flags mean nothing there.
    pub(super) fn copy(&mut self, mut piece: Vec<u8>, tally: &Tally) -> Option<(u64, Vec<u8>)> {
        let copy = self.copies.front_mut()?;
        let (at, len) = (copy.to, piece.len() as u64);
        copy.reader.advance(len);
        copy.to = at.saturating_add(len);
        let words = piece.as_chunks_mut::<8>().0.iter_mut();
        for slot in words.step_by(copy.entry_bytes / 8) {
            *slot = (u64::from_be_bytes(*slot) & !COPIED).to_be_bytes();
        }
        Some((at, whole_clusters(at, piece, tally)))
    }
}

/// The last cluster is written whole.
fn whole_clusters(at: u64, mut piece: Vec<u8>, tally: &Tally) -> Vec<u8> {
    let end = at.saturating_add(piece.len() as u64);
    let whole = end.next_multiple_of(tally.geometry.cluster_size());
    piece.resize(whole.saturating_sub(at) as usize, 0);
    piece
}
