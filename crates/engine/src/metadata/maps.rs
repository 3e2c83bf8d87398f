//! Address translation, guest offsets to host offsets: the L1 table, the cached L2 slices, and the clusters that hold
//! metadata.
//!
//! Everything here is sync and answers with values; the flows do the input and output. A lookup
//! reads the L1 table without a lock and takes the lock of one part of the L2 cache, shared.
//!
//! Units: guest and host offsets are bytes; `cluster` is a guest offset rounded down to a cluster.

use std::sync::Arc;

use gaur_format::addr::{GuestOffset, HostOffset};
use gaur_format::geometry::Geometry;
use gaur_format::l1::{self, L1Ref};
use gaur_format::l2::L2Entry;
use gaur_format::{CompressedDescriptor, Corruption, CorruptionKind};

use super::changed::ChangeWatch;
use super::cluster_set::ClusterSet;
use super::l1_table::L1Table;
use super::l2_cache::L2Cache;
use super::l2_shard::View;
use super::metadata_set::MetadataSet;
use super::packed::{Entry, Shape};
use crate::cache_options::CacheSizes;
use crate::commit_log::{Commit, CommitLog};
use crate::corruption::{Fault, Finding, Structure};
use crate::range::GuestRange;
use crate::write::reference_of;

/// The mapping of one qcow2 layer.
#[derive(Debug)]
pub(crate) struct Maps {
    pub(crate) geometry: Geometry,
    pub(crate) slices: L2Cache,
    pub(crate) metadata: MetadataSet,
    pub(crate) l1: L1Table,
    /// Where changes are noted for a check that runs.
    pub(crate) watch: Arc<ChangeWatch>,
    /// Where changes are noted.
    pub(crate) log: Option<Arc<dyn CommitLog>>,
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

/// A run of guest bytes of one kind, in one layer or in the whole chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Index of the layer that has it, 0 for the top; the last one's for what no layer has.
    pub(crate) layer: usize,
    /// Length in bytes, at least 1.
    pub(crate) len: u64,
    /// What the bytes are.
    pub(crate) kind: Kind,
}

/// Answer of [`Maps::extent`]; the layer is 0.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lookup {
    /// The slice at this host offset has to be loaded first.
    Miss(u64),
    /// A run.
    Extent(Extent),
}

/// Answer of [`Maps::walk`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Walk {
    /// The slice at this host offset has to be loaded first.
    Miss(u64),
    /// So many bytes were visited, 1 or more.
    Done(u64),
}

impl Lookup {
    #[inline]
    fn of(kind: Kind, len: u64) -> Lookup {
        Lookup::Extent(Extent {
            layer: 0,
            len,
            kind,
        })
    }
}

impl Maps {
    /// The mapping of an image whose L1 table was read, with caches of these sizes.
    pub(crate) fn new(
        geometry: Geometry,
        sizes: CacheSizes,
        metadata: ClusterSet,
        l1: L1Table,
    ) -> Maps {
        let shape = Shape {
            entries: (sizes.l2_entry_bytes / geometry.l2_entry_size()) as usize,
            extended: geometry.extended_l2(),
            cluster_bits: geometry.cluster_bits(),
        };
        Maps {
            geometry,
            slices: L2Cache::new(shape, sizes.l2_entry_bytes, sizes.l2_bytes),
            metadata: MetadataSet::new(metadata),
            l1,
            watch: Arc::default(),
            log: None,
        }
    }

    /// The L2 table that covers L1 entry `index`, if any.
    #[inline]
    pub(crate) fn table(&self, index: u64) -> Result<Option<L1Ref>, Fault> {
        l1::decode(self.l1.get(index), &self.geometry).map_err(|entry| Fault {
            structure: Structure::L1Table,
            host: self.l1.offset() + index * 8,
            finding: Finding::Entry(entry),
        })
    }

    /// The slice with the entry of guest offset `guest` in the table at `table`, and the entry's
    /// index in it.
    #[inline]
    fn place(&self, table: HostOffset, guest: GuestOffset) -> (u64, usize) {
        let entry_bytes = self.geometry.l2_entry_size();
        let at = table.0 + self.geometry.l2_index(guest) * entry_bytes;
        let slice = self.slices.slice_of(at);
        (slice, ((at - slice) / entry_bytes) as usize)
    }

    /// The entry of the cluster that holds guest offset `guest`.
    pub(crate) fn locate(&self, guest: u64) -> Result<Located, Fault> {
        let guest = GuestOffset(guest);
        let Some(table) = self.table(self.geometry.l1_index(guest))? else {
            return Ok(Located::NoTable);
        };
        let (slice, index) = self.place(table.offset, guest);
        let Some(entry) = self.slices.look(slice, |view| view.get(index)) else {
            return Ok(Located::Miss(slice));
        };
        Ok(Located::Entry {
            entry: self
                .decode(entry, guest.0)
                .map_err(|what| self.bad_entry(slice, index, what))?,
            slice,
            table_copied: table.copied,
        })
    }

    /// The longest run at the start of a range (of 1 byte or more) that is of one kind, never beyond the slice.
    pub(crate) fn extent(&self, range: GuestRange) -> Result<Lookup, Fault> {
        let offset = GuestOffset(range.start);
        let geometry = &self.geometry;
        let Some(table) = self.table(geometry.l1_index(offset))? else {
            let per_table = geometry.guest_bytes_per_l2();
            let len = range.first(per_table - range.start % per_table).len;
            return Ok(Lookup::of(Kind::Unallocated { host: None }, len));
        };
        let (slice, index) = self.place(table.offset, offset);
        let run = self
            .slices
            .look(slice, |view| self.run_in_slice(view, index, range));
        let Some(run) = run else {
            return Ok(Lookup::Miss(slice));
        };
        let (mut kind, len) = run.map_err(|what| self.bad_entry(slice, index, what))?;
        if let Kind::Data { copied, .. } = &mut kind {
            // A cluster in a table that is shared with a snapshot is shared, whatever it says.
            *copied &= table.copied;
        }
        Ok(Lookup::of(kind, len.min(range.len)))
    }

    /// Calls `visit` with the runs of a range (of 1 byte or more), one behind the other, up to the end of its first
    /// slice: one look at the cache for all of them.
    pub(crate) fn walk(
        &self,
        range: GuestRange,
        mut visit: impl FnMut(GuestRange, Kind),
    ) -> Result<Walk, Fault> {
        let geometry = &self.geometry;
        let per_table = geometry.guest_bytes_per_l2();
        let range = range.first(per_table - range.start % per_table);
        let Some(table) = self.table(geometry.l1_index(GuestOffset(range.start)))? else {
            visit(range, Kind::Unallocated { host: None });
            return Ok(Walk::Done(range.len));
        };
        let (slice, _) = self.place(table.offset, GuestOffset(range.start));
        let walked = self.slices.look(slice, |view| {
            let mut rest = range;
            while !rest.is_empty() {
                let (other, index) = self.place(table.offset, GuestOffset(rest.start));
                if other != slice {
                    break;
                }
                let run = self.run_in_slice(view, index, rest);
                let (mut kind, len) = run.map_err(|what| self.bad_entry(slice, index, what))?;
                if let Kind::Data { copied, .. } = &mut kind {
                    *copied &= table.copied;
                }
                let run = rest.first(len);
                visit(run, kind);
                rest = rest.after(run.len);
            }
            Ok(Walk::Done(range.len - rest.len))
        });
        walked.unwrap_or(Ok(Walk::Miss(slice)))
    }

    /// The entry with this index in the slice at host offset `slice` cannot be right.
    #[cold]
    fn bad_entry(&self, slice: u64, index: usize, what: Corruption) -> Fault {
        Fault {
            structure: Structure::L2Table,
            host: slice + index as u64 * self.geometry.l2_entry_size(),
            finding: Finding::Entry(what),
        }
    }

    /// The kind at the start of a range, whose entry has this index in the slice, and how far it goes on.
    #[inline]
    fn run_in_slice(
        &self,
        view: View<'_>,
        index: usize,
        range: GuestRange,
    ) -> Result<(Kind, u64), Corruption> {
        let guest = range.start;
        let (mut kind, mut len) = self.run_in_cluster(self.decode(view.get(index), guest)?, guest);
        let mut index = index + 1;
        while len < range.len && (guest + len) & (self.geometry.cluster_size() - 1) == 0 {
            if index >= view.len() {
                break;
            }
            let Ok(entry) = self.decode(view.get(index), guest + len) else {
                break;
            };
            let (next_kind, next_len) = self.run_in_cluster(entry, guest + len);
            match kind.joined(next_kind, len) {
                Some(joined) => kind = joined,
                None => break,
            }
            len += next_len;
            index += 1;
            // Whole clusters that go on so need no look at each.
            let (end, steps) = view.run(index - 1);
            if next_len == self.geometry.cluster_size() && steps == next_kind.has_host() {
                let more = end.saturating_sub(index);
                len += more as u64 * next_len;
                index += more;
            }
        }
        Ok((kind, len))
    }

    /// Puts what `change` makes of it in place of the entry of the cluster that holds `guest`, in one
    /// step. The slice is cached (the caller pinned it) and the table is the active image's own.
    pub(crate) fn update(&self, guest: u64, change: impl FnOnce(L2Entry) -> L2Entry) {
        let offset = GuestOffset(guest);
        let Ok(Some(table)) = self.table(self.geometry.l1_index(offset)) else {
            debug_assert!(false, "an entry is set in a table that exists");
            return;
        };
        let (slice, index) = self.place(table.offset, offset);
        let done = self
            .slices
            .update(slice, index, |old| match self.decode(old, guest) {
                Ok(entry) => {
                    let new = change(entry);
                    if self.watch.is_on() {
                        let clusters =
                            [entry, new].map(|entry| reference_of(entry, &self.geometry));
                        let clusters = clusters.into_iter().flatten();
                        clusters.for_each(|clusters| self.watch.note(clusters));
                    }
                    let new = new.encode(&self.geometry);
                    self.note(offset, old, new);
                    new
                }
                // It was sound when the change was planned, and its claim keeps others from changing it.
                Err(_) => old,
            });
        debug_assert!(done, "an entry is set in a slice that is cached");
        self.l1
            .tracker
            .slice(offset.0, self.guest_bytes_per_slice());
    }

    /// Notes a change before it is visible; the slice's lock is held.
    #[inline]
    fn note(&self, guest: GuestOffset, before: Entry, (entry, bitmap): Entry) {
        if let Some(log) = &self.log {
            let cluster = guest.0 >> self.geometry.cluster_bits();
            log.committed(Commit {
                cluster,
                entry,
                bitmap,
                before,
            });
        }
    }

    /// Guest bytes that one slice maps.
    pub(crate) fn guest_bytes_per_slice(&self) -> u64 {
        self.slices.slice_bytes() / self.geometry.l2_entry_size() * self.geometry.cluster_size()
    }

    /// The entry of the cluster that holds guest offset `guest`.
    #[inline]
    fn decode(&self, (raw, bitmap): Entry, guest: u64) -> Result<L2Entry, Corruption> {
        let entry = L2Entry::decode(raw, bitmap, &self.geometry)?;
        if self.geometry.data_file()
            && let L2Entry::Cluster {
                host: Some(host), ..
            } = entry
            && host.0 != guest & !(self.geometry.cluster_size() - 1)
        {
            let kind = CorruptionKind::DataFileOffset;
            return Err(Corruption { kind, raw });
        }
        Ok(entry)
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
    /// Whether host space belongs to it, cluster by cluster.
    fn has_host(self) -> bool {
        match self {
            Kind::Unallocated { host } | Kind::Zero { host } => host.is_some(),
            Kind::Data { .. } | Kind::Compressed { .. } => true,
        }
    }

    /// The kind of this run of `len` bytes joined with `next` right after it, if they are one run.
    pub(crate) fn joined(self, next: Kind, len: u64) -> Option<Kind> {
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
