//! Moving guest data between the images of a chain, for `commit` and `rebase`: by extents, with many
//! requests in flight.
//!
//! Crash rule: a chain shows the same disk at any moment. A commit first makes the base hold what the
//! images above hide anyway, and only then empties the top. A rebase first copies what the new base lacks, and then
//! switches the name by one header write between two flushes (O5).

use std::cell::RefCell;
use std::ops::Range;

use futures_util::{TryStreamExt, stream};
use gaur_block::{Device, Errno, File, Payload, Request, Source, Target};
use gaur_format::feature::Autoclear;
use gaur_format::header::HeaderChange;

use crate::active::Active;
use crate::compressor::{CompressedCluster, Compressor};
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::map::MapExtent;
use crate::pool::PoolBuffer;
use crate::queue::Queue;
use crate::range::GuestRange;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Most bytes that are read and written at once.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;
/// Most bytes zeroed by one request, so that progress can be told.
pub(crate) const ZEROES_BYTES: u64 = 1 << 30;
/// Pieces at a time.
pub(crate) const IN_FLIGHT_MAX: usize = 16;
/// A share of the disk: some times as much as is in flight.
const SHARE_BYTES: u64 = 64 << 20;
/// About how many shares a large disk has.
const SHARES: u64 = 1024;
/// Differences are told in blocks of so many bytes.
const BLOCK_BYTES: usize = 4096;

/// A run of the disk that is to be looked at or moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) range: GuestRange,
    /// It reads as zeros.
    zero: bool,
}

/// The parts of a disk that no queue has taken yet, of those that walk over it together.
#[derive(Debug)]
pub struct Shares {
    next: AtomicU64,
    least_bytes: u64,
    /// Length of the base before it grew; `u64::MAX` until a queue has looked.
    base_end: AtomicU64,
}

impl Default for Shares {
    fn default() -> Shares {
        Shares::new(SHARE_BYTES)
    }
}

impl Shares {
    /// Of at least so many bytes, a power of two; of more, where a disk is so large that there were too many.
    pub fn new(least_bytes: u64) -> Shares {
        Shares {
            next: AtomicU64::new(0),
            least_bytes,
            base_end: AtomicU64::new(u64::MAX),
        }
    }

    /// How long the base was before any queue made it grow. Each asks before it does, with the length that it sees.
    fn base_end(&self, size_bytes: u64) -> u64 {
        let (unset, order) = (u64::MAX, Ordering::Relaxed);
        let first = self
            .base_end
            .compare_exchange(unset, size_bytes, order, order);
        first.map_or_else(|found| found, |_| size_bytes)
    }

    /// The next part of a disk of so many bytes. The first tells `job` how much there is to do.
    fn take(&self, size_bytes: u64, job: &Job) -> Option<Range<u64>> {
        let share = (size_bytes / SHARES).next_power_of_two();
        let share = share.max(self.least_bytes);
        let next = |at: u64| (at < size_bytes).then(|| size_bytes.min(at.saturating_add(share)));
        let start = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        let start = start.ok()?;
        if start == 0 {
            job.expect(size_bytes);
        }
        Some(start..next(start)?)
    }
}

impl<F: File> Queue<F> {
    /// Writes to `base` what the layers of this image hold; it was opened without the chain from `base` on
    /// ([`crate::OpenOptions::stop_at`]). What they do not hold is left as it is there. A smaller
    /// base grows first. Afterwards the base is durable; this image is unchanged. Several pairs of queues may do it
    /// together: each has done its own `shares` when it returns.
    ///
    /// No other request changes either image meanwhile. If it fails, or `job` is cancelled, both still show the disk
    /// they showed.
    ///
    /// # Errors
    /// Those of the host and of damage in either image.
    pub async fn commit_into<B: File>(
        &self,
        base: &Queue<B>,
        shares: &Shares,
        job: &Job,
    ) -> Result<(), ImageError> {
        let size = self.size_bytes();
        let base_end = shares.base_end(base.size_bytes());
        // What a container gains is noise until it is written, and the layers show zeros there.
        let noise_from = match base.image.top.container.is_some() {
            true => base_end,
            false => u64::MAX,
        };
        if base.size_bytes() < size {
            // A raw disk may end inside a sector, an image may not.
            base.resize(size, false, job).await?;
        }
        let lowest = self.image.layers().len().saturating_sub(1) as u32;
        let pieces = self.pieces(
            shares,
            job,
            (PIECE_BYTES, ZEROES_BYTES),
            async |extent: &MapExtent, at| {
                // A layer in between that ends before hides what the base has there: zeros.
                let hidden = extent.depth < lowest;
                if extent.present || hidden || at >= noise_from {
                    return Ok((true, extent.len_bytes));
                }
                Ok((false, extent.len_bytes.min(noise_from - at)))
            },
        );
        let copied = pieces
            .map_ok(|piece| self.copy_piece(base, piece, job))
            .try_buffer_unordered(IN_FLIGHT_MAX)
            .try_collect::<()>();
        copied
            .await
            .map_err(|errno| self.image.explain(errno, "cannot commit"))?;
        let flushed = base.flush_all().await;
        flushed.map_err(|errno| base.image.explain(errno, "cannot commit"))
    }

    async fn copy_piece<B: File>(
        &self,
        base: &Queue<B>,
        piece: Piece,
        job: &Job,
    ) -> Result<(), Errno> {
        let range = piece.range;
        match piece.zero {
            true => base.put_zeros(range).await?,
            false => {
                job.admit(range.len).await?;
                let buffer = self.read_piece(range).await?;
                base.put(range.start, &buffer).await?;
            }
        }
        job.step(range.len)
    }

    /// Gives up everything that the top image holds, so that it shows what lies below it. Snapshots stay.
    ///
    /// # Errors
    /// Those of the host. If it fails, or `job` is cancelled, a part may have been given up.
    pub async fn make_empty(&self, job: &Job) -> Result<(), ImageError> {
        let active = self.changing()?;
        let emptied = async {
            active.announce().await?;
            let end = self.size_bytes();
            let end = end.next_multiple_of(active.geometry().cluster_size());
            active.forget(GuestRange::new(0, end), job).await?;
            active.flush_all().await
        };
        let emptied = emptied.await;
        emptied.map_err(|errno| self.image.explain(errno, "cannot make it empty"))
    }

    /// Copies into the top image what reads differently over `new`, its next backing file (`None` for none), so that
    /// [`Queue::set_backing`] changes nothing that the guest sees. Layers from number `same_from` on are part of
    /// the new chain too. What is copied is stored by `compressor` if there is one, cluster by cluster. Several queues
    /// may do it together, each with a queue of `new` and a compressor: each has done its own `shares` when it returns.
    ///
    /// No other request changes the image meanwhile. If it fails, or `job` is cancelled, it shows the disk it showed.
    ///
    /// # Errors
    /// Those of the host and of damage in either image.
    pub async fn rebase_onto<B: File>(
        &self,
        new: Option<&Queue<B>>,
        same_from: Option<u32>,
        compressor: Option<Compressor>,
        shares: &Shares,
        job: &Job,
    ) -> Result<(), ImageError> {
        self.changing()?;
        let compressor = compressor.map(RefCell::new);
        let pieces = self.pieces(
            shares,
            job,
            (PIECE_BYTES, PIECE_BYTES),
            async |extent: &MapExtent, at: u64| {
                let own = extent.present && extent.depth == 0;
                let same = extent.present && same_from.is_some_and(|from| extent.depth >= from);
                if own || same {
                    return Ok((false, extent.len_bytes));
                }
                let beyond = MapExtent {
                    len_bytes: extent.len_bytes,
                    zero: true,
                    ..MapExtent::default()
                };
                let other = match new {
                    Some(new) if at < new.size_bytes() => {
                        let left = new.size_bytes() - at;
                        new.map(at, extent.len_bytes.min(left)).await?
                    }
                    _ => beyond,
                };
                let len = extent.len_bytes.min(other.len_bytes);
                Ok((!(extent.zero && other.zero), len))
            },
        );
        let copied = pieces
            .map_ok(|piece| self.copy_difference(new, compressor.as_ref(), piece, job))
            .try_buffer_unordered(IN_FLIGHT_MAX)
            .try_collect::<()>();
        let copied = copied.await;
        copied.map_err(|errno| self.image.explain(errno, "cannot rebase"))
    }

    async fn copy_difference<B: File>(
        &self,
        new: Option<&Queue<B>>,
        compressor: Option<&RefCell<Compressor>>,
        piece: Piece,
        job: &Job,
    ) -> Result<(), Errno> {
        let range = piece.range;
        let mut other = self.pool.take(self.top_file(), range.len as usize);
        let inside = new.map_or(0, |new| new.size_bytes().saturating_sub(range.start));
        let (there, beyond) = other.split_at_mut(inside.min(range.len) as usize);
        beyond.fill(0);
        if let Some(new) = new.filter(|_| !there.is_empty()) {
            new.get(range.start, Target::memory(there)).await?;
        }
        if piece.zero {
            if other.iter().any(|byte| *byte != 0) {
                self.hide(range).await?;
            }
            return job.step(range.len);
        }
        let old = self.read_piece(range).await?;
        for run in differences(&old, &other) {
            let at = range.start + run.start as u64;
            match compressor {
                None => self.put(at, &old[run]).await?,
                Some(compressor) => {
                    let range = GuestRange::new(at, run.len() as u64);
                    self.compress_clusters(range, compressor).await?;
                }
            }
        }
        job.step(range.len)
    }

    /// Stores the clusters that a range lies in compressed, with what they show.
    async fn compress_clusters(
        &self,
        range: GuestRange,
        compressor: &RefCell<Compressor>,
    ) -> Result<(), Errno> {
        let size = self.cluster_bytes();
        let mut packed = CompressedCluster::default();
        let mut at = range.start - range.start % size;
        while at < range.end() {
            let whole = GuestRange::new(at, size.min(self.size_bytes() - at));
            let plain = self.read_piece(whole).await?;
            compressor.borrow_mut().compress(&plain, &mut packed);
            self.write_compressed(at, &plain, &packed).await?;
            at += size;
        }
        Ok(())
    }

    /// Makes the image name `backing` as its backing file, of `format`; without a name it stands alone. Everything
    /// that was written before is durable first. Reads go on through the chain that was opened.
    ///
    /// # Errors
    /// A name that does not fit, a raw image, one whose data file stands for the whole disk; those of the host. After
    /// a power cut the old name or the new one is there.
    pub async fn set_backing(
        &self,
        backing: Option<&[u8]>,
        format: Option<&str>,
    ) -> Result<(), ImageError> {
        let active = self.changing()?;
        let raw_data = self.image.top.header();
        if backing.is_some()
            && raw_data.is_some_and(|top| top.autoclear.has(Autoclear::RAW_DATA_FILE))
        {
            let text = "an image whose data file is the disk itself cannot have a backing file";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        let explain = |errno| self.image.explain(errno, "cannot change the backing file");
        active.announce().await.map_err(explain)?;
        active.flush_all().await.map_err(explain)?;
        let _held = active.writer.structure.lock().await;
        let mut cluster = vec![0; active.geometry().cluster_size() as usize];
        active.read_file(0, &mut cluster).await.map_err(explain)?;
        let change =
            HeaderChange::backing(&cluster, backing, format).map_err(ImageError::format)?;
        active.switch_backing(&change).await.map_err(explain)
    }

    pub(crate) fn changing(&self) -> Result<Active<'_, F>, ImageError> {
        if self.image.read_only {
            let text = "the image is open read-only";
            return Err(ImageError::new(ErrorKind::ReadOnly, text));
        }
        let raw = || ImageError::new(ErrorKind::InvalidInput, "a raw image has no backing file");
        self.active().ok_or_else(raw)
    }

    /// The pieces of the disk that `choose` wants: it says that of an extent and where that begins, and for how many
    /// bytes it is true. A run of data is no longer than `most.0`, and one of zeros than `most.1`. A disk that shrinks
    /// meanwhile ends where it does then.
    pub(crate) fn pieces(
        &self,
        shares: &Shares,
        job: &Job,
        (data_max, zeroes_max): (u64, u64),
        choose: impl AsyncFn(&MapExtent, u64) -> Result<(bool, u64), Errno>,
    ) -> impl stream::Stream<Item = Result<Piece, Errno>> {
        let size = self.size_bytes();
        stream::try_unfold((0..0, choose), move |(mut share, choose)| async move {
            loop {
                if share.is_empty() {
                    share = match shares.take(size, job) {
                        Some(next) => next,
                        None => return Ok(None),
                    };
                }
                let at = share.start;
                let extent = match self.map(at, share.end - at).await {
                    Err(Errno::EINVAL) if at >= self.size_bytes() => return Ok(None),
                    extent => extent?,
                };
                let (wanted, len) = choose(&extent, at).await?;
                if !wanted {
                    share.start += len;
                    job.step(len)?;
                    continue;
                }
                let zero = extent.zero;
                let most = if zero { zeroes_max } else { data_max };
                let range = GuestRange::new(at, len.min(most - at % most));
                share.start = range.end();
                return Ok(Some((Piece { range, zero }, (share, choose))));
            }
        })
    }

    /// Makes a range zeros of the top image's own.
    async fn hide(&self, range: GuestRange) -> Result<(), Errno> {
        let active = self.active().ok_or(Errno::EROFS)?;
        {
            let _epoch = self.enter_open().await;
            active.announce().await?;
            active.hide(range).await?;
        }
        active.relieve().await;
        Ok(())
    }

    async fn read_piece(&self, range: GuestRange) -> Result<PoolBuffer<F>, Errno> {
        let mut buffer = self.pool.take(self.top_file(), range.len as usize);
        self.get(range.start, Target::memory(&mut buffer)).await?;
        Ok(buffer)
    }

    async fn get(&self, offset_bytes: u64, target: Target<'_>) -> Result<(), Errno> {
        self.submit(Request::Read { offset_bytes }, Payload::Read(target))
            .await
    }

    async fn put(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), Errno> {
        let request = Request::Write {
            offset_bytes,
            fua: false,
        };
        let payload = Payload::Write(Source::memory(bytes));
        self.submit(request, payload).await
    }

    async fn put_zeros(&self, range: GuestRange) -> Result<(), Errno> {
        let request = Request::WriteZeroes {
            offset_bytes: range.start,
            len_bytes: range.len,
            fua: false,
            may_unmap: true,
        };
        self.submit(request, Payload::None).await
    }
}

impl<F: File> Active<'_, F> {
    /// The name, a flush, and the sector that leads to it. The structure lock is held.
    async fn switch_backing(&self, change: &HeaderChange) -> Result<(), Errno> {
        #[cfg(feature = "broken-order")]
        if self.image.breaks(crate::options::BrokenRule::O5) {
            self.switch_header(0, &change.sector).await?;
            if let Some((at, name)) = &change.name {
                self.write_file(*at, name).await?;
            }
            return self.queue.barrier().await;
        }
        if let Some((at, name)) = &change.name {
            self.write_file(*at, name).await?;
            self.queue.barrier().await?;
        }
        self.switch_header(0, &change.sector).await
    }
}

/// Where `old` and `new` are not alike, in whole blocks.
fn differences(old: &[u8], new: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for start in (0..old.len()).step_by(BLOCK_BYTES) {
        let end = old.len().min(start + BLOCK_BYTES);
        if old.get(start..end) == new.get(start..end) {
            continue;
        }
        match runs.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_whole_blocks_and_joined() {
        let old = vec![0; 3 * BLOCK_BYTES + 100];
        let mut new = old.clone();
        assert!(differences(&old, &new).is_empty());
        new[BLOCK_BYTES - 1] = 1;
        new[BLOCK_BYTES] = 1;
        new[3 * BLOCK_BYTES + 99] = 1;
        let ends = 3 * BLOCK_BYTES..3 * BLOCK_BYTES + 100;
        assert_eq!(differences(&old, &new), [0..2 * BLOCK_BYTES, ends]);
    }
}
