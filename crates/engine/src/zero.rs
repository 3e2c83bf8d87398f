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
use crate::metadata::alloc::Free;
use crate::metadata::holes::Hole;
use crate::metadata::maps::Kind;
use crate::metadata::maps::{Located, Maps};
use crate::queue::Unmap;
use crate::write::{Need, reference_of};

/// What is done with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Zeros, and the space stays allocated where it is.
    Keep,
    /// Zeros, and space is given back.
    Unmap,
    /// Space is given back; zeros if the format can say so.
    Discard,
    /// Nothing is mapped any more, whatever lies below (shrinking).
    Forget,
}

/// What became of the start of a range.
enum Step {
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
}

impl UnmapRange {
    /// A range that is whole units already.
    fn whole((start, end): (u64, u64)) -> UnmapRange {
        UnmapRange {
            start,
            end,
            unit: 1,
            last_unit: 1,
        }
    }
}

/// Longest piece of zeros written at once.
const ZEROS_BYTES: u64 = 64 << 10;

impl<F: File> Active<'_, F> {
    /// Makes a range inside the image read as zeros.
    pub(crate) async fn zero(&self, offset: u64, len: u64, unmap: Unmap) -> Result<(), Errno> {
        let geometry = self.geometry();
        let unit = geometry.subcluster_size();
        let end = offset + len;
        let first = offset.next_multiple_of(unit);
        let range = UnmapRange {
            start: first,
            end,
            unit,
            last_unit: unit,
        };
        if first >= self.last_unit(range) {
            return self.zero_by_writing(offset, len).await;
        }
        self.zero_by_writing(offset, first - offset).await?;
        let mode = match unmap {
            Unmap::Allowed => Mode::Unmap,
            Unmap::Forbidden => Mode::Keep,
        };
        let job = Job::default();
        let last = self.unmap(range, mode, &job).await?;
        let tail = end.saturating_sub(last);
        self.zero_by_writing(last, tail).await
    }

    /// Gives back the whole clusters or subclusters of a range inside the image.
    pub(crate) async fn discard(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let unit = self.writer.discard_unit(self.geometry());
        let range = UnmapRange {
            start: offset.next_multiple_of(unit),
            end: offset + len,
            unit,
            last_unit: self.geometry().cluster_size(),
        };
        let job = Job::default();
        self.unmap(range, Mode::Discard, &job).await?;
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
    pub(crate) async fn forget(&self, range: (u64, u64), job: &Job) -> Result<(), Errno> {
        self.unmap(UnmapRange::whole(range), Mode::Forget, job)
            .await?;
        Ok(())
    }

    /// Makes clusters beyond the end of the image read as zeros when it will reach them.
    pub(crate) async fn zero_beyond(&self, range: (u64, u64), job: &Job) -> Result<(), Errno> {
        // As above: some of it may be written.
        let _epoch = self.queue.enter();
        self.unmap(UnmapRange::whole(range), Mode::Unmap, job)
            .await?;
        Ok(())
    }

    /// Goes through the whole units of a range; says where the last of them ended.
    async fn unmap(&self, range: UnmapRange, mode: Mode, job: &Job) -> Result<u64, Errno> {
        let (mut at, mut told) = (range.start, range.start);
        job.expect(range.end.saturating_sub(range.start));
        while at < self.last_unit(range) {
            job.step(at - told)?;
            told = at;
            match self.unmap_step(at, range, mode)? {
                Step::Done(len) => at += len,
                Step::Need(need) => self.resolve(need).await?,
                Step::Write(len) => {
                    let stop = (at + len).min(range.end);
                    let inside = self.image.size_bytes().clamp(at, stop) - at;
                    self.zero_by_writing(at, inside).await?;
                    // A growing image needs zeros where it is about to reach.
                    self.write_zero_bytes(at + inside, stop - at - inside)
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
    async fn zero_by_writing(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let reads_as_zeros =
            |kind: &Kind| matches!(kind, Kind::Unallocated { .. } | Kind::Zero { .. });
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let found = self.queue.find(at, end - at).await?;
            if !reads_as_zeros(&found.kind) {
                self.write_zero_bytes(at, found.len).await?;
                at += found.len;
                continue;
            }
            // A write that is under way has its data in place already, and so may others that were
            // overtaken by it. Its commit must not bring any of that up after these zeros.
            let ticket = self.writer.claims.ticket(at);
            let len = found.len.min(self.writer.claims.end_of_slice(at) - at);
            let now = {
                let claims = self.writer.claims.lock(at);
                if claims.free_prefix(at, at + len) == len {
                    Some(self.queue.find_now(at, len)?)
                } else {
                    None
                }
            };
            match now {
                None => self.writer.claims.waiters(at).wait(ticket).await,
                Some(Some(now)) if reads_as_zeros(&now.kind) => at += now.len,
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Writes zeros, whatever is there.
    pub(crate) async fn write_zero_bytes(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let step = (end - at).min(ZEROS_BYTES);
            let mut zeros = self.queue.pool.take(self.queue.top_file(), step as usize);
            zeros.fill(0);
            self.write(at, Source::memory(&zeros)).await?;
            at += step;
        }
        Ok(())
    }

    fn unmap_step(&self, at: u64, range: UnmapRange, mode: Mode) -> Result<Step, Errno> {
        let geometry = self.geometry();
        let ticket = self.writer.claims.ticket(at);
        let claims = self.writer.claims.lock(at);
        // Looked at under the lock: a write to where the image has grown to comes after it.
        let end = self.last_unit(range);
        if at >= end {
            return Ok(Step::Done(0));
        }
        // A cluster goes away as a whole when its last subcluster does, so a write to any part of it
        // has to be over, also to parts outside the range.
        let size = geometry.cluster_size();
        let start = at & !(size - 1);
        let reach = end
            .next_multiple_of(size)
            .min(self.writer.claims.end_of_slice(start));
        let quiet = start + claims.free_prefix(start, reach) / size * size;
        let free = quiet.min(end).saturating_sub(at);
        if free == 0 {
            return Ok(Step::Need(Need::Busy(at, ticket)));
        }
        let maps = &self.qcow2.maps;
        let located = maps
            .locate(at)
            .map_err(|fault| self.image.corrupt(0, fault))?;
        let index = geometry.l1_index(GuestOffset(at));
        let per_table = geometry.guest_bytes_per_l2();
        let table_end = (at / per_table + 1).saturating_mul(per_table);
        let slice = match located {
            Located::NoTable if mode == Mode::Forget || !self.image.has_backing_at(at) => {
                return Ok(Step::Done(table_end.min(end) - at));
            }
            Located::NoTable if geometry.version() == Version::V2 => {
                let len = table_end.min(end) - at;
                let skip = mode == Mode::Discard;
                return Ok(if skip {
                    Step::Done(len)
                } else {
                    Step::Write(len)
                });
            }
            Located::NoTable
            | Located::Entry {
                table_copied: false,
                ..
            } => {
                return Ok(Step::Need(Need::Table(index)));
            }
            Located::Miss(slice) => return Ok(Step::Need(Need::Slice(slice))),
            Located::Entry { slice, .. } => slice,
        };
        let unmapper = Unmapper {
            active: *self,
            mode,
            slice,
        };
        let mut frees = Vec::new();
        let step = unmapper.run(maps, (at, at + free), &mut frees);
        if !frees.is_empty() {
            self.unmapped(&frees);
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
    mode: Mode,
    slice: u64,
}

/// What is done with one entry.
enum Change {
    /// It stays.
    None,
    /// It becomes this; the references of the old entry go if `true`.
    Entry(L2Entry, bool),
    /// It cannot say so: zeros have to be written.
    Write,
}

impl<F: File> Unmapper<'_, F> {
    fn run(&self, maps: &Maps, range: (u64, u64), frees: &mut Vec<Free>) -> Step {
        if !maps.slices.pin(self.slice) {
            // Other threads needed its place since it was found.
            return Step::Need(Need::Slice(self.slice));
        }
        let step = self.run_pinned(maps, range, frees);
        maps.slices.unpin(self.slice);
        step
    }

    fn run_pinned(&self, maps: &Maps, range: (u64, u64), frees: &mut Vec<Free>) -> Step {
        let size = self.active.geometry().cluster_size();
        let (start, end) = range;
        let mut at = start;
        while at < end {
            let upto = ((at & !(size - 1)) + size).min(end);
            let entry = match maps.locate(at) {
                Ok(Located::Entry { entry, slice, .. }) if slice == self.slice => entry,
                _ => break,
            };
            match self.change(entry, at, upto) {
                // Space that an earlier writer left there.
                Change::None if self.mode == Mode::Discard => self.note_hole(entry, at, upto),
                Change::None => {}
                Change::Entry(new, gone) => {
                    maps.update(at, |_| new);
                    match reference_of(entry, self.active.geometry()) {
                        Some(free) if gone => Free::join(frees, free.start, free.len),
                        Some(kept) if data_of(entry) & !data_of(new) != 0 => {
                            // What the guest had there stays behind in its cluster.
                            self.active
                                .writer
                                .zeroed
                                .write()
                                .clear(kept.start, kept.len);
                            self.note_hole(new, at, upto);
                        }
                        Some(_) if self.mode == Mode::Discard => self.note_hole(new, at, upto),
                        _ => {}
                    }
                }
                Change::Write if at > start => break,
                Change::Write => return Step::Write(upto - at),
            }
            at = upto;
        }
        if at == start {
            // The entry is in another slice, or damaged: look again, which reports it.
            return Step::Done(0);
        }
        Step::Done(at - start)
    }

    /// Notes the space of guest bytes `at..upto`, which have no data any more, under *compact*.
    fn note_hole(&self, entry: L2Entry, at: u64, upto: u64) {
        let L2Entry::Cluster {
            host: Some(host),
            copied: true,
            alloc,
            ..
        } = entry
        else {
            return;
        };
        let given_back =
            self.active.image.options.discard && self.active.writer.limits.discard_zeroes;
        let wanted = matches!(self.mode, Mode::Unmap | Mode::Discard) && given_back;
        if !wanted || self.active.writer.allocation != AllocationPolicy::Compact {
            return;
        }
        let geometry = self.active.geometry();
        let offset = geometry.offset_in_cluster(GuestOffset(at));
        let cluster = at - offset;
        if let Some((start, end)) = empty_blocks(alloc, offset, upto - cluster, geometry) {
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

    fn change(&self, entry: L2Entry, at: u64, upto: u64) -> Change {
        let geometry = self.active.geometry();
        let all = geometry.subcluster_mask();
        let mask = self.mask(at, upto);
        if self.mode == Mode::Forget {
            return match entry {
                L2Entry::UNALLOCATED => Change::None,
                _ => Change::Entry(L2Entry::UNALLOCATED, true),
            };
        }
        let backed = self
            .active
            .image
            .has_backing_at(at & !(geometry.cluster_size() - 1));
        if geometry.version() == Version::V2 {
            return self.change_v2(entry, backed);
        }
        let (host, copied, alloc, zero) = match entry {
            L2Entry::Compressed(_) if mask != all && self.mode == Mode::Discard => {
                return Change::None;
            }
            L2Entry::Compressed(_) if mask != all => return Change::Write,
            L2Entry::Compressed(_) => return Change::Entry(plain_zero(all), true),
            L2Entry::Cluster {
                host,
                copied,
                alloc,
                zero,
            } => (host, copied, alloc, zero),
        };
        // Zeros already. A cluster without any data is given up below.
        if alloc & mask == 0 && !backed && (host.is_none() || alloc != 0) {
            return Change::None;
        }
        let (alloc, zero_now) = (alloc & !mask, zero | mask);
        // A cluster shared with a snapshot is no space of ours to keep.
        let keep = self.mode == Mode::Keep && copied;
        if host.is_some() && alloc == 0 && !keep {
            return Change::Entry(plain_zero(zero_now), true);
        }
        let new = L2Entry::Cluster {
            host,
            copied,
            alloc,
            zero: zero_now,
        };
        if new == entry {
            Change::None
        } else {
            Change::Entry(new, false)
        }
    }

    /// Version 2 has no zero clusters: without a backing file an unallocated one does as well.
    fn change_v2(&self, entry: L2Entry, backed: bool) -> Change {
        match (entry, self.mode) {
            (_, Mode::Discard) if backed => Change::None,
            (_, _) if backed => Change::Write,
            (L2Entry::UNALLOCATED, _) => Change::None,
            _ => Change::Entry(L2Entry::UNALLOCATED, true),
        }
    }

    /// The subclusters of one cluster that `at..upto` covers; both are multiples of a subcluster.
    fn mask(&self, at: u64, upto: u64) -> u32 {
        let geometry = self.active.geometry();
        let sub = geometry.subcluster_size();
        let first = geometry.offset_in_cluster(GuestOffset(at)) / sub;
        let count = (upto - at) / sub;
        let ones = if count >= 32 {
            u32::MAX
        } else {
            (1 << count) - 1
        };
        (ones << first) & geometry.subcluster_mask()
    }
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
