//! A queue of a disk: requests as futures for the thread that made it.

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use gaur_block::{Device, DeviceLimits, Errno, File, Payload, Request, Source, Status, Target};
use gaur_engine::{Job, NewSnapshot, Snapshot, VmStateReader, VmStateSave, VmStateWriter};
use gaur_reactor::{ReactorFile, ThreadFile};

use crate::disk::Shared;
use crate::error::{Error, Result};

/// Whether zeroing a range may give its space back to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmap {
    /// It may.
    Allowed,
    /// The space stays the disk's.
    Forbidden,
}

/// One thread's way into a disk. Its futures are for this thread: the reactor drives them, and so does
/// any executor of the thread beside [`Reactor::turn`](crate::Reactor::turn). Any number may be under way;
/// they are ordered only as far as one is awaited before the next begins. A future may be dropped, which
/// waits for the kernel to let go of its memory, but must not be leaked.
///
/// Offsets and lengths are bytes of the disk and need no alignment. It is a [`Device`], so the front ends
/// of `gaur-export` serve it.
pub struct Queue<F: File = ReactorFile> {
    queue: gaur_engine::Queue<F>,
    /// The disk is closed by the last queue, so this is dropped after the engine's.
    _shared: Arc<Shared>,
}

impl<F: ThreadFile> Queue<F> {
    pub(crate) fn new(shared: &Arc<Shared>) -> Queue<F> {
        Queue {
            queue: shared.queue(),
            _shared: Arc::clone(shared),
        }
    }
}

impl<F: File> Queue<F> {
    /// The engine's queue, for what this type does not offer.
    pub fn engine(&self) -> &gaur_engine::Queue<F> {
        &self.queue
    }

    /// Size of the disk in bytes, as of now.
    pub fn size_bytes(&self) -> u64 {
        self.queue.size_bytes()
    }

    /// Fills `memory` from `offset` on.
    ///
    /// # Errors
    /// Beyond the end of the disk nothing is read, and so for all that follow.
    pub async fn read_at(&self, offset: u64, memory: &mut [u8]) -> Result<()> {
        self.read(offset, Target::memory(memory)).await
    }

    /// Fills `parts`, one after the other, from `offset` on in one request.
    pub async fn read_vectored_at(&self, offset: u64, parts: &mut [IoSliceMut<'_>]) -> Result<()> {
        self.read(offset, Target::Memory(parts.into())).await
    }

    /// Stores `bytes` at `offset`. They are durable after the next [`Queue::flush`].
    pub async fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.write(offset, Source::memory(bytes)).await
    }

    /// Stores `parts`, one after the other, at `offset` in one request.
    pub async fn write_vectored_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<()> {
        self.write(offset, Source::Memory(parts.into())).await
    }

    /// Makes a range read as zeros.
    pub async fn zero(&self, range: Range<u64>, unmap: Unmap) -> Result<()> {
        let (offset_bytes, len_bytes) = offset_and_len(&range);
        let request = Request::WriteZeroes {
            offset_bytes,
            len_bytes,
            fua: false,
            may_unmap: unmap == Unmap::Allowed,
        };
        let zeroed = self.queue.submit(request, Payload::None).await;
        zeroed.map_err(|errno| failed("zero", offset_bytes, len_bytes, errno))
    }

    /// Says that a range is no longer needed. It reads as zeros or as before.
    pub async fn discard(&self, range: Range<u64>) -> Result<()> {
        let (offset_bytes, len_bytes) = offset_and_len(&range);
        let request = Request::Discard {
            offset_bytes,
            len_bytes,
        };
        let discarded = self.queue.submit(request, Payload::None).await;
        discarded.map_err(|errno| failed("discard", offset_bytes, len_bytes, errno))
    }

    /// Makes every request durable that was complete before this one, on any queue of the disk.
    pub async fn flush(&self) -> Result<()> {
        let flushed = self.queue.submit(Request::Flush, Payload::None).await;
        flushed.map_err(|errno| Error::from(errno).context("cannot flush"))
    }

    /// What the bytes from the start of `range` on are, for as far as they are the same.
    pub async fn status(&self, range: Range<u64>) -> Result<Status> {
        let (offset, len) = offset_and_len(&range);
        let status = self.queue.status(offset, len).await;
        status.map_err(|errno| failed("look at", offset, len, errno))
    }

    /// Makes the disk larger; what is new reads as zeros.
    pub async fn grow(&self, size_bytes: u64) -> Result<()> {
        Ok(self
            .queue
            .resize(size_bytes, false, &Job::default())
            .await?)
    }

    /// Makes the disk smaller; what lies beyond the new end is gone.
    pub async fn shrink(&self, size_bytes: u64) -> Result<()> {
        Ok(self.queue.resize(size_bytes, true, &Job::default()).await?)
    }

    /// The internal snapshots of the image, oldest first.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>> {
        Ok(self.queue.snapshots().await?)
    }

    /// Keeps the disk as it is now under `name`. Requests of other queues wait for a moment.
    pub async fn create_snapshot(&self, name: &str) -> Result<Snapshot> {
        let (new, job) = (named(name), Job::default());
        Ok(self.queue.create_snapshot(&new, &job).await?)
    }

    /// Makes the disk what it was when the snapshot with this id, else name, was made.
    pub async fn apply_snapshot(&self, which: &str) -> Result<Snapshot> {
        Ok(self.queue.apply_snapshot(which, &Job::default()).await?)
    }

    /// Forgets the snapshot with this id, else name, and gives back the space that it alone had.
    pub async fn delete_snapshot(&self, which: &str) -> Result<Snapshot> {
        Ok(self.queue.delete_snapshot(which, &Job::default()).await?)
    }

    /// Makes a snapshot with the state of a virtual machine, which `write` writes. If it fails, there is no
    /// snapshot and the image is as it was.
    pub async fn save_state(
        &self,
        name: &str,
        write: impl AsyncFnOnce(&mut VmStateWriter<'_, F>) -> Result<()>,
    ) -> Result<Snapshot> {
        let with = async |mut writer: VmStateWriter<'_, F>| {
            write(&mut writer).await?;
            writer.flush().await?;
            Ok(())
        };
        self.save_state_with(name, with).await
    }

    /// The same where `write` flushes its writer itself.
    pub(crate) async fn save_state_with(
        &self,
        name: &str,
        write: impl AsyncFnOnce(VmStateWriter<'_, F>) -> Result<()>,
    ) -> Result<Snapshot> {
        let save = VmStateSave::begin(self.queue.image())?;
        let (new, job) = (named(name), Job::default());
        let saved = match write(save.writer(&self.queue)).await {
            Ok(()) => save
                .finish(&self.queue, &new, &job)
                .await
                .map_err(Error::from),
            Err(error) => Err(error),
        };
        if saved.is_err() {
            save.abort(&self.queue).await;
        }
        saved
    }

    /// The state in the snapshot with this id, else name, which is kept from being deleted meanwhile.
    pub async fn read_state(&self, which: &str) -> Result<VmStateReader<'_, F>> {
        Ok(VmStateReader::open(&self.queue, which).await?)
    }

    async fn read(&self, offset_bytes: u64, target: Target<'_>) -> Result<()> {
        let len = target.len() as u64;
        let read = self
            .queue
            .submit(Request::Read { offset_bytes }, Payload::Read(target));
        read.await
            .map_err(|errno| failed("read", offset_bytes, len, errno))
    }

    async fn write(&self, offset_bytes: u64, source: Source<'_>) -> Result<()> {
        let len = source.len() as u64;
        let request = Request::Write {
            offset_bytes,
            fua: false,
        };
        let written = self.queue.submit(request, Payload::Write(source)).await;
        written.map_err(|errno| failed("write", offset_bytes, len, errno))
    }
}

impl<F: File> Device for Queue<F> {
    fn size_bytes(&self) -> u64 {
        self.queue.size_bytes()
    }

    fn limits(&self) -> DeviceLimits {
        self.queue.limits()
    }

    fn submit(
        &self,
        request: Request,
        payload: Payload<'_>,
    ) -> impl Future<Output = std::result::Result<(), Errno>> {
        self.queue.submit(request, payload)
    }

    fn status(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> impl Future<Output = std::result::Result<Status, Errno>> {
        self.queue.status(offset_bytes, len_bytes)
    }
}

impl<F: File> fmt::Debug for Queue<F> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Queue").field(self.queue.image()).finish()
    }
}

/// A range that ends before it starts is empty.
fn offset_and_len(range: &Range<u64>) -> (u64, u64) {
    (range.start, range.end.saturating_sub(range.start))
}

fn failed(what: &str, offset: u64, len: u64, errno: Errno) -> Error {
    Error::from(errno).context(format_args!("cannot {what} {len} bytes at offset {offset}"))
}

/// A snapshot that is made now.
fn named(name: &str) -> NewSnapshot {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    NewSnapshot {
        name: name.to_owned(),
        date_sec: u32::try_from(now.as_secs()).unwrap_or(u32::MAX),
        date_nsec: now.subsec_nanos(),
        ..NewSnapshot::default()
    }
}
