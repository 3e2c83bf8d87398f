//! Copy-on-read: what a read finds below the top image stays in it, so that the next read does not go there again. And the
//! same for a whole disk in the background (`Queue::stream`).
//!
//! The layers below do not change while the image is open. So they are read without any lock, and only storing what was
//! read looks at the mapping again (`write/copied.rs`). What is copied is whole clusters, or subclusters where the image
//! has them, as a write of one byte would. What the mapping says to be zeros is not copied: it costs no input, and reads
//! the same without any backing file. Where zeros are marked ([`OpenOptions::mark_zeros`](crate::OpenOptions)) it is, as QEMU
//! does. Data that turns out to be nothing but zeros is marked, where the format can.
//!
//! A copy is for the next read only: when it fails, or when enough of them are under way, the read is served all the same.
//! Nothing is copied by a read of an image that refuses writes.

use std::cell::Cell;

use futures_util::StreamExt;
use futures_util::future::ready;
use gaur_block::{Errno, File, Target};

use crate::active::Active;
use crate::error::ImageError;
use crate::image::Image;
use crate::job::Job;
use crate::map::MapExtent;
use crate::merge::{IN_FLIGHT_MAX, PIECE_BYTES, Shares, ZEROES_BYTES};
use crate::metadata::maps::{Extent, Kind, Lookup};
use crate::queue::Queue;
use crate::range::GuestRange;
use crate::statistics::CopyStatistics;
use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::write::WhenBusy;

/// Most bytes that a read copies at once, unless a cluster has more.
const COPY_BYTES: u64 = 256 << 10;
/// Most bytes of the copies under way that the reads of one queue have begun; a single one may have more.
const COPYING_BYTES_MAX: u64 = 8 << 20;

/// A stream that is killed has lost about so many bytes.
const FLUSH_BYTES: u64 = 16 << 20;

/// What became of the copies of an image.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    bytes: AtomicU64,
    left_out: AtomicU64,
    failed: AtomicU64,
    first_failure: OnceLock<Errno>,
}

impl Image {
    /// Whether it was opened with copy-on-read.
    pub fn copies_on_read(&self) -> bool {
        self.options.copy_on_read
    }

    /// What reads have left in the top image.
    pub fn copies(&self) -> CopyStatistics {
        let copies = &self.copies;
        CopyStatistics {
            bytes: copies.bytes.load(Ordering::Relaxed),
            left_out: copies.left_out.load(Ordering::Relaxed),
            failed: copies.failed.load(Ordering::Relaxed),
            first_failure: copies.first_failure.get().copied(),
        }
    }

    fn note_copy(&self, copied: Result<u64, Errno>) {
        match copied {
            Ok(bytes) => {
                self.copies.bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            Err(errno) => self.note_failed_copy(errno),
        }
    }

    #[cold]
    fn note_failed_copy(&self, errno: Errno) {
        self.copies.failed.fetch_add(1, Ordering::Relaxed);
        let mut is_first = false;
        self.copies.first_failure.get_or_init(|| {
            is_first = true;
            errno
        });
        if is_first {
            let image = self.name();
            tracing::warn!(%image, %errno, "a copy-on-read failed; the read did not");
        }
    }
}

/// A copy under way.
struct Copying<'q> {
    held: &'q Cell<u64>,
    bytes: u64,
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        self.held.set(self.held.get() - self.bytes);
    }
}

/// What a read does next.
enum Part {
    /// So many bytes are read as ever.
    Plain(u64),
    /// The layers below have this.
    Below(Extent),
}

impl<F: File> Queue<F> {
    /// Serves a read of an image with copy-on-read.
    pub(crate) async fn serve_copying_read(
        &self,
        offset_bytes: u64,
        target: Target<'_>,
    ) -> Result<(), Errno> {
        let active = self.active();
        {
            let _epoch = self.enter_open().await;
            let range = GuestRange::checked(offset_bytes, target.len() as u64);
            let range = self.check_range(range, Errno::EINVAL)?;
            match active {
                Some(active) if self.check_writable().is_ok() => {
                    self.read_copying(active, range, target).await?;
                }
                _ => self.read(range.start, target).await?,
            }
        }
        if let Some(active) = active {
            active.relieve().await;
        }
        Ok(())
    }

    async fn read_copying(
        &self,
        active: Active<'_, F>,
        range: GuestRange,
        target: Target<'_>,
    ) -> Result<(), Errno> {
        let (mut rest, mut target) = (range, target);
        while !rest.is_empty() {
            let len = match self.next_part(active, rest).await? {
                Part::Plain(len) => {
                    let part = target.split_at(len as usize).0;
                    self.read(rest.start, part).await?;
                    len
                }
                Part::Below(found) => {
                    self.read_below_and_copy(active, rest, found, target)
                        .await?
                }
            };
            target = target.split_at(len as usize).1;
            rest = rest.after(len);
        }
        Ok(())
    }

    async fn next_part(&self, active: Active<'_, F>, range: GuestRange) -> Result<Part, Errno> {
        let mut plain = 0;
        while plain < range.len {
            let found = self.find(range.after(plain)).await?;
            let below = match found.kind {
                Kind::Data { .. } | Kind::Compressed { .. } => found.layer > 0,
                // What no layer has, the lowest one has, also where that is the top.
                Kind::Unallocated { .. } => active.marks_zeros(),
                Kind::Zero { .. } => found.layer > 0 && active.marks_zeros(),
            };
            match below {
                true if plain == 0 => return Ok(Part::Below(found)),
                true => break,
                false => plain += found.len,
            }
        }
        Ok(Part::Plain(plain))
    }

    /// Reads the start of a range, which the layers below have, and leaves it in the top. How many bytes were read.
    async fn read_below_and_copy(
        &self,
        active: Active<'_, F>,
        range: GuestRange,
        found: Extent,
        target: Target<'_>,
    ) -> Result<u64, Errno> {
        let Target::Memory(memory) = target else {
            // The export asks again with memory.
            return Err(Errno::EOPNOTSUPP);
        };
        let part = |len: u64| memory.split_at(len as usize).0;
        let run = match is_zero(found.kind) {
            true => {
                let run = whole_part(range.first(found.len), active.geometry().subcluster_size());
                let whole = self.units_around(active, run);
                if self.run_below(whole, is_zero).await? == whole.len {
                    part(run.len).fill_zeros();
                    let marked = active.mark_copied(whole, WhenBusy::GiveUp).await;
                    self.image.note_copy(marked);
                    return Ok(run.len);
                }
                run
            }
            false => self.data_below(active, range, found).await?,
        };
        let whole = self.units_around(active, run);
        let Some(_copying) = self.begin_copy(whole.len) else {
            self.image.copies.left_out.fetch_add(1, Ordering::Relaxed);
            self.read(run.start, Target::Memory(part(run.len))).await?;
            return Ok(run.len);
        };
        let mut buffer = self.pool.take(self.top_file(), whole.len as usize);
        if let Err(errno) = self.read_below(whole.start, &mut buffer).await {
            // What was asked for may be sound where what lies beside it is not.
            self.image.note_copy(Err(errno));
            self.read(run.start, Target::Memory(part(run.len))).await?;
            return Ok(run.len);
        }
        let from = (run.start - whole.start) as usize;
        let bytes = buffer.get(from..from + run.len as usize);
        part(run.len).copy_from(bytes.ok_or(Errno::EIO)?);
        let copied = active.store_copy(whole, &buffer, WhenBusy::GiveUp).await;
        self.image.note_copy(copied);
        Ok(run.len)
    }

    /// The run at the start of a range that is data of the layers below, where the top has nothing; `found` is its start.
    async fn data_below(
        &self,
        active: Active<'_, F>,
        range: GuestRange,
        found: Extent,
    ) -> Result<GuestRange, Errno> {
        let most = active.geometry().subcluster_size().max(COPY_BYTES);
        let range = range.first(most - range.start % most);
        let open = match active.qcow2.maps.extent(range) {
            Ok(Lookup::Extent(top)) if matches!(top.kind, Kind::Unallocated { .. }) => top.len,
            _ => 0,
        };
        let rest = range.first(open).after(found.len);
        let more = self.run_below(rest, |kind| !is_zero(kind)).await?;
        Ok(range.first(found.len + more))
    }

    /// For how many bytes from the start of a range on the layers below have only what is `wanted`.
    async fn run_below(
        &self,
        range: GuestRange,
        wanted: impl Fn(Kind) -> bool,
    ) -> Result<u64, Errno> {
        let mut len = 0;
        while len < range.len {
            let found = self.find_from(1, range.after(len)).await?;
            if !wanted(found.kind) {
                break;
            }
            len += found.len;
        }
        Ok(len)
    }

    /// The clusters or subclusters that a range lies in, as far as the disk goes.
    fn units_around(&self, active: Active<'_, F>, range: GuestRange) -> GuestRange {
        let whole = range.widened(active.geometry().subcluster_size());
        let end = whole.end().min(self.image.size_bytes());
        GuestRange::between(whole.start, end.max(range.end()))
    }

    /// `None` when enough copies are under way.
    fn begin_copy(&self, bytes: u64) -> Option<Copying<'_>> {
        let held = &self.copying_bytes;
        let sum = held.get() + bytes;
        if held.get() > 0 && sum > COPYING_BYTES_MAX {
            return None;
        }
        held.set(sum);
        Some(Copying { held, bytes })
    }

    /// Copies into the top image what the layers below have, while requests go on: afterwards it shows the same disk
    /// without them. How many bytes it holds since. What it has already is skipped, so that a stream which was given up, or whose process was killed, goes
    /// on where it was. What is copied is durable at the end. Several queues may do it together: each has done its own
    /// `shares` when it returns. Snapshots are left as they are.
    ///
    /// # Errors
    /// An image without layers that could be below it, or one that is not written to; those of the host and of damage in
    /// any layer. If it fails, or `job` is cancelled, a part was copied.
    pub async fn stream(&self, shares: &Shares, job: &Job) -> Result<u64, ImageError> {
        let active = self.changing()?;
        let most = active.geometry().subcluster_size().max(PIECE_BYTES);
        let pieces = self.pieces(
            shares,
            job,
            (most, ZEROES_BYTES),
            async |extent: &MapExtent, _| Ok((extent.depth > 0 && !extent.zero, extent.len_bytes)),
        );
        // A copy under way is never given up: its write would land on what the guest puts there next.
        let (failure, copied, unflushed) = (Cell::new(None), Cell::new(0), Cell::new(0));
        let wanted = pieces.take_while(|_| ready(failure.get().is_none()));
        let streamed = wanted
            .map(async |piece| {
                let copied = self.stream_piece(active, piece?.range, job).await?;
                unflushed.set(unflushed.get() + copied);
                if unflushed.get() >= FLUSH_BYTES {
                    unflushed.set(0);
                    active.flush_all().await?;
                }
                Ok(copied)
            })
            .buffer_unordered(IN_FLIGHT_MAX)
            .for_each(|streamed| {
                copied.set(copied.get() + *streamed.as_ref().unwrap_or(&0));
                failure.set(failure.get().or(streamed.err()));
                ready(())
            });
        streamed.await;
        let streamed = match failure.get() {
            None => active.flush_all().await.map(|()| copied.get()),
            Some(errno) => Err(errno),
        };
        streamed.map_err(|errno| self.image.explain(errno, "cannot stream"))
    }

    async fn stream_piece(
        &self,
        active: Active<'_, F>,
        range: GuestRange,
        job: &Job,
    ) -> Result<u64, Errno> {
        job.admit(range.len).await?;
        let copied = {
            let _epoch = self.enter_open().await;
            self.check_writable()?;
            // The disk may have become smaller.
            let inside = range.intersect(GuestRange::new(0, self.image.size_bytes()));
            if inside.is_empty() {
                return Ok(0);
            }
            let whole = self.units_around(active, inside);
            let mut buffer = self.pool.take(self.top_file(), whole.len as usize);
            self.read_below(whole.start, &mut buffer).await?;
            active.store_copy(whole, &buffer, WhenBusy::Wait).await?
        };
        active.relieve().await;
        job.step(range.len)?;
        Ok(copied)
    }
}

fn is_zero(kind: Kind) -> bool {
    matches!(kind, Kind::Unallocated { .. } | Kind::Zero { .. })
}

/// The start of a range: its whole units, or what it has of the first.
fn whole_part(range: GuestRange, unit: u64) -> GuestRange {
    let inside = range.start % unit;
    match inside == 0 && range.len >= unit {
        true => range.first(range.len - range.len % unit),
        false => range.first(unit - inside),
    }
}

#[cfg(test)]
mod tests;
