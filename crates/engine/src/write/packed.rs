//! Compressed clusters are packed: each begins at the byte behind the one before, as in QEMU.
//!
//! Several lie in one host cluster, and one may lie in two; each counts as a reference to every host cluster that
//! it touches. The clusters that are to be filled next, the *tail*, are counted once for themselves, so that they
//! stay taken when all that was packed into them is overwritten. A cluster that is full passes its own count
//! on to the last reference to it. Counts go up before the mapping is committed (O1), and
//! are never below what may be durable. A crash leaks the tail's own counts; `close` takes them back.

use gaur_block::{Errno, File, Request, Source};
use gaur_format::CompressedDescriptor;
use gaur_format::addr::HostOffset;

use super::{Need, NewMapping, Obstacle, Planner};
use crate::active::Active;
use crate::align;
use crate::compressor::{CompressedCluster, Content};
use crate::fill::Fill;
use crate::image::Image;
use crate::metadata::alloc::{Alloc, AllocError, Run};
use crate::metadata::claims::ClaimList;
use crate::metadata::maps::Maps;
use crate::queue::{Change, Queue, Unmap};
use crate::range::{ClusterRange, GuestRange};

/// Where the next compressed cluster of a queue goes: host bytes from `next` up to `end`.
#[derive(Debug, Default)]
pub(crate) struct PackedTail {
    next: u64,
    end: u64,
    /// All of it reads as zeros.
    zeroed: bool,
    /// The host's space for all of it was taken ahead.
    backed: bool,
}

impl PackedTail {
    /// Adds clusters that were taken; those before are given up unless these follow them.
    fn extend(&mut self, run: Run, alloc: &mut Alloc) {
        let size = alloc.geometry.cluster_size();
        let follows = run.start * size == self.end;
        if !follows {
            self.give_up(alloc);
            self.next = run.start * size;
        }
        self.zeroed = run.zeroed && (self.zeroed || !follows);
        self.backed = run.backed && (self.backed || !follows);
        self.end = (run.start + run.len) * size;
    }

    /// Gives its clusters up; one that has references stays.
    fn give_up(&mut self, alloc: &mut Alloc) {
        let size = alloc.geometry.cluster_size();
        let unused = self.next.div_ceil(size);
        if !self.next.is_multiple_of(size) {
            alloc.releasable.push(ClusterRange::new(unused - 1, 1));
        }
        alloc.take_back(Run {
            start: unused,
            len: self.end / size - unused,
            zeroed: self.zeroed,
            backed: self.backed,
        });
        *self = PackedTail::default();
    }
}

/// What to do with a compressed cluster.
enum PackedPlan<'q, F: File> {
    /// Write it into the mapping.
    New(NewMapping<'q, F>),
    /// Do this first, then plan again.
    Need(Need),
    /// No descriptor reaches the place it would get.
    Plain,
}

impl<F: File> Queue<F> {
    /// Stores the guest cluster at `offset_bytes` as `packed` says, which was made of `plain`. It is readable
    /// like what any write stored, and durable after the next flush. Later writes to a part of it store it
    /// plain again.
    ///
    /// # Errors
    /// [`Errno::EINVAL`] if the offset is not that of a cluster, or `packed` was made for another kind of
    /// image; otherwise those of a write.
    pub async fn write_compressed(
        &self,
        offset_bytes: u64,
        plain: &[u8],
        packed: &CompressedCluster,
    ) -> Result<(), Errno> {
        let request = Request::Write {
            offset_bytes,
            fua: false,
        };
        let result = self.serve_compressed(offset_bytes, plain, packed).await;
        self.end(request, plain.len() as u64, result).await
    }

    async fn serve_compressed(
        &self,
        at: u64,
        plain: &[u8],
        packed: &CompressedCluster,
    ) -> Result<(), Errno> {
        let range = GuestRange::checked(at, plain.len() as u64);
        // The rest of the last cluster becomes zeros, so the disk must not reach there meanwhile.
        let is_part = !(plain.len() as u64).is_multiple_of(self.cluster_bytes());
        let writer = self.image.writer.as_ref().filter(|_| is_part);
        let _same_size = match writer {
            Some(writer) => Some(writer.resizing.lock().await),
            None => None,
        };
        let change = match packed.content {
            Content::Zeros => Change::Zero(Unmap::Allowed),
            Content::Plain => Change::Write(Source::memory(plain)),
            // As in QEMU: there is nothing in a data file that could tell where such a cluster begins.
            Content::Compressed if self.image.data_file().is_some() => {
                return Err(Errno::EOPNOTSUPP);
            }
            Content::Compressed => {
                let whole = range.is_some_and(|range| packs_whole(&self.image, range, packed));
                if !whole || packed.plain_bytes != plain.len() {
                    return Err(Errno::EINVAL);
                }
                Change::Packed {
                    packed: packed.bytes(),
                    plain: Source::memory(plain),
                }
            }
        };
        self.serve_change(range, change).await
    }

    /// Bytes of a cluster; 1 for a raw image.
    pub(crate) fn cluster_bytes(&self) -> u64 {
        let active = self.active();
        active.map_or(1, |active| active.geometry().cluster_size())
    }
}

/// Whether a range is a cluster of the image, or the last part of one at its end, and `packed` is of the
/// image's kind.
fn packs_whole(image: &Image, range: GuestRange, packed: &CompressedCluster) -> bool {
    let top = image.top.qcow2.as_ref();
    top.is_some_and(|top| {
        let size = top.geometry.cluster_size();
        let end = range.end() == image.size_bytes() && range.len < size;
        let fits = (packed.bytes().len() as u64) < size;
        range.start.is_multiple_of(size)
            && (range.len == size || end)
            && packed.kind == top.compression
            && fits
    })
}

impl<'q, F: File> Active<'q, F> {
    /// Stores `packed`, the compressed bytes of the guest cluster at `at`, or `plain` where that cannot be.
    pub(crate) async fn write_packed(
        &self,
        at: u64,
        packed: &[u8],
        plain: Source<'_>,
    ) -> Result<(), Errno> {
        if self.qcow2.maps.log.is_some() {
            // Who takes over from a killed process knows no host clusters that several commits share.
            return self.write(at, plain).await;
        }
        loop {
            match self.plan_packed(at, packed.len() as u64)? {
                PackedPlan::Plain => return self.write(at, plain).await,
                PackedPlan::New(mapping) => {
                    return self.write_mapping_packed(mapping, packed).await;
                }
                PackedPlan::Need(need) => self.resolve(need).await?,
            }
        }
    }

    async fn write_mapping_packed(
        &self,
        mut mapping: NewMapping<'_, F>,
        packed: &[u8],
    ) -> Result<(), Errno> {
        let (file, pool, locks) = (self.queue.top_file(), &self.queue.pool, &self.image.locks);
        let (host, bytes) = (mapping.host, Source::memory(packed));
        #[cfg(feature = "broken-order")]
        if self.image.breaks(crate::options::BrokenRule::O2) {
            mapping.commit();
            return align::write(file, pool, locks, host, bytes).await;
        }
        align::write(file, pool, locks, host, bytes).await?;
        mapping.commit();
        Ok(())
    }

    /// Plans under the lock of the claims, where the mapping cannot change.
    fn plan_packed(&self, at: u64, len: u64) -> Result<PackedPlan<'q, F>, Errno> {
        let (claims, size) = (&self.writer.claims, self.geometry().cluster_size());
        let ticket = claims.ticket(at);
        let mut list = claims.lock(at);
        let planner = Planner {
            active: *self,
            range: GuestRange::new(at, size),
        };
        match planner.plan_packed(&self.qcow2.maps, &mut list, len) {
            Ok(Some(mapping)) => Ok(PackedPlan::New(mapping)),
            Ok(None) => Ok(PackedPlan::Plain),
            Err(Obstacle::Busy) => Ok(PackedPlan::Need(Need::Busy(at, ticket))),
            Err(Obstacle::Need(need)) => Ok(PackedPlan::Need(need)),
            Err(Obstacle::Failed(errno)) => Err(errno),
        }
    }

    /// Takes room for `len` bytes, less than a cluster, and counts a reference to each host cluster that they
    /// touch. `None` if no descriptor reaches there.
    fn take_packed(&self, len: u64) -> Result<Option<CompressedDescriptor>, AllocError> {
        let geometry = self.geometry();
        let size = geometry.cluster_size();
        let mut tail = self.queue.packed.borrow_mut();
        while tail.end - tail.next < len {
            let run = self.take_local(1)?;
            let mut alloc = self.writer.alloc.lock();
            tail.extend(run, &mut alloc);
            let clusters = ClusterRange::between(tail.next / size, tail.end / size);
            alloc.handed.entry(self.queue.id).or_default().tail = clusters;
        }
        let Some(place) = CompressedDescriptor::covering(HostOffset(tail.next), len, geometry)
        else {
            return Ok(None);
        };
        let end = tail.next + len;
        // The cluster that goes on being filled needs a count of its own. Where there is no room for that in
        // the count it is not filled any further.
        let open = !end.is_multiple_of(size) && self.writer.alloc.lock().share(end / size)?;
        tail.next = if open {
            end
        } else {
            end.next_multiple_of(size)
        };
        Ok(Some(place))
    }

    /// Gives up the place for the next compressed cluster.
    pub(crate) fn give_back_packed(&self) {
        let mut tail = self.queue.packed.borrow_mut();
        tail.give_up(&mut self.writer.alloc.lock());
    }
}

impl<'q, F: File> Planner<'q, F> {
    /// The mapping of a cluster to `len` compressed bytes; `None` if it has to be plain.
    fn plan_packed(
        &self,
        maps: &Maps,
        claims: &mut ClaimList,
        len: u64,
    ) -> Result<Option<NewMapping<'q, F>>, Obstacle> {
        let (_, slice) = self.entry_at(maps, self.range.start)?;
        if claims.free_prefix(self.range) != self.range {
            return Err(Obstacle::Busy);
        }
        self.pin(maps, slice)?;
        let taken = self.active.take_packed(len);
        let place = match taken.map_err(|error| self.obstacle(error)) {
            Ok(Some(place)) => place,
            other => {
                maps.slices.unpin(slice);
                return other.map(|_| None);
            }
        };
        Ok(Some(NewMapping {
            active: self.active,
            _claim: self.active.writer.claims.claim(claims, self.range),
            slice,
            region: self.range,
            written: self.range,
            host: place.offset,
            head: Fill::Nothing,
            tail: Fill::Nothing,
            run: Run::EMPTY,
            packed: Some(place),
            frees: self.old_references(maps, self.range),
            started: false,
            committed: false,
        }))
    }
}
