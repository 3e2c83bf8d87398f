//! Check stages: refcount table, refcount blocks, and at the end the comparison of counts with references.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::addr::{ClusterIndex, HostOffset};
use crate::bytes;
use crate::check::reader::{Range, Reader};
use crate::check::report::{Miscount, Severity};
use crate::check::tally::Tally;
use crate::error::CorruptionKind;
use crate::header::Header;
use crate::refcount;

/// Bits of a refcount table entry that are the offset, as a reader of refcounts takes it.
const OFFSET_MASK: u64 = !0x1ff;

/// From here on no file has bytes: its length is a signed number everywhere.
const UNREADABLE: u64 = 1 << 63;

#[derive(Clone, Debug)]
pub(super) struct Refcounts {
    table: Vec<u64>,
    table_range: Range,
    reader: Reader,
    next_block: usize,
}

impl Refcounts {
    pub(super) fn new(header: &Header, file_len: u64) -> Refcounts {
        let len = header.geometry().cluster_size();
        let len = len.saturating_mul(u64::from(header.refcount_table_clusters));
        let offset = header.refcount_table_offset.0;
        Refcounts {
            table: Vec::new(),
            table_range: Range { offset, len },
            reader: Reader::new(offset, len, file_len),
            next_block: 0,
        }
    }

    fn reading_table(&self) -> bool {
        self.reader.left() > 0
    }

    pub(super) fn wanted(&mut self, tally: &mut Tally) -> Option<Range> {
        if self.reading_table() {
            return self.reader.wanted();
        }
        // Only blocks that count clusters of the file matter, and one cluster after its end.
        let last = tally
            .geometry
            .refcount_table_index(ClusterIndex(tally.clusters));
        while let Some(raw) = self.table.get(self.next_block) {
            if self.next_block as u64 > last {
                break;
            }
            let offset = HostOffset(raw & OFFSET_MASK);
            if !tally.geometry.is_aligned(offset) || offset.0 >= UNREADABLE {
                tally.unread_blocks.push(self.next_block as u64);
            } else if offset.0 != 0 && offset.0 < tally.file_len {
                return Some(Range {
                    offset: offset.0,
                    len: tally.geometry.cluster_size(),
                });
            }
            self.next_block = self.next_block.saturating_add(1);
        }
        None
    }

    pub(super) fn feed(&mut self, tally: &mut Tally, piece: &[u8]) {
        if self.reading_table() {
            self.table.extend(bytes::u64s(piece));
            self.reader.advance(piece.len() as u64);
        } else {
            self.load_block(tally, piece);
            self.next_block = self.next_block.saturating_add(1);
        }
    }

    /// The last read failed.
    pub(super) fn failed(&mut self, tally: &mut Tally, len: u64) {
        if self.reading_table() {
            let entries = (len / 8) as usize;
            self.table
                .resize(self.table.len().saturating_add(entries), 0);
            self.reader.advance(len);
        } else {
            tally.unread_blocks.push(self.next_block as u64);
            self.next_block = self.next_block.saturating_add(1);
        }
    }

    fn load_block(&self, tally: &mut Tally, block: &[u8]) {
        let geometry = tally.geometry;
        let entries = geometry.refcount_block_entries();
        let first = (self.next_block as u64).saturating_mul(entries);
        let count = tally
            .clusters
            .saturating_add(1)
            .saturating_sub(first)
            .min(entries);
        let order = geometry.refcount_order();
        Arc::make_mut(&mut tally.refcounts).load(first, count, block, order);
        tally.check_memory();
    }

    /// Counts the references to the table and its blocks, after all others.
    pub(super) fn refer_to_blocks(&self, tally: &mut Tally) {
        tally.refer(self.table_range, 1, format_args!("refcount table"));
        let geometry = tally.geometry;
        for (index, raw) in self.table.iter().enumerate() {
            let block = match refcount::decode_table_entry(*raw, &geometry) {
                Ok(None) => continue,
                Ok(Some(block)) => block,
                Err(corruption) if corruption.kind == CorruptionKind::RefcountBlockOutside => {
                    self.block_outside(tally, index, HostOffset(*raw));
                    continue;
                }
                Err(corruption) => {
                    tally.refcounts_damaged = true;
                    tally.corrupt(
                        1,
                        format_args!("refcount table index {index}: {corruption}"),
                    );
                    continue;
                }
            };
            let cluster = geometry.cluster_of(block);
            if cluster.0 >= tally.clusters {
                self.block_outside(tally, index, block);
                continue;
            }
            let range = Range::new(block.0, geometry.cluster_size());
            tally.refer(range, 1, format_args!("refcount block {index}"));
            let references = tally.references_to(cluster);
            if references != 1 {
                tally.refcounts_damaged = true;
                tally.corrupt_cluster(
                    cluster,
                    1,
                    format_args!(
                        "refcount block {index} at {block:#x} is used {references} times, not once"
                    ),
                );
            }
        }
        tally.refcounts_damaged |= !tally.unread_blocks.is_empty() || self.table_is_damaged(tally);
    }

    /// Says whether something else uses the table, or it lies outside of the file.
    fn table_is_damaged(&self, tally: &Tally) -> bool {
        let Range { offset, len } = self.table_range;
        let first = tally.geometry.cluster_of(HostOffset(offset)).0;
        let count = tally.geometry.clusters_for(len);
        (first..first.saturating_add(count))
            .any(|cluster| tally.references_to(ClusterIndex(cluster)) != 1)
    }

    /// Where the block of this index lies, if it can be read and written.
    pub(super) fn block(&self, tally: &Tally, index: u64) -> Option<HostOffset> {
        let raw = self.table.get(usize::try_from(index).ok()?)?;
        let offset = HostOffset(raw & OFFSET_MASK);
        let known = tally.unread_blocks.binary_search(&index).is_err();
        (known && offset.0 != 0 && offset.0 < tally.file_len).then_some(offset)
    }

    fn block_outside(&self, tally: &mut Tally, index: usize, block: HostOffset) {
        tally.refcounts_damaged = true;
        tally.corrupt(
            1,
            format_args!("refcount block {index} at {block:#x} lies outside of the file"),
        );
    }

    /// Compares every cluster's refcount with the references to it.
    pub(super) fn compare(tally: &mut Tally) {
        // Each cluster whose refcount is not known could not be checked.
        let per_block = tally.geometry.refcount_block_entries();
        let said_before = tally.is_again();
        let unread = tally.unread_blocks.clone();
        for block in unread.into_iter().filter(|_| !said_before) {
            let clusters = tally
                .clusters
                .saturating_sub(block.saturating_mul(per_block));
            tally
                .report
                .add(Severity::Error, clusters.min(per_block), || {
                    alloc::format!("cannot read refcount block {block}")
                });
        }
        let mut highest = 0;
        let mut cluster = 0;
        while let Some(used) = tally
            .next_used(cluster)
            .filter(|used| *used < tally.clusters)
        {
            if let Some(end) = tally.same_page(used) {
                highest = tally.references.last_in_page(used).unwrap_or(highest);
                cluster = end;
                continue;
            }
            cluster = used.saturating_add(1);
            let references = tally.references_to(ClusterIndex(used));
            let Some(refcount) = tally.refcount_of(ClusterIndex(used)) else {
                continue;
            };
            if references != 0 || refcount != 0 {
                highest = used;
            }
            let spare = u64::from(tally.has_spare_count(used));
            let fits = (references..=references.saturating_add(spare)).contains(&refcount);
            if !fits && tally.is_steady(used) {
                mismatch(tally, ClusterIndex(used), refcount, references);
            }
        }
        let end = ClusterIndex(highest.saturating_add(1));
        tally.report.image_end_offset = tally.geometry.cluster_start(end).0;
    }
}

fn mismatch(tally: &mut Tally, cluster: ClusterIndex, refcount: u64, references: u64) {
    let offset = tally.geometry.cluster_start(cluster);
    let wrong = Miscount {
        cluster: cluster.0,
        refcount,
        references,
    };
    tally.report.add_miscount(wrong, offset);
}
