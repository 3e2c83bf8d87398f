//! Write zeroes and discard: change mappings, write as little as possible.
//!
//! Whole subclusters become zero by their mapping; the rest is written. A discard makes whole
//! subclusters read as zeros, or whole clusters under the policy *contiguous*, and leaves the rest
//! alone; where the format cannot say so (version 2 over a backing file) it does nothing. Under the
//! policy *compact* the space of subclusters that lose their data becomes a hole (`punch`).
//!
//! Crash rule: as for writes; what a mapping no longer refers to is given back by the pass that
//! made the removal durable (O3).

use gaur_block::{Errno, File, Source};
use gaur_format::addr::GuestOffset;
use gaur_format::allocation::{AllocationPolicy, empty_blocks};
use gaur_format::geometry::{Geometry, Version};
use gaur_format::l2::L2Entry;

use crate::active::Active;
use crate::image::Writer;
use crate::job::Job;
use crate::metadata::holes::Hole;
use crate::metadata::maps::{Kind, Located, Maps};
use crate::options::FreedBy;
use crate::queue::Unmap;
use crate::range::{ClusterRange, GuestRange};
use crate::write::{Need, WhenBusy, reference_of};

/// What is done with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnmapMode {
    /// Zeros, and the space stays allocated where it is.
    Keep,
    /// Zeros, and space is given back.
    Unmap,
    /// Space is given back; zeros if the format can say so.
    Discard,
    /// Zeros by the mapping itself, whatever comes to lie below (rebase).
    Hide,
    /// The same where the image has no data of its own, and its space stays; where it has, nothing is changed.
    HideUnused,
    /// Nothing is mapped any more, whatever lies below (shrinking).
    Forget,
}

impl UnmapMode {
    /// Whether the guest asks for its space to be given back.
    fn gives_up_space(self) -> bool {
        matches!(self, UnmapMode::Unmap | UnmapMode::Discard)
    }
}

/// What became of the start of a range.
enum UnmapStep {
    /// So many bytes are done.
    Done(u64),
    /// So many bytes have to be written as zeros.
    Write(u64),
    Need(Need),
}

/// What is unmapped: the whole units from `start` on, a multiple of the unit, up to `end`.
#[derive(Clone, Copy, Debug)]
struct UnmapRange {
    start: u64,
    end: u64,
    unit: u64,
    /// What counts as a unit when it lies across the end of the image.
    last_unit: u64,
    /// Zeros are marked also where there is nothing below that they hide.
    marked: bool,
}

impl UnmapRange {
    /// A range that is whole units already.
    fn whole(range: GuestRange) -> UnmapRange {
        UnmapRange {
            start: range.start,
            end: range.end(),
            unit: 1,
            last_unit: 1,
            marked: false,
        }
    }
}

/// Clusters of a data file that are smaller give no space back: file systems have no smaller holes.
const DATA_HOLE_BYTES_MIN: u64 = 4096;

/// Longest piece of zeros written at once.
const ZEROS_BYTES: u64 = 64 << 10;

impl<F: File> Active<'_, F> {
    /// Makes a range inside the image read as zeros.
    pub(crate) async fn zero(&self, range: GuestRange, unmap: Unmap) -> Result<(), Errno> {
        let unit = self.geometry().subcluster_size();
        let first = range.start.next_multiple_of(unit);
        let whole = UnmapRange {
            start: first,
            end: range.end(),
            unit,
            last_unit: unit,
            marked: self.marks_zeros(),
        };
        if first >= self.last_unit(whole) {
            return self.zero_edge(range).await;
        }
        let head = GuestRange::between(range.start, first);
        self.zero_edge(head).await?;
        let mode = match unmap {
            Unmap::Allowed => UnmapMode::Unmap,
            Unmap::Forbidden => UnmapMode::Keep,
        };
        let job = Job::default();
        let last = self.unmap(whole, mode, &job).await?;
        let tail = GuestRange::between(last, range.end());
        self.zero_edge(tail).await
    }

    /// Whether zeros are marked that are written where zeros are read already.
    pub(crate) fn marks_zeros(&self) -> bool {
        self.image.options.mark_zeros && self.can_mark_zeros()
    }

    /// Version 2 has no marks.
    pub(crate) fn can_mark_zeros(&self) -> bool {
        self.geometry().version() == Version::V3
    }

    /// Marks a range of whole units as zeros, which the layers below show there, wherever the top maps nothing. How many
    /// bytes were looked at.
    pub(crate) async fn mark_copied(
        &self,
        range: GuestRange,
        busy: WhenBusy,
    ) -> Result<u64, Errno> {
        self.announce().await?;
        let unit = self.geometry().subcluster_size();
        // Up to here unit by unit: something in that cluster has data.
        let (mut at, mut mixed) = (range.start, range.start);
        while at < range.end() {
            let next = if at < mixed { at + unit } else { range.end() };
            let whole = UnmapRange {
                start: range.start,
                end: next.min(range.end()),
                unit,
                last_unit: unit,
                marked: true,
            };
            // What lies below stays. What the image has got since is seen under the lock.
            match self.unmap_step(at, whole, UnmapMode::HideUnused)? {
                // The disk has grown, and its last unit with it.
                UnmapStep::Done(0) => break,
                UnmapStep::Write(len) if at >= mixed && len > unit => mixed = at + len,
                UnmapStep::Done(len) | UnmapStep::Write(len) => at += len,
                UnmapStep::Need(Need::Busy(..)) if busy == WhenBusy::GiveUp => break,
                UnmapStep::Need(need) => self.resolve(need).await?,
            }
        }
        Ok(at.min(range.end()) - range.start)
    }

    /// Zeros a range that has no whole unit in it; it may be two parts of neighbours.
    async fn zero_edge(&self, range: GuestRange) -> Result<(), Errno> {
        if !self.marks_zeros() {
            return self.zero_by_writing(range).await;
        }
        for part in range.pieces(self.geometry().subcluster_size()) {
            self.mark_around(part).await?;
        }
        Ok(())
    }

    /// Marks the unit that a range is a part of, if the rest of it reads as zeros; else writes zeros to the range.
    async fn mark_around(&self, range: GuestRange) -> Result<(), Errno> {
        let unit = self.geometry().subcluster_size();
        let start = range.start - range.start % unit;
        let end = (start + unit).min(self.image.size_bytes());
        let end = end.max(range.end());
        let around = UnmapRange {
            start,
            end,
            unit,
            last_unit: unit,
            marked: true,
        };
        let before = GuestRange::between(start, range.start);
        let behind = GuestRange::between(range.end(), end);
        for mut rest in [before, behind] {
            while !rest.is_empty() {
                let found = self.queue.find(rest).await?;
                if !reads_as_zeros(&found.kind) {
                    return self.write_zero_bytes(range).await;
                }
                rest = rest.after(found.len);
            }
        }
        // What lies below stays as it was found. What the image has got since is seen under the lock.
        loop {
            match self.unmap_step(start, around, UnmapMode::HideUnused)? {
                // The disk has grown, and the unit with it.
                UnmapStep::Done(0) | UnmapStep::Write(_) => {
                    return self.write_zero_bytes(range).await;
                }
                UnmapStep::Done(_) => return Ok(()),
                UnmapStep::Need(need) => self.resolve(need).await?,
            }
        }
    }

    /// Makes a range inside the image zeros of its own, which read the same over any backing file.
    pub(crate) async fn hide(&self, range: GuestRange) -> Result<(), Errno> {
        let unit = self.geometry().subcluster_size();
        let first = range.start.next_multiple_of(unit).min(range.end());
        self.write_zero_bytes(GuestRange::between(range.start, first))
            .await?;
        let whole = UnmapRange {
            start: first,
            end: range.end(),
            unit,
            last_unit: unit,
            marked: true,
        };
        let job = Job::default();
        let last = self.unmap(whole, UnmapMode::Hide, &job).await?;
        self.write_zero_bytes(GuestRange::between(last.min(range.end()), range.end()))
            .await
    }

    /// Gives back the whole clusters or subclusters of a range inside the image.
    pub(crate) async fn discard(&self, range: GuestRange) -> Result<(), Errno> {
        let unit = self.writer.discard_unit(self.geometry());
        let range = UnmapRange {
            start: range.start.next_multiple_of(unit),
            end: range.end(),
            unit,
            last_unit: self.geometry().cluster_size(),
            marked: false,
        };
        let job = Job::default();
        self.unmap(range, UnmapMode::Discard, &job).await?;
        Ok(())
    }

    /// Where the last whole unit ends of a range that ends at `end`. What lies beyond the end of the
    /// image goes with it, as long as that is the end: an image that grows meanwhile has data there.
    fn last_unit(&self, range: UnmapRange) -> u64 {
        let end = range.end;
        if end == self.image.size_bytes() {
            end.next_multiple_of(range.last_unit)
        } else {
            end - end % range.unit
        }
    }

    /// Removes every mapping in a range of whole clusters.
    pub(crate) async fn forget(&self, range: GuestRange, job: &Job) -> Result<(), Errno> {
        self.unmap(UnmapRange::whole(range), UnmapMode::Forget, job)
            .await?;
        Ok(())
    }

    /// Makes clusters beyond the end of the image read as zeros when it will reach them.
    pub(crate) async fn zero_beyond(&self, range: GuestRange, job: &Job) -> Result<(), Errno> {
        // Zeros may be written in place, like a request's: no cluster is given away meanwhile.
        let _epoch = self.queue.enter();
        self.unmap(UnmapRange::whole(range), UnmapMode::Unmap, job)
            .await?;
        Ok(())
    }

    /// Goes through the whole units of a range; says where the last of them ended.
    async fn unmap(&self, range: UnmapRange, mode: UnmapMode, job: &Job) -> Result<u64, Errno> {
        let (mut at, mut told) = (range.start, range.start);
        job.expect(range.end.saturating_sub(range.start));
        while at < self.last_unit(range) {
            job.step(at - told)?;
            told = at;
            match self.unmap_step(at, range, mode)? {
                UnmapStep::Done(len) => at += len,
                UnmapStep::Need(need) => self.resolve(need).await?,
                UnmapStep::Write(len) => {
                    let stop = (at + len).min(range.end);
                    let inside = self.image.size_bytes().clamp(at, stop);
                    let part = GuestRange::between(at, inside);
                    match mode {
                        UnmapMode::Hide => self.write_zero_bytes(part).await?,
                        _ => self.zero_by_writing(part).await?,
                    }
                    // A growing image needs zeros where it is about to reach.
                    self.write_zero_bytes(GuestRange::between(inside, stop))
                        .await?;
                    at += len;
                }
            }
            // A long range must not fill the cache with dirt.
            self.relieve().await;
        }
        Ok(at)
    }

    /// Zeros a range by writing, unless it reads as zeros already.
    async fn zero_by_writing(&self, range: GuestRange) -> Result<(), Errno> {
        let claims = &self.writer.claims;
        let mut rest = range;
        while !rest.is_empty() {
            let at = rest.start;
            let found = self.queue.find(rest).await?;
            let run = rest.first(found.len);
            if !reads_as_zeros(&found.kind) {
                self.write_zero_bytes(run).await?;
                rest = rest.after(run.len);
                continue;
            }
            // A write that is under way has its data in place already, and so may others that were
            // overtaken by it. Its commit must not bring any of that up after these zeros.
            let ticket = claims.ticket(at);
            let run = claims.within_slice(run);
            let now = {
                let list = claims.lock(at);
                if list.free_prefix(run) == run {
                    Some(self.queue.find_now(run)?)
                } else {
                    None
                }
            };
            match now {
                None => claims.waiters(at).wait(ticket).await,
                Some(Some(now)) if reads_as_zeros(&now.kind) => rest = rest.after(now.len),
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Writes zeros, whatever is there.
    pub(crate) async fn write_zero_bytes(&self, range: GuestRange) -> Result<(), Errno> {
        let mut rest = range;
        while !rest.is_empty() {
            let part = rest.first(ZEROS_BYTES);
            let (file, pool) = (self.queue.data_file(), &self.queue.pool);
            let mut zeros = pool.take(file, part.len as usize);
            zeros.fill(0);
            self.write(part.start, Source::memory(&zeros)).await?;
            rest = rest.after(part.len);
        }
        Ok(())
    }

    /// Whether zeros at `at` are marked, or have something below to hide.
    fn hides(&self, marked: bool, at: u64) -> bool {
        marked || self.image.has_backing_at(at)
    }

    fn unmap_step(&self, at: u64, range: UnmapRange, mode: UnmapMode) -> Result<UnmapStep, Errno> {
        let geometry = self.geometry();
        let ticket = self.writer.claims.ticket(at);
        let claims = self.writer.claims.lock(at);
        // Looked at under the lock: a write to where the image has grown to comes after it.
        let end = self.last_unit(range);
        if at >= end {
            return Ok(UnmapStep::Done(0));
        }
        // A cluster goes away as a whole when its last subcluster does, so a write to any part of it
        // has to be over, also to parts outside the range.
        let size = geometry.cluster_size();
        let start = at & !(size - 1);
        let reach = GuestRange::between(start, end.next_multiple_of(size));
        let reach = self.writer.claims.within_slice(reach);
        let quiet = start + claims.quiet_prefix(reach).len / size * size;
        let free = GuestRange::between(at, quiet.min(end));
        if free.is_empty() {
            return Ok(UnmapStep::Need(Need::Busy(at, ticket)));
        }
        let maps = &self.qcow2.maps;
        let located = maps
            .locate(at)
            .map_err(|fault| self.image.corrupt(0, fault))?;
        let index = geometry.l1_index(GuestOffset(at));
        let per_table = geometry.guest_bytes_per_l2();
        let table_end = (at / per_table + 1).saturating_mul(per_table);
        let slice = match located {
            Located::NoTable if mode == UnmapMode::Forget || !self.hides(range.marked, at) => {
                return Ok(UnmapStep::Done(table_end.min(end) - at));
            }
            Located::NoTable if geometry.version() == Version::V2 => {
                let len = table_end.min(end) - at;
                let skip = mode == UnmapMode::Discard;
                return Ok(if skip {
                    UnmapStep::Done(len)
                } else {
                    UnmapStep::Write(len)
                });
            }
            Located::NoTable
            | Located::Entry {
                table_copied: false,
                ..
            } => {
                return Ok(UnmapStep::Need(Need::Table(index)));
            }
            Located::Miss(slice) => return Ok(UnmapStep::Need(Need::Slice(slice))),
            Located::Entry { slice, .. } => slice,
        };
        let unmapper = Unmapper {
            active: *self,
            mode,
            marked: range.marked,
            slice,
        };
        let mut frees = Vec::new();
        let step = unmapper.run(maps, free, &mut frees);
        if !frees.is_empty() {
            let freed = match mode.gives_up_space() {
                true => FreedBy::Request,
                false => FreedBy::Other,
            };
            self.unmapped_by(freed, &frees);
        }
        Ok(step)
    }
}

impl Writer {
    /// Discards work in units of this many bytes.
    pub(crate) fn discard_unit(&self, geometry: &Geometry) -> u64 {
        match self.allocation {
            AllocationPolicy::Compact => geometry.subcluster_size(),
            AllocationPolicy::Contiguous => geometry.cluster_size(),
        }
    }
}

/// Changes the entries of one slice, under the lock of its claims.
struct Unmapper<'q, F: File> {
    active: Active<'q, F>,
    mode: UnmapMode,
    marked: bool,
    slice: u64,
}

/// What is done with one entry.
enum EntryChange {
    /// It stays.
    None,
    /// It becomes `entry`; `frees_old`: what the old one referred to is freed.
    Replace { entry: L2Entry, frees_old: bool },
    /// It cannot say so: zeros have to be written.
    Write,
}

impl EntryChange {
    /// The entry becomes one without a cluster.
    fn free(entry: L2Entry) -> EntryChange {
        EntryChange::Replace {
            entry,
            frees_old: true,
        }
    }
}

impl<F: File> Unmapper<'_, F> {
    fn run(&self, maps: &Maps, range: GuestRange, frees: &mut Vec<ClusterRange>) -> UnmapStep {
        if !maps.slices.pin(self.slice) {
            // Other threads needed its place since it was found.
            return UnmapStep::Need(Need::Slice(self.slice));
        }
        let step = self.run_pinned(maps, range, frees);
        maps.slices.unpin(self.slice);
        step
    }

    fn run_pinned(
        &self,
        maps: &Maps,
        range: GuestRange,
        frees: &mut Vec<ClusterRange>,
    ) -> UnmapStep {
        let (geometry, discards) = (self.active.geometry(), self.mode == UnmapMode::Discard);
        let mut done = 0;
        for part in range.pieces(geometry.cluster_size()) {
            let entry = match maps.locate(part.start) {
                Ok(Located::Entry { entry, slice, .. }) if slice == self.slice => entry,
                // In another slice, or damaged: the next look reports it.
                _ => break,
            };
            match self.change(entry, part) {
                // Space that an earlier writer left there.
                EntryChange::None if discards => self.note_hole(entry, part),
                EntryChange::None => {}
                EntryChange::Replace {
                    entry: new,
                    frees_old: gone,
                } => {
                    maps.update(part.start, |_| new);
                    if geometry.data_file() {
                        self.note_data_hole(new, part);
                    }
                    match reference_of(entry, geometry) {
                        Some(free) if gone => free.join(frees),
                        Some(kept) if data_of(entry) & !data_of(new) != 0 => {
                            // What the guest had there stays behind in its cluster.
                            self.active.writer.zeroed.write().clear(kept);
                            self.note_hole(new, part);
                        }
                        Some(_) if discards => self.note_hole(new, part),
                        _ => {}
                    }
                }
                EntryChange::Write if done > 0 => break,
                EntryChange::Write => return UnmapStep::Write(part.len),
            }
            done += part.len;
        }
        UnmapStep::Done(done)
    }

    /// Whether the host gets the space back that requests free.
    fn gives_back(&self) -> bool {
        self.active.image.options.gives_back(FreedBy::Request)
    }

    /// Notes the space of a part of a cluster of the data file, whatever became of the cluster.
    fn note_data_hole(&self, entry: L2Entry, part: GuestRange) {
        let geometry = self.active.geometry();
        let limits = self.active.queue.data_file().limits();
        let wanted = self.mode.gives_up_space();
        let given_back = self.gives_back() && limits.discard_zeroes;
        let given_back = given_back && !self.active.is_encrypted();
        if !wanted || !given_back || geometry.cluster_size() < DATA_HOLE_BYTES_MIN {
            return;
        }
        let offset = geometry.offset_in_cluster(GuestOffset(part.start));
        let cluster = part.start - offset;
        let found = empty_blocks(data_of(entry), offset, offset + part.len, geometry);
        if let Some((start, end)) = found {
            let hole = Hole {
                guest: cluster + start,
                host: cluster + start,
                len: end - start,
            };
            let mut alloc = self.active.writer.alloc.lock();
            alloc.holes.add(hole, geometry);
            self.active.writer.note_pressure(&alloc);
        }
    }

    /// Notes the space of a part of a cluster that has no data any more, under *compact*. Not in an encrypted
    /// image: a hole may be made once more when the mapping on the disk has data there again, that is zeroed in
    /// memory. A power cut then shows the hole, which decrypts to noise.
    fn note_hole(&self, entry: L2Entry, part: GuestRange) {
        let L2Entry::Cluster {
            host: Some(host),
            copied: true,
            alloc,
            ..
        } = entry
        else {
            return;
        };
        let given_back = self.gives_back() && self.active.writer.limits.discard_zeroes;
        let wanted = self.mode.gives_up_space() && given_back;
        let wanted = wanted && !self.active.is_encrypted();
        // A cluster that keeps its place without data is whole.
        let whole = alloc == 0 && self.active.image.options.discard_no_unref;
        if !wanted || !(whole || self.active.writer.allocation == AllocationPolicy::Compact) {
            return;
        }
        let geometry = self.active.geometry();
        if geometry.data_file() {
            // Noted already.
            return;
        }
        let offset = geometry.offset_in_cluster(GuestOffset(part.start));
        let cluster = part.start - offset;
        if let Some((start, end)) = empty_blocks(alloc, offset, offset + part.len, geometry) {
            let hole = Hole {
                guest: cluster + start,
                host: host.0 + start,
                len: end - start,
            };
            let mut alloc = self.active.writer.alloc.lock();
            alloc.holes.add(hole, geometry);
            self.active.writer.note_pressure(&alloc);
        }
    }

    /// What becomes of an entry when a part of its cluster is unmapped; the part is whole subclusters.
    fn change(&self, entry: L2Entry, part: GuestRange) -> EntryChange {
        let geometry = self.active.geometry();
        let all = geometry.subcluster_mask();
        let mask = part.subclusters(geometry);
        if self.mode == UnmapMode::Forget {
            return match entry {
                L2Entry::UNALLOCATED => EntryChange::None,
                _ => EntryChange::free(L2Entry::UNALLOCATED),
            };
        }
        let cluster = part.start & !(geometry.cluster_size() - 1);
        let backed = self.active.hides(self.marked, cluster);
        if geometry.version() == Version::V2 {
            return self.change_v2(entry, backed);
        }
        let (host, copied, alloc, zero) = match entry {
            // Written since it was found to be zeros.
            L2Entry::Compressed(_) if self.mode == UnmapMode::HideUnused => {
                return EntryChange::Write;
            }
            L2Entry::Compressed(_) if mask != all && self.mode == UnmapMode::Discard => {
                return EntryChange::None;
            }
            L2Entry::Compressed(_) if mask != all => return EntryChange::Write,
            L2Entry::Compressed(_) => {
                return EntryChange::free(plain_zero(all));
            }
            L2Entry::Cluster {
                host,
                copied,
                alloc,
                zero,
            } => (host, copied, alloc, zero),
        };
        if self.mode == UnmapMode::HideUnused && alloc & mask != 0 {
            return EntryChange::Write;
        }
        // Zeros already. A cluster without any data is given up below.
        if alloc & mask == 0 && !backed && (host.is_none() || alloc != 0) {
            return EntryChange::None;
        }
        let (alloc, zero_now) = (alloc & !mask, zero | mask);
        // A cluster shared with a snapshot is no space of ours to keep.
        let no_unref = self.active.image.options.discard_no_unref;
        let stays = matches!(self.mode, UnmapMode::Keep | UnmapMode::HideUnused)
            || no_unref && self.mode.gives_up_space();
        let keep = stays && copied;
        if host.is_some() && alloc == 0 && !keep {
            return EntryChange::free(plain_zero(zero_now));
        }
        let new = L2Entry::Cluster {
            host,
            copied,
            alloc,
            zero: zero_now,
        };
        if new == entry {
            EntryChange::None
        } else {
            EntryChange::Replace {
                entry: new,
                frees_old: false,
            }
        }
    }

    /// Version 2 has no zero clusters: without a backing file an unallocated one does as well.
    fn change_v2(&self, entry: L2Entry, backed: bool) -> EntryChange {
        match (entry, self.mode) {
            (_, UnmapMode::Discard) if backed => EntryChange::None,
            (_, _) if backed => EntryChange::Write,
            (L2Entry::UNALLOCATED, _) => EntryChange::None,
            _ => EntryChange::free(L2Entry::UNALLOCATED),
        }
    }
}

fn reads_as_zeros(kind: &Kind) -> bool {
    matches!(kind, Kind::Unallocated { .. } | Kind::Zero { .. })
}

fn plain_zero(zero: u32) -> L2Entry {
    L2Entry::Cluster {
        host: None,
        copied: false,
        alloc: 0,
        zero,
    }
}

/// The subclusters of an entry that have data.
fn data_of(entry: L2Entry) -> u32 {
    match entry {
        L2Entry::Compressed(_) => u32::MAX,
        L2Entry::Cluster { alloc, .. } => alloc,
    }
}
