//! Guest offsets to host offsets: the L1 table, the cached L2 slices, and the clusters that hold
//! metadata.
//!
//! Everything here is sync and answers with values; the flows do the input and output. One layer
//! has one [`Maps`] behind a read-write lock, and a lookup needs shared access only.
//!
//! Units: guest and host offsets are bytes; `cluster` is a guest offset rounded down to a cluster.

use gaur_format::addr::{GuestOffset, HostOffset};
use gaur_format::geometry::Geometry;
use gaur_format::l1::{self, L1Ref};
use gaur_format::l2::L2Entry;
use gaur_format::{CompressedDescriptor, Corruption};

use super::cache::SliceCache;
use super::cluster_set::ClusterSet;

/// Bytes of a disk sector: the unit in which the L1 table is written back, and in which a write is
/// atomic.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// The mapping of one qcow2 layer.
#[derive(Debug)]
pub(crate) struct Maps {
    pub(crate) geometry: Geometry,
    pub(crate) slices: SliceCache,
    pub(crate) metadata: ClusterSet,
    pub(crate) l1: L1Table,
}

/// The L1 table in memory, and which of its sectors the disk does not have yet.
#[derive(Debug)]
pub(crate) struct L1Table {
    pub(crate) offset: u64,
    pub(crate) entries: Vec<u64>,
    dirty_sectors: Vec<u64>,
}

/// Where the entry of a guest cluster is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Located {
    /// No L2 table covers the guest offset.
    NoTable,
    /// The slice at this host offset has to be loaded first.
    Miss(u64),
    /// The decoded entry, and whether its table belongs to the active image alone.
    Entry {
        /// What the entry says.
        entry: L2Entry,
        /// Host offset of the slice it is in.
        slice: u64,
        /// The table is not shared with a snapshot.
        table_copied: bool,
    },
}

/// A run of guest bytes of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nothing here: the next layer decides. Host space may already be allocated.
    Unallocated {
        /// Host offset of the first byte, if a cluster is allocated for it.
        host: Option<u64>,
    },
    /// Zeros.
    Zero {
        /// Host offset of the first byte, if a cluster is allocated for it.
        host: Option<u64>,
    },
    /// Data in the image file.
    Data {
        /// Host offset of the first byte.
        host: u64,
        /// The cluster belongs to the active image alone and may be written in place.
        copied: bool,
    },
    /// A compressed cluster.
    Compressed {
        /// Where its bytes are.
        descriptor: CompressedDescriptor,
    },
}

/// Answer of [`Maps::extent`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lookup {
    /// The slice at this host offset has to be loaded first.
    Miss(u64),
    /// A run.
    Extent {
        /// What it is.
        kind: Kind,
        /// Its length in bytes.
        len: u64,
    },
}

impl L1Table {
    /// A table as read from disk.
    pub(crate) fn new(offset: u64, entries: Vec<u64>) -> L1Table {
        L1Table {
            offset,
            entries,
            dirty_sectors: Vec::new(),
        }
    }

    /// Changes one entry; its sector is dirty from now on.
    pub(crate) fn set(&mut self, index: u64, entry: Option<L1Ref>) {
        if let Some(slot) = self.entries.get_mut(index as usize) {
            *slot = l1::encode(entry);
            let sector = index * 8 / SECTOR_BYTES;
            if !self.dirty_sectors.contains(&sector) {
                self.dirty_sectors.push(sector);
            }
        }
    }

    /// Whether the disk has the whole table.
    pub(crate) fn is_clean(&self) -> bool {
        self.dirty_sectors.is_empty()
    }

    /// Hands every dirty sector to `stage` with its host offset.
    pub(crate) fn stage_dirty(&mut self, mut stage: impl FnMut(u64, &[u8])) {
        self.dirty_sectors.sort_unstable();
        for sector in std::mem::take(&mut self.dirty_sectors) {
            let mut bytes = [0; SECTOR_BYTES as usize];
            let first = (sector * SECTOR_BYTES / 8) as usize;
            let entries = self
                .entries
                .iter()
                .skip(first)
                .take(SECTOR_BYTES as usize / 8);
            for (raw, out) in entries.zip(bytes.chunks_exact_mut(8)) {
                out.copy_from_slice(&raw.to_be_bytes());
            }
            stage(self.offset + sector * SECTOR_BYTES, &bytes);
        }
    }
}

impl Maps {
    /// The L2 table that covers L1 entry `index`, if any.
    pub(crate) fn table(&self, index: u64) -> Result<Option<L1Ref>, Corruption> {
        match self.l1.entries.get(index as usize) {
            Some(raw) => l1::decode(*raw, &self.geometry),
            None => Ok(None),
        }
    }

    /// The entry of the cluster that holds guest offset `guest`.
    pub(crate) fn locate(&self, guest: u64) -> Result<Located, Corruption> {
        let guest = GuestOffset(guest);
        let Some(table) = self.table(self.geometry.l1_index(guest))? else {
            return Ok(Located::NoTable);
        };
        let at = self.entry_offset(table.offset, self.geometry.l2_index(guest));
        let slice = self.slices.slice_of(at);
        let Some(bytes) = self.slices.get(slice) else {
            return Ok(Located::Miss(slice));
        };
        let entry = self.decode(bytes, at - slice)?;
        Ok(Located::Entry {
            entry,
            slice,
            table_copied: table.copied,
        })
    }

    /// The longest run from `guest` on that is of one kind, at most `max` bytes (1 or more) and
    /// never beyond the slice.
    pub(crate) fn extent(&self, guest: u64, max: u64) -> Result<Lookup, Corruption> {
        let offset = GuestOffset(guest);
        let geometry = &self.geometry;
        let Some(table) = self.table(geometry.l1_index(offset))? else {
            let per_table = geometry.guest_bytes_per_l2();
            let len = (per_table - guest % per_table).min(max);
            return Ok(Lookup::Extent {
                kind: Kind::Unallocated { host: None },
                len,
            });
        };
        let at = self.entry_offset(table.offset, geometry.l2_index(offset));
        let slice = self.slices.slice_of(at);
        let Some(bytes) = self.slices.get(slice) else {
            return Ok(Lookup::Miss(slice));
        };
        let mut within = at - slice;
        let (mut kind, mut len) = self.run_in_cluster(self.decode(bytes, within)?, guest);
        loop {
            let next = guest + len;
            within += geometry.l2_entry_size();
            let more = len < max
                && next & (geometry.cluster_size() - 1) == 0
                && within < self.slices.slice_bytes();
            if !more {
                break;
            }
            let Ok(entry) = self.decode(bytes, within) else {
                break;
            };
            let (next_kind, next_len) = self.run_in_cluster(entry, next);
            match kind.joined(next_kind, len) {
                Some(joined) => kind = joined,
                None => break,
            }
            len += next_len;
        }
        if let Kind::Data { copied, .. } = &mut kind {
            // A cluster in a table that is shared with a snapshot is shared, whatever it says.
            *copied &= table.copied;
        }
        Ok(Lookup::Extent {
            kind,
            len: len.min(max),
        })
    }

    /// Puts `entry` in place of the entry of the cluster that holds `guest`. The slice is cached
    /// (the caller pinned or found it under the same lock) and the table is the active image's own.
    pub(crate) fn set_entry(&mut self, guest: u64, entry: L2Entry) {
        let offset = GuestOffset(guest);
        let Ok(Some(table)) = self.table(self.geometry.l1_index(offset)) else {
            debug_assert!(false, "an entry is set in a table that exists");
            return;
        };
        let at = self.entry_offset(table.offset, self.geometry.l2_index(offset));
        let slice = self.slices.slice_of(at);
        let (raw, bitmap) = entry.encode(&self.geometry);
        let extended = self.geometry.extended_l2();
        let Some(bytes) = self.slices.get_dirty(slice) else {
            debug_assert!(false, "an entry is set in a slice that is cached");
            return;
        };
        let within = (at - slice) as usize;
        if let Some(out) = bytes.get_mut(within..within + 8) {
            out.copy_from_slice(&raw.to_be_bytes());
        }
        if extended && let Some(out) = bytes.get_mut(within + 8..within + 16) {
            out.copy_from_slice(&bitmap.to_be_bytes());
        }
    }

    /// Host offset of entry `index` of the table at `table`.
    fn entry_offset(&self, table: HostOffset, index: u64) -> u64 {
        table.0 + index * self.geometry.l2_entry_size()
    }

    #[inline]
    fn decode(&self, slice: &[u8], within: u64) -> Result<L2Entry, Corruption> {
        let raw = be_u64(slice, within);
        let bitmap = if self.geometry.extended_l2() {
            be_u64(slice, within + 8)
        } else {
            0
        };
        L2Entry::decode(raw, bitmap, &self.geometry)
    }

    /// The kind at `guest` within its cluster, and how far it goes on inside it.
    #[inline]
    fn run_in_cluster(&self, entry: L2Entry, guest: u64) -> (Kind, u64) {
        let geometry = &self.geometry;
        let offset = geometry.offset_in_cluster(GuestOffset(guest));
        let (host, copied, alloc, zero) = match entry {
            L2Entry::Compressed(descriptor) => {
                return (
                    Kind::Compressed { descriptor },
                    geometry.cluster_size() - offset,
                );
            }
            L2Entry::Cluster {
                host,
                copied,
                alloc,
                zero,
            } => (host, copied, alloc, zero),
        };
        let index = geometry.subcluster_index(GuestOffset(guest));
        let bit = 1_u32 << index;
        let host = host.map(|host| host.0 + offset);
        let (kind, same) = if alloc & bit != 0 {
            (
                Kind::Data {
                    host: host.unwrap_or_default(),
                    copied,
                },
                alloc,
            )
        } else if zero & bit != 0 {
            (Kind::Zero { host }, zero)
        } else {
            (
                Kind::Unallocated { host },
                !(alloc | zero) & geometry.subcluster_mask(),
            )
        };
        let run = u64::from((same >> index).trailing_ones());
        let end = (u64::from(index) + run) * geometry.subcluster_size();
        (kind, end - offset)
    }
}

impl Kind {
    /// The kind of this run of `len` bytes joined with `next` right after it, if they are one run.
    fn joined(self, next: Kind, len: u64) -> Option<Kind> {
        let continues = |first: Option<u64>, second: Option<u64>| match (first, second) {
            (None, None) => true,
            (Some(first), Some(second)) => first + len == second,
            _ => false,
        };
        let joins = match (self, next) {
            (Kind::Unallocated { host: a }, Kind::Unallocated { host: b })
            | (Kind::Zero { host: a }, Kind::Zero { host: b }) => continues(a, b),
            (Kind::Data { host: a, copied: c }, Kind::Data { host: b, copied: d }) => {
                c == d && a + len == b
            }
            _ => false,
        };
        joins.then_some(self)
    }
}

/// The big-endian number at byte `at`; 0 beyond the end, which no caller asks for.
#[inline]
fn be_u64(bytes: &[u8], at: u64) -> u64 {
    let at = at as usize;
    match bytes
        .get(at..at + 8)
        .and_then(|bytes| <[u8; 8]>::try_from(bytes).ok())
    {
        Some(bytes) => u64::from_be_bytes(bytes),
        None => 0,
    }
}
