//! A new snapshot table in place of a damaged one, with new L1 tables for snapshots that share theirs.
//!
//! They go behind the end of the file, where nothing refers to. Their clusters are counted first, then they are written,
//! then the header's fields switch to the table in one write. What only the old table referred to is counted down with the other
//! leaks.

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

use crate::addr::{ClusterIndex, HostOffset};
use crate::check::machine::Check;
use crate::check::reader::{Range, Reader};
use crate::check::tally::Tally;
use crate::header::field;
use crate::l1::COPIED;
use crate::snapshot;

/// Bytes of a new table that are written at once.
const PIECE_BYTES: usize = 1 << 20;

/// An L1 table that is copied.
#[derive(Clone, Debug)]
struct Copy {
    reader: Reader,
    /// Where its next piece goes.
    to: u64,
}

#[derive(Clone, Debug)]
pub(super) struct NewTables {
    /// Where the clusters lie, and how many there are.
    first: u64,
    clusters: u64,
    bytes: Vec<u8>,
    offset: u64,
    written: usize,
    copies: VecDeque<Copy>,
    /// The header's field that is to change, and what it becomes.
    pub(super) header: (u64, Vec<u8>),
    pub(super) actions: Vec<String>,
}

impl NewTables {
    /// `None` where nothing can be put behind the end of the file.
    pub(super) fn plan(check: &mut Check, file_len: u64) -> Option<NewTables> {
        let mut change = check.table_change.take()?;
        let (tally, geometry) = (&check.tally, check.tally.geometry);
        let len = snapshot::encode_table(&change.snapshots).len() as u64;
        let first = tally
            .clusters
            .max(geometry.clusters_for(file_len))
            .max(geometry.clusters_for(tally.outside_end));
        let offset = geometry.cluster_start(ClusterIndex(first)).0;
        let mut end = first.saturating_add(geometry.clusters_for(len));
        let mut copies = VecDeque::new();
        for index in change.shared {
            let snapshot = change.snapshots.get_mut(index)?;
            let len = u64::from(snapshot.l1_size).saturating_mul(8);
            let to = geometry.cluster_start(ClusterIndex(end)).0;
            let reader = Reader::new(snapshot.l1_table_offset.0, len, file_len);
            copies.push_back(Copy { reader, to });
            snapshot.l1_table_offset = HostOffset(to);
            end = end.saturating_add(geometry.clusters_for(len));
        }
        if end > first && geometry.cluster_start(ClusterIndex(end)).0 > tally.outside_far {
            return None;
        }
        let mut fields = (change.snapshots.len() as u32).to_be_bytes().to_vec();
        let place = if len > 0 { offset } else { 0 };
        fields.extend_from_slice(&place.to_be_bytes());
        Some(NewTables {
            first,
            clusters: end.saturating_sub(first),
            bytes: snapshot::encode_table(&change.snapshots),
            offset,
            written: 0,
            copies,
            header: (field::NB_SNAPSHOTS, fields),
            actions: change.actions,
        })
    }

    /// Counts the clusters as if they were referred to already.
    pub(super) fn refer(&self, tally: &mut Tally) {
        tally.plan(self.first, self.clusters);
    }

    /// The next write of the snapshot table.
    pub(super) fn next_write(&mut self, tally: &Tally) -> Option<(u64, Vec<u8>)> {
        let rest = self.bytes.get(self.written..)?;
        let piece = rest.get(..rest.len().min(PIECE_BYTES))?.to_vec();
        if piece.is_empty() {
            return None;
        }
        let at = self.offset.saturating_add(self.written as u64);
        self.written = self.written.saturating_add(piece.len());
        Some((at, whole_clusters(at, piece, tally)))
    }

    /// The next piece of an L1 table that is to be copied.
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
        for slot in piece.as_chunks_mut::<8>().0 {
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
