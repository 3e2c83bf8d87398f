//! Writing: in place where the image owns the cluster, else claim, fill, write, commit.
//!
//! Crash rule: nothing maps a cluster before its bytes have been written (`commit` comes last), and
//! the writeback pass makes those bytes durable before the mapping (O2). The count of a new cluster
//! goes up when it is taken, before the commit (O1); what the old mapping referred to is given back
//! only after a pass has made the new mapping durable (O3).

use gaur_block::{Errno, File, Source};
use gaur_format::addr::{GuestOffset, HostOffset};
use gaur_format::geometry::Geometry;
use gaur_format::l2::L2Entry;
use gaur_format::{AllocationPolicy, CompressedDescriptor};

use crate::active::Active;
use crate::corruption::Fault;
use crate::fill::Fill;
use crate::metadata::alloc::{AllocError, AllocNeed, Run};
use crate::metadata::claims::{Claim, ClaimList};
use crate::metadata::maps::{Extent, Kind, Located, Lookup, Maps};
use crate::range::{ClusterRange, GuestRange, HostRange};
use crate::waiters::Ticket;

mod copied;
mod packed;
mod preallocate;

pub(crate) use copied::WhenBusy;
pub(crate) use packed::PackedTail;

/// What to do with the next bytes of a write, as far as that needs no new mapping.
enum Step {
    /// Write them where they are.
    InPlace(HostRange),
    /// Do this first, then plan again.
    Need(Need),
}

/// What to do with the next bytes of a write.
enum Plan<'q, F: File> {
    Step(Step),
    /// Write them where they are; what else changes the mapping waits for it.
    Noted(HostRange, Claim<'q>),
    /// Write them into the mapping.
    New(NewMapping<'q, F>),
}

/// What stands in the way of changing a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Need {
    /// The L2 slice at this host offset is not loaded.
    Slice(u64),
    /// There is no L2 table, or one shared with a snapshot, at this L1 index.
    Table(u64),
    /// Free space needs input or output.
    Alloc(AllocNeed),
    /// Another request is changing the mapping at this guest offset; wait for the end of a claim there.
    Busy(u64, Ticket),
}

/// A claimed guest range that is about to get a new mapping. Dropping it aborts.
pub(crate) struct NewMapping<'q, F: File> {
    active: Active<'q, F>,
    _claim: Claim<'q>,
    /// Pinned L2 slice.
    slice: u64,
    /// Guest range that will be mapped: whole subclusters.
    pub(crate) region: GuestRange,
    /// Guest range that the guest writes.
    pub(crate) written: GuestRange,
    /// Host offset of the start of the region.
    pub(crate) host: u64,
    pub(crate) head: Fill,
    pub(crate) tail: Fill,
    /// Clusters taken for it; empty when the cluster was there.
    run: Run,
    /// Where the whole cluster goes if it is compressed; counted, like `run`.
    packed: Option<CompressedDescriptor>,
    /// References of the old mapping.
    frees: Vec<ClusterRange>,
    /// Bytes of it may be on the disk.
    pub(crate) started: bool,
    committed: bool,
}

impl<'q, F: File> Active<'q, F> {
    /// Stores `source` at guest offset `offset`; the range is inside the image.
    pub(crate) async fn write(&self, offset: u64, source: Source<'_>) -> Result<(), Errno> {
        let mut at = offset;
        let mut rest = source;
        while !rest.is_empty() {
            let range = GuestRange::new(at, rest.len() as u64);
            // Most writes are in place, and what says so is small.
            let quick = match self.notes_in_place() {
                true => None,
                false => self.plan_in_place(range)?,
            };
            let plan = match quick {
                Some(step) => Plan::Step(step),
                None => self.plan(range)?,
            };
            let len = match plan {
                Plan::Step(Step::Need(need)) => {
                    self.resolve(need).await?;
                    continue;
                }
                Plan::New(mapping) => {
                    let len = mapping.written.len;
                    let part = rest.split_at(len as usize).0;
                    self.write_mapping(mapping, part).await?;
                    len
                }
                Plan::Step(Step::InPlace(host)) => {
                    let part = rest.split_at(host.len as usize).0;
                    self.write_data(host.start, part).await?;
                    host.len
                }
                Plan::Noted(host, _held) => {
                    let part = rest.split_at(host.len as usize).0;
                    self.write_data(host.start, part).await?;
                    host.len
                }
            };
            rest = rest.split_at(len as usize).1;
            at += len;
        }
        Ok(())
    }

    /// Does what a plan needs before it can be made.
    pub(crate) async fn resolve(&self, need: Need) -> Result<(), Errno> {
        match need {
            Need::Slice(slice) => self.layer().load_slice(slice).await,
            Need::Table(index) => self.make_table(index).await,
            Need::Alloc(need) => self.resolve_alloc(need).await,
            Need::Busy(at, ticket) => {
                self.writer.claims.waiters(at).wait(ticket).await;
                Ok(())
            }
        }
    }

    /// Plans under the lock of the claims, where the mapping cannot change.
    fn plan(&self, range: GuestRange) -> Result<Plan<'q, F>, Errno> {
        let (maps, claims, at) = (&self.qcow2.maps, &self.writer.claims, range.start);
        let ticket = claims.ticket(at);
        let mut list = claims.lock(at);
        // It may have changed since the look without the lock.
        if let Some(step) = self.plan_in_place(range)? {
            return Ok(match step {
                Step::InPlace(host) if self.notes_in_place() => {
                    let written = range.first(host.len);
                    Plan::Noted(host, claims.note_in_place(&mut list, written))
                }
                step => Plan::Step(step),
            });
        }
        let planner = Planner {
            active: *self,
            range: claims.within_slice(range),
        };
        let need = match planner.plan(maps, &mut list) {
            Ok(mapping) => return Ok(Plan::New(mapping)),
            Err(Obstacle::Busy) => Need::Busy(at, ticket),
            Err(Obstacle::Need(need)) => need,
            Err(Obstacle::Failed(errno)) => return Err(errno),
        };
        Ok(Plan::Step(Step::Need(need)))
    }

    /// Whether a mapping that is given up may come back to its place while a write to it is on its way.
    fn notes_in_place(&self) -> bool {
        self.geometry().data_file() && !self.has_raw_data()
    }

    /// `None` where the next bytes need a new mapping.
    fn plan_in_place(&self, range: GuestRange) -> Result<Option<Step>, Errno> {
        let maps = &self.qcow2.maps;
        let lookup = maps.extent(range);
        let lookup = lookup.map_err(|fault| self.image.corrupt(0, fault))?;
        match lookup {
            Lookup::Miss(slice) => Ok(Some(Step::Need(Need::Slice(slice)))),
            Lookup::Extent(Extent {
                kind: Kind::Data { host, copied: true },
                len,
                ..
            }) => {
                let host = HostRange::new(host, len);
                self.check_not_metadata(maps, host)?;
                Ok(Some(Step::InPlace(host)))
            }
            Lookup::Extent(_) => Ok(None),
        }
    }

    fn check_not_metadata(&self, maps: &Maps, host: HostRange) -> Result<(), Errno> {
        let in_image = !maps.geometry.data_file();
        if in_image && maps.metadata.touches(host.clusters(&maps.geometry)) {
            return Err(self.image.corrupt(0, Fault::maps_metadata(host.start)));
        }
        Ok(())
    }

    async fn write_mapping(
        &self,
        mut mapping: NewMapping<'_, F>,
        data: Source<'_>,
    ) -> Result<(), Errno> {
        #[cfg(feature = "broken-order")]
        if self.image.breaks(crate::options::BrokenRule::O2) {
            mapping.commit();
            return self.fill_mapping(&mut mapping, data).await;
        }
        if let Some(space) = mapping.space_to_take() {
            // Best effort: where there is no space for whole clusters there may be some for this.
            let file = self.queue.data_file();
            let _ = file.allocate_at(space.start, space.len).await;
        }
        self.fill_mapping(&mut mapping, data).await?;
        mapping.commit();
        Ok(())
    }
}

/// Why no mapping could be planned.
enum Obstacle {
    Busy,
    Need(Need),
    Failed(Errno),
}

/// Plans the next mapping of a write, under the locks of claims and maps.
struct Planner<'q, F: File> {
    active: Active<'q, F>,
    /// What is left to write, as far as one slice maps it.
    range: GuestRange,
}

impl<'q, F: File> Planner<'q, F> {
    fn plan(&self, maps: &Maps, claims: &mut ClaimList) -> Result<NewMapping<'q, F>, Obstacle> {
        let (entry, slice) = self.entry_at(maps, self.range.start)?;
        match entry {
            L2Entry::Cluster {
                host: Some(host),
                copied: true,
                alloc,
                zero,
            } => self.plan_inside(maps, claims, slice, host, (alloc, zero)),
            _ => self.plan_new(maps, claims, slice, entry),
        }
    }

    fn entry_at(&self, maps: &Maps, at: u64) -> Result<(L2Entry, u64), Obstacle> {
        let table = Need::Table(maps.geometry.l1_index(GuestOffset(at)));
        match maps.locate(at) {
            Ok(Located::NoTable) => Err(Obstacle::Need(table)),
            Ok(Located::Entry {
                table_copied: false,
                ..
            }) => Err(Obstacle::Need(table)),
            Ok(Located::Miss(slice)) => Err(Obstacle::Need(Need::Slice(slice))),
            Ok(Located::Entry { entry, slice, .. }) => Ok((entry, slice)),
            Err(fault) => Err(Obstacle::Failed(self.active.image.corrupt(0, fault))),
        }
    }

    fn cluster_of(&self, at: u64) -> u64 {
        at & !(self.active.geometry().cluster_size() - 1)
    }

    /// What fills the unwritten part of a subcluster in the given state.
    fn fill_for(&self, is_zero: bool, at: u64) -> Fill {
        if !is_zero && self.active.image.has_backing_at(at) {
            Fill::Old
        } else {
            Fill::Zeros
        }
    }

    /// Whether the cluster at `host` holds zeros wherever it has no data. Asked under the lock of the
    /// claims, because discards change it under that lock.
    fn is_zeroed(&self, host: HostOffset) -> bool {
        if self.active.geometry().data_file() {
            return false;
        }
        let cluster = self.active.geometry().cluster_of(host);
        self.active.writer.zeroed.read().contains(cluster.0)
    }

    /// The cluster is allocated and ours, but some subclusters written to have no data in it yet.
    fn plan_inside(
        &self,
        maps: &Maps,
        claims: &mut ClaimList,
        slice: u64,
        host: HostOffset,
        (alloc, zero): (u32, u32),
    ) -> Result<NewMapping<'q, F>, Obstacle> {
        let geometry = self.active.geometry();
        let (cluster, sub) = (
            self.cluster_of(self.range.start),
            geometry.subcluster_size(),
        );
        let end = self.range.end().min(cluster + geometry.cluster_size());
        let first = (self.range.start - cluster) / sub;
        let last = (end - 1 - cluster) / sub;
        let written = GuestRange::between(self.range.start, end);
        let region = written.widened(sub);
        if claims.free_prefix(region) != region {
            return Err(Obstacle::Busy);
        }
        let in_image = !geometry.data_file();
        if in_image && maps.metadata.contains(geometry.cluster_of(host).0) {
            let fault = Fault::maps_metadata(host.0);
            return Err(Obstacle::Failed(self.active.image.corrupt(0, fault)));
        }
        let edge = |index: u64| {
            let bit = 1_u32 << index;
            if alloc & bit != 0 {
                return Fill::Nothing;
            }
            match self.fill_for(zero & bit != 0, cluster + index * sub) {
                Fill::Zeros if self.is_zeroed(host) => Fill::Nothing,
                fill => fill,
            }
        };
        let edges = (
            if written.start > region.start {
                edge(first)
            } else {
                Fill::Nothing
            },
            if written.end() < region.end() {
                edge(last)
            } else {
                Fill::Nothing
            },
        );
        self.pin(maps, slice)?;
        Ok(NewMapping {
            active: self.active,
            _claim: self.active.writer.claims.claim(claims, region),
            slice,
            region,
            written,
            host: host.0 + first * sub,
            head: edges.0,
            tail: edges.1,
            run: Run::EMPTY,
            packed: None,
            frees: Vec::new(),
            started: false,
            committed: false,
        })
    }

    /// The clusters need new space: nothing there, shared with a snapshot, or compressed.
    fn plan_new(
        &self,
        maps: &Maps,
        claims: &mut ClaimList,
        slice: u64,
        first: L2Entry,
    ) -> Result<NewMapping<'q, F>, Obstacle> {
        let geometry = self.active.geometry();
        let size = geometry.cluster_size();
        let start = self.cluster_of(self.range.start);
        let free = claims.free_prefix(self.range.widened(size)).len / size;
        if free == 0 {
            return Err(Obstacle::Busy);
        }
        let mut count = 1;
        while count < free && self.needs_new(maps, slice, start + count * size) {
            count += 1;
        }
        self.pin(maps, slice)?;
        let run = match self.take(start, count) {
            Ok(run) => run,
            Err(obstacle) => {
                maps.slices.unpin(slice);
                return Err(obstacle);
            }
        };
        let clusters = GuestRange::new(start, run.len * size);
        let written = self.range.intersect(clusters);
        let last_cluster = clusters.end() - size;
        let last = if run.len == 1 {
            first
        } else {
            self.entry_at(maps, last_cluster)
                .map_or(L2Entry::UNALLOCATED, |(entry, _)| entry)
        };
        let (low, head) = self.low_edge(first, start);
        let (high, tail) = self.high_edge(last, written);
        let fill = |fill| {
            if fill == Fill::Zeros && run.zeroed && !self.active.is_encrypted() {
                Fill::Nothing
            } else {
                fill
            }
        };
        Ok(NewMapping {
            active: self.active,
            _claim: self.active.writer.claims.claim(claims, clusters),
            slice,
            region: GuestRange::between(low, high),
            written,
            host: run.start * size + (low - start),
            head: fill(head),
            tail: fill(tail),
            run,
            packed: None,
            frees: self.old_references(maps, clusters),
            started: false,
            committed: false,
        })
    }

    /// Keeps the slice until the mapping is over. The lock of the claims keeps its entries as they were
    /// found, but not the slice in the cache: other threads may have needed its place since.
    fn pin(&self, maps: &Maps, slice: u64) -> Result<(), Obstacle> {
        match maps.slices.pin(slice) {
            true => Ok(()),
            false => Err(Obstacle::Need(Need::Slice(slice))),
        }
    }

    fn needs_new(&self, maps: &Maps, slice: u64, at: u64) -> bool {
        match self.entry_at(maps, at) {
            Ok((entry, same)) => {
                let own = matches!(
                    entry,
                    L2Entry::Cluster {
                        host: Some(_),
                        copied: true,
                        ..
                    }
                );
                same == slice && !own
            }
            Err(_) => false,
        }
    }

    /// Takes up to `count` clusters for those from guest offset `start` on.
    fn take(&self, start: u64, count: u64) -> Result<Run, Obstacle> {
        let geometry = self.active.geometry();
        if geometry.data_file() {
            return Ok(Run {
                start: start >> geometry.cluster_bits(),
                len: count,
                zeroed: false,
                backed: false,
            });
        }
        let taken = self.active.take_local(count);
        taken.map_err(|error| self.obstacle(error))
    }

    fn obstacle(&self, error: AllocError) -> Obstacle {
        match error {
            AllocError::Need(need) => Obstacle::Need(Need::Alloc(need)),
            AllocError::Failed(errno) => Obstacle::Failed(errno),
            AllocError::Corrupt(fault) => Obstacle::Failed(self.active.image.corrupt(0, fault)),
        }
    }

    /// Where the mapped region starts in the first cluster, and what fills it up to the write.
    fn low_edge(&self, old: L2Entry, cluster: u64) -> (u64, Fill) {
        let sub = self.active.geometry().subcluster_size();
        let index = (self.range.start - cluster) / sub;
        let old_first = match old {
            L2Entry::Compressed(_) => Some(0),
            L2Entry::Cluster { alloc, .. } if alloc != 0 => Some(u64::from(alloc.trailing_zeros())),
            L2Entry::Cluster { .. } => None,
        };
        match old_first {
            Some(old_first) => (cluster + index.min(old_first) * sub, Fill::Old),
            None => (
                cluster + index * sub,
                self.edge_fill(old, index, cluster + index * sub),
            ),
        }
    }

    /// Where the mapped region ends in the last cluster, and what fills it after the write.
    fn high_edge(&self, old: L2Entry, written: GuestRange) -> (u64, Fill) {
        let geometry = self.active.geometry();
        let sub = geometry.subcluster_size();
        let cluster = self.cluster_of(written.end() - 1);
        let index = (written.end() - 1 - cluster) / sub;
        let old_last = match old {
            L2Entry::Compressed(_) => Some(u64::from(geometry.subclusters()) - 1),
            L2Entry::Cluster { alloc, .. } if alloc != 0 => {
                Some(u64::from(u32::BITS - 1 - alloc.leading_zeros()))
            }
            L2Entry::Cluster { .. } => None,
        };
        match old_last {
            Some(old_last) => (cluster + (index.max(old_last) + 1) * sub, Fill::Old),
            None => (
                cluster + (index + 1) * sub,
                self.edge_fill(old, index, cluster + index * sub),
            ),
        }
    }

    fn edge_fill(&self, old: L2Entry, index: u64, at: u64) -> Fill {
        let zero = match old {
            L2Entry::Cluster { zero, .. } => zero & (1 << index) != 0,
            L2Entry::Compressed(_) => false,
        };
        self.fill_for(zero, at)
    }

    fn old_references(&self, maps: &Maps, clusters: GuestRange) -> Vec<ClusterRange> {
        let geometry = self.active.geometry();
        let mut frees = Vec::new();
        for cluster in clusters.pieces(geometry.cluster_size()) {
            if let Ok((entry, _)) = self.entry_at(maps, cluster.start)
                && let Some(free) = reference_of(entry, geometry)
            {
                frees.push(free);
            }
        }
        frees
    }
}

/// The host clusters of the image file that an entry refers to.
pub(crate) fn reference_of(entry: L2Entry, geometry: &Geometry) -> Option<ClusterRange> {
    match entry {
        L2Entry::Compressed(descriptor) => {
            let (first, len) = descriptor.clusters(geometry);
            Some(ClusterRange::new(first.0, len))
        }
        L2Entry::Cluster { .. } if geometry.data_file() => None,
        L2Entry::Cluster { host, .. } => {
            host.map(|host| ClusterRange::new(geometry.cluster_of(host).0, 1))
        }
    }
}

impl<F: File> NewMapping<'_, F> {
    /// Under the policy *contiguous*: the host range of new clusters whose space was not taken ahead.
    fn space_to_take(&self) -> Option<HostRange> {
        let contiguous = self.active.writer.allocation == AllocationPolicy::Contiguous;
        let wanted = contiguous && self.run.len > 0 && !self.run.backed;
        wanted.then(|| self.run.range().bytes(self.active.geometry()))
    }

    /// Makes the new mapping visible. The disk learns of it from a writeback pass.
    fn commit(&mut self) {
        let geometry = self.active.geometry();
        for part in self.region.pieces(geometry.cluster_size()) {
            let maps = &self.active.qcow2.maps;
            maps.update(part.start, |old| self.new_entry(old, part));
        }
        if !self.frees.is_empty() {
            // After the mapping: a pass takes the frees before it copies the mappings.
            self.active.unmapped(&self.frees);
        }
        self.committed = true;
    }

    /// The entry of a cluster of which `part` gets data.
    fn new_entry(&self, old: L2Entry, part: GuestRange) -> L2Entry {
        if let Some(descriptor) = self.packed {
            return L2Entry::Compressed(descriptor);
        }
        let geometry = self.active.geometry();
        let covered = part.subclusters(geometry);
        let (mut alloc, mut zero, mut host) = (0, 0, None);
        if let L2Entry::Cluster {
            alloc: a,
            zero: z,
            host: h,
            ..
        } = old
        {
            zero = z;
            if self.run.len == 0 {
                (alloc, host) = (a, h);
            }
        }
        if self.run.len > 0 {
            let bits = geometry.cluster_bits();
            let index = (part.start >> bits) - (self.region.start >> bits);
            host = Some(HostOffset((self.run.start + index) << bits));
        }
        L2Entry::Cluster {
            host,
            copied: true,
            alloc: alloc | covered,
            zero: zero & !covered,
        }
    }
}

impl<F: File> Drop for NewMapping<'_, F> {
    fn drop(&mut self) {
        let packed = self.packed.map(L2Entry::Compressed);
        let packed = packed.and_then(|entry| reference_of(entry, self.active.geometry()));
        let taken = packed.unwrap_or(self.run.range());
        if self.active.geometry().data_file() {
            // Clusters of a data file have one place, and are never free.
        } else if !self.committed && taken.len > 0 {
            // Nothing refers to the clusters and no request is using them any more.
            self.active.writer.alloc.lock().releasable.push(taken);
        } else if !self.committed && self.started {
            // Some of the bytes may be there, and the guest may never see them.
            let cluster = self.active.geometry().cluster_of(HostOffset(self.host));
            self.active
                .writer
                .zeroed
                .write()
                .clear(ClusterRange::new(cluster.0, 1));
        }
        self.active.qcow2.maps.slices.unpin(self.slice);
    }
}
