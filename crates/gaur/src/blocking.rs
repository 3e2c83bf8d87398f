//! A queue whose calls block.

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;

use gaur_block::Status;
use gaur_engine::{BlockOn, Snapshot, VmStateIo, VmStateReader, VmStateWriter};
use gaur_reactor::{BlockingFile, block_on};

use crate::error::Result;
use crate::queue::{Queue, Unmap};

/// A queue of calls that return when they are done. It may move to another thread, but two threads do not
/// use one at once: each has its own. The methods are those of [`Queue`].
///
/// # Panics
/// On a thread with a reactor, when a call has to wait for another thread.
#[derive(Debug)]
pub struct BlockingQueue {
    queue: Queue<BlockingFile>,
}

/// A state that is being saved: [`io::Write`] and [`io::Seek`].
pub type StateOutput<'q> = VmStateIo<VmStateWriter<'q, BlockingFile>, Waiting>;

/// A state that is read: [`io::Read`] and [`io::Seek`].
pub type StateInput<'q> = VmStateIo<VmStateReader<'q, BlockingFile>, Waiting>;

/// Waits for futures on the calling thread.
#[derive(Clone, Copy, Debug)]
pub struct Waiting;

impl BlockOn for Waiting {
    fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        block_on(future)
    }
}

impl BlockingQueue {
    pub(crate) fn new(queue: Queue<BlockingFile>) -> BlockingQueue {
        BlockingQueue { queue }
    }

    /// The same queue with futures for calls.
    pub fn queue(&self) -> &Queue<BlockingFile> {
        &self.queue
    }

    /// Size of the disk in bytes, as of now.
    pub fn size_bytes(&self) -> u64 {
        self.queue.size_bytes()
    }

    /// Fills `memory` from `offset` on.
    pub fn read_at(&self, offset: u64, memory: &mut [u8]) -> Result<()> {
        block_on(self.queue.read_at(offset, memory))
    }

    /// Fills `parts`, one after the other, from `offset` on.
    pub fn read_vectored_at(&self, offset: u64, parts: &mut [IoSliceMut<'_>]) -> Result<()> {
        block_on(self.queue.read_vectored_at(offset, parts))
    }

    /// Stores `bytes` at `offset`. They are durable after the next flush.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        block_on(self.queue.write_at(offset, bytes))
    }

    /// Stores `parts`, one after the other, at `offset`.
    pub fn write_vectored_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<()> {
        block_on(self.queue.write_vectored_at(offset, parts))
    }

    /// Makes a range read as zeros.
    pub fn zero(&self, range: Range<u64>, unmap: Unmap) -> Result<()> {
        block_on(self.queue.zero(range, unmap))
    }

    /// Says that a range is no longer needed. It reads as zeros or as before.
    pub fn discard(&self, range: Range<u64>) -> Result<()> {
        block_on(self.queue.discard(range))
    }

    /// Makes every request durable that was complete before this one, on any queue of the disk.
    pub fn flush(&self) -> Result<()> {
        block_on(self.queue.flush())
    }

    /// What the bytes from the start of `range` on are, for as far as they are the same.
    pub fn status(&self, range: Range<u64>) -> Result<Status> {
        block_on(self.queue.status(range))
    }

    /// Makes the disk larger; what is new reads as zeros.
    pub fn grow(&self, size_bytes: u64) -> Result<()> {
        block_on(self.queue.grow(size_bytes))
    }

    /// Makes the disk smaller; what lies beyond the new end is gone.
    pub fn shrink(&self, size_bytes: u64) -> Result<()> {
        block_on(self.queue.shrink(size_bytes))
    }

    /// The internal snapshots of the image, oldest first.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        block_on(self.queue.snapshots())
    }

    /// Keeps the disk as it is now under `name`. Requests of other queues wait for a moment.
    pub fn create_snapshot(&self, name: &str) -> Result<Snapshot> {
        block_on(self.queue.create_snapshot(name))
    }

    /// Makes the disk what it was when the snapshot with this id, else name, was made.
    pub fn apply_snapshot(&self, which: &str) -> Result<Snapshot> {
        block_on(self.queue.apply_snapshot(which))
    }

    /// Forgets the snapshot with this id, else name, and gives back the space that it alone had.
    pub fn delete_snapshot(&self, which: &str) -> Result<Snapshot> {
        block_on(self.queue.delete_snapshot(which))
    }

    /// Makes a snapshot with the state of a virtual machine, which `write` writes. If it fails, there is no
    /// snapshot and the image is as it was.
    pub fn save_state(
        &self,
        name: &str,
        write: impl FnOnce(&mut StateOutput<'_>) -> io::Result<()>,
    ) -> Result<Snapshot> {
        block_on(self.queue.save_state_with(name, async |writer| {
            let mut output = writer.into_io(Waiting);
            write(&mut output)?;
            io::Write::flush(&mut output)?;
            Ok(())
        }))
    }

    /// The state in the snapshot with this id, else name, which is kept from being deleted meanwhile.
    pub fn read_state(&self, which: &str) -> Result<StateInput<'_>> {
        Ok(block_on(self.queue.read_state(which))?.into_io(Waiting))
    }
}
