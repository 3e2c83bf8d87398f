//! Check stages: L1 tables and L2 tables, of the active image and of every snapshot.
//!
//! L1 tables are read first; they leave a list of L2 tables, each with how often it is used. An L2
//! table that snapshots share is then read once, and each of its entries counts as often.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::{self, Vec};

use crate::addr::{ClusterIndex, HostOffset};
use crate::bytes;
use crate::check::reader::{Range, Reader};
use crate::check::snapshots::label;
use crate::check::tally::Tally;
use crate::compressed::CompressedDescriptor;
use crate::error::{Corruption, CorruptionKind};
use crate::header::Header;
use crate::l1::{self, COPIED, OFFSET_MASK};
use crate::l2::{self, COMPRESSED, L2Entry, ZERO};
use crate::snapshot::Snapshot;

/// How often an L2 table is used.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UseCounts {
    pub(super) active: u64,
    pub(super) all: u64,
    /// Its L1 index in the active image.
    active_index: u64,
}

/// An entry of the active L1 table whose L2 table an earlier entry has too. A program that writes may take
/// a table for that of one entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedTable {
    pub(super) l1_index: u64,
    pub(super) offset: u64,
}

/// L2 tables by host offset.
pub(super) type L2Tables = BTreeMap<u64, UseCounts>;

/// Memory of an entry of [`L2Tables`] in bytes, with the map's own share.
const L2_TABLE_BYTES: u64 = 56;

/// Reads L1 tables, the active one first.
#[derive(Clone, Debug)]
pub(super) struct L1Tables {
    waiting: vec::IntoIter<Snapshot>,
    /// `None` for the active table.
    name: Option<String>,
    reader: Reader,
    found: L2Tables,
    shared: Vec<SharedTable>,
}

impl L1Tables {
    pub(super) fn new(header: &Header, snapshots: Vec<Snapshot>, tally: &mut Tally) -> L1Tables {
        let mut tables = L1Tables {
            waiting: snapshots.into_iter(),
            name: None,
            reader: Reader::default(),
            found: L2Tables::new(),
            shared: Vec::new(),
        };
        tables.open(header.l1_table_offset, header.l1_size, None, tally);
        tables
    }

    fn open(&mut self, offset: HostOffset, entries: u32, name: Option<String>, tally: &mut Tally) {
        self.name = name;
        let table = format_args!("l1 table of {}", self.owner());
        self.reader = tally.open_table(offset.0, entries, table);
    }

    fn owner(&self) -> &str {
        self.name.as_deref().unwrap_or("the active image")
    }

    pub(super) fn wanted(&mut self, tally: &mut Tally) -> Option<Range> {
        loop {
            if let Some(wanted) = self.reader.wanted() {
                return Some(wanted);
            }
            let snapshot = self.waiting.next()?;
            let name = label(&snapshot);
            self.open(
                snapshot.l1_table_offset,
                snapshot.l1_size,
                Some(name),
                tally,
            );
        }
    }

    pub(super) fn feed(&mut self, tally: &mut Tally, piece: &[u8]) {
        for (index, raw) in (self.reader.index..).zip(bytes::u64s(piece)) {
            if raw != 0 {
                self.entry(tally, index, raw);
            }
        }
        self.reader.advance(piece.len() as u64);
        let shared = (self.shared.len() as u64).saturating_mul(size_of::<SharedTable>() as u64);
        let found = (self.found.len() as u64).saturating_mul(L2_TABLE_BYTES);
        tally.stage_bytes = found.saturating_add(shared);
        tally.check_memory();
    }

    /// The last read failed.
    pub(super) fn failed(&mut self, len: u64) {
        self.reader.advance(len);
    }

    fn entry(&mut self, tally: &mut Tally, index: u64, raw: u64) {
        if let Some(corruption) = l1::lint(raw) {
            tally.corrupt(
                1,
                format_args!("{}, l1 index {index}: {corruption}", self.owner()),
            );
        }
        let offset = HostOffset(raw & OFFSET_MASK);
        if offset.0 == 0 {
            return;
        }
        let range = Range::new(offset.0, tally.geometry.cluster_size());
        let what = format_args!("{}, l1 index {index}: l2 table", self.owner());
        tally.refer(range, 1, what);
        if self.name.is_none() {
            let refcount = tally.refcount_of(tally.geometry.cluster_of(offset));
            check_copied(tally, raw, refcount, 1, format_args!("l1 index {index}"));
        }
        match l1::decode(raw, &tally.geometry) {
            Ok(_) if offset.0 < tally.file_len => {
                let uses = self.found.entry(offset.0).or_default();
                uses.all = uses.all.saturating_add(1);
                if self.name.is_none() {
                    uses.active = uses.active.saturating_add(1);
                    uses.active_index = index;
                    if uses.active > 1 {
                        self.shared.push(SharedTable {
                            l1_index: index,
                            offset: offset.0,
                        });
                    }
                }
            }
            // Outside of the file it reads as zeros: nothing is mapped.
            Ok(_) => {}
            Err(corruption) => {
                tally.unfollowed = true;
                tally.corrupt(
                    1,
                    format_args!("{}, l1 index {index}: {corruption}", self.owner()),
                );
            }
        }
    }

    pub(super) fn finish(self) -> (L2Tables, Vec<SharedTable>) {
        (self.found, self.shared)
    }
}

/// The copied flag says "refcount is exactly one", no more and no less. Of a refcount that is not
/// known nothing can be said.
fn check_copied(
    tally: &mut Tally,
    raw: u64,
    refcount: Option<u64>,
    times: u64,
    place: core::fmt::Arguments<'_>,
) {
    let Some(refcount) = refcount else { return };
    let copied = raw & COPIED != 0;
    if copied != (refcount == 1) {
        let state = if copied { "set" } else { "clear" };
        let cluster = tally.geometry.cluster_of(HostOffset(raw & OFFSET_MASK));
        tally.corrupt_cluster(
            cluster,
            times,
            format_args!("{place}: copied flag is {state}, refcount is {refcount} ({raw:#018x})"),
        );
    }
}

/// The L2 table being looked at, and what follows from its earlier entries.
struct Table {
    offset: u64,
    uses: UseCounts,
    /// Where the next data cluster would lie if nothing was fragmented; 0 before the first.
    next_contiguous: u64,
}

/// Looks at one L2 table.
pub(super) fn check_l2_table(tally: &mut Tally, offset: u64, uses: UseCounts, bytes: &[u8]) {
    let mut table = Table {
        offset,
        uses,
        next_contiguous: 0,
    };
    let geometry = tally.geometry;
    let mut index = 0;
    while let Some((raw, bitmap)) = l2::raw_at(bytes, index, &geometry) {
        if raw == 0 && bitmap == 0 {
            index = index.saturating_add(1);
            continue;
        }
        let count = l2::data_run(bytes, index, &geometry);
        let end = index.saturating_add(count.max(1));
        if count > 0 && table.run(tally, index, raw, count) {
            index = end;
            continue;
        }
        for index in index..end {
            if let Some((raw, bitmap)) = l2::raw_at(bytes, index, &geometry) {
                table.entry(tally, index, raw, bitmap);
            }
        }
        index = end;
    }
    tally.check_memory();
}

impl Table {
    /// Takes `count` data clusters at once, the first of which is `raw` at `index` and each of which follows
    /// its predecessor; `false` if there may be something to say about one of them.
    fn run(&mut self, tally: &mut Tally, index: u64, raw: u64, count: u64) -> bool {
        let len = count.saturating_mul(tally.geometry.cluster_size());
        let range = Range::new(raw & OFFSET_MASK, len);
        let end = range.offset.saturating_add(len);
        if tally.data_file || end > tally.file_len {
            return false;
        }
        let active = self.uses.active;
        if active > 0 {
            let first = tally.geometry.cluster_of(HostOffset(range.offset)).0;
            let ones = tally.refcounts.ones(first, count);
            let wanted = if raw & COPIED != 0 { count } else { 0 };
            if !tally.unread_blocks.is_empty() || ones != wanted {
                return false;
            }
            self.behind_the_end(tally, index, count);
        }
        self.count_allocated(tally, range, count);
        let table = self.offset;
        let what = format_args!("l2 table at {table:#x}, index {index} and on: data");
        tally.refer(range, self.uses.all, what);
        true
    }

    fn entry(&mut self, tally: &mut Tally, index: u64, raw: u64, bitmap: u64) {
        let (table, all) = (self.offset, self.uses.all);
        let place = format_args!("l2 table at {table:#x}, index {index}");
        if let Some(corruption) = L2Entry::lint(raw, bitmap, &tally.geometry) {
            tally.corrupt(all, format_args!("{place}: {corruption}"));
        }
        if self.uses.active > 0 && (raw & COMPRESSED != 0 || self.has_host(tally, raw)) {
            self.behind_the_end(tally, index, 1);
        }
        if raw & COMPRESSED != 0 {
            self.compressed(tally, raw, bitmap, place);
            return;
        }
        if let Err(corruption) = L2Entry::decode(raw, bitmap, &tally.geometry) {
            tally.corrupt(all, format_args!("{place}: {corruption}"));
        }
        if self.has_host(tally, raw) {
            self.host_cluster(tally, raw, place);
            self.check_place(tally, index, raw, place);
            if self.uses.active > 0 {
                let cluster = tally.geometry.cluster_of(HostOffset(raw & OFFSET_MASK));
                let refcount = if tally.data_file {
                    Some(1)
                } else {
                    tally.refcount_of(cluster)
                };
                check_copied(tally, raw, refcount, self.uses.active, place);
            }
        }
    }

    /// A cluster in a data file lies at its guest offset.
    fn check_place(
        &self,
        tally: &mut Tally,
        index: u64,
        raw: u64,
        place: core::fmt::Arguments<'_>,
    ) {
        let tables = tally.geometry.l2_entries();
        let guest = self.uses.active_index.saturating_mul(tables);
        let guest = guest.saturating_add(index);
        let own = tally.geometry.cluster_start(ClusterIndex(guest)).0;
        if tally.data_file && self.uses.active == 1 && raw & OFFSET_MASK != own {
            tally.corrupt(
                1,
                format_args!("{place}: maps a cluster of the data file that is not its own"),
            );
        }
    }

    /// Counts those of `count` clusters with space that lie behind the end of the active disk.
    fn behind_the_end(&self, tally: &mut Tally, index: u64, count: u64) {
        let before = self
            .uses
            .active_index
            .saturating_mul(tally.geometry.l2_entries());
        let report = &mut tally.report;
        let end = before.saturating_add(index).saturating_add(count);
        let behind = end.saturating_sub(report.total_clusters).min(count);
        report.clusters_behind_end = report.clusters_behind_end.saturating_add(behind);
    }

    /// Whether an entry has a host cluster. Offset 0 is one only in a data file, where the copied
    /// flag tells it from an unallocated cluster.
    fn has_host(&self, tally: &Tally, raw: u64) -> bool {
        let zero = raw & ZERO != 0 && !tally.geometry.extended_l2();
        raw & OFFSET_MASK != 0 || (tally.data_file && raw & COPIED != 0 && !zero)
    }

    fn compressed(
        &mut self,
        tally: &mut Tally,
        raw: u64,
        bitmap: u64,
        place: core::fmt::Arguments<'_>,
    ) {
        let (all, active) = (self.uses.all, self.uses.active);
        if tally.data_file {
            tally.corrupt(
                all,
                format_args!("{place}: compressed cluster with a data file"),
            );
            return;
        }
        // Such an entry counts neither as a reference nor as a cluster, as in QEMU.
        if tally.geometry.extended_l2() && bitmap != 0 && !tally.count_unlisted {
            if raw & COPIED != 0 {
                // Lint named the copied flag only.
                let corruption = Corruption::new(CorruptionKind::CompressedBitmap, bitmap);
                tally.corrupt(all, format_args!("{place}: {corruption}"));
            }
            return;
        }
        match CompressedDescriptor::decode(raw, &tally.geometry) {
            Ok(descriptor) => {
                let range = Range::new(descriptor.offset, descriptor.byte_len());
                tally.refer(range, all, format_args!("{place}: compressed data"));
            }
            Err(corruption) => {
                tally.corrupt(all, format_args!("{place}: {corruption}"));
            }
        }
        // Compressed clusters always count as fragmented.
        let report = &mut tally.report;
        report.allocated_clusters = report.allocated_clusters.saturating_add(active);
        report.compressed_clusters = report.compressed_clusters.saturating_add(active);
        report.fragmented_clusters = report.fragmented_clusters.saturating_add(active);
    }

    fn host_cluster(&mut self, tally: &mut Tally, raw: u64, place: core::fmt::Arguments<'_>) {
        let range = Range::new(raw & OFFSET_MASK, tally.geometry.cluster_size());
        self.count_allocated(tally, range, 1);
        if !tally.data_file {
            tally.refer(range, self.uses.all, format_args!("{place}: data"));
        }
    }

    /// Counts the clusters of a range, and a break before it.
    fn count_allocated(&mut self, tally: &mut Tally, range: Range, clusters: u64) {
        let (report, active) = (&mut tally.report, self.uses.active);
        let allocated = active.saturating_mul(clusters);
        report.allocated_clusters = report.allocated_clusters.saturating_add(allocated);
        if self.next_contiguous != 0 && range.offset != self.next_contiguous {
            report.fragmented_clusters = report.fragmented_clusters.saturating_add(active);
        }
        self.next_contiguous = range.offset.saturating_add(range.len);
    }
}
