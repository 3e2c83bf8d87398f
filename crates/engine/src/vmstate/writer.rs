//! One thread's handle on a state that is being saved.

use std::fmt;
use std::future::poll_fn;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::stream::{FuturesUnordered, StreamExt};
use gaur_block::File;

use super::save::VmStateSave;
use super::spill::{Spill, must_wait};
use crate::error::ImageError;
use crate::queue::Queue;

/// Most writes that a writer has under way, and most reads of a reader.
pub(super) const IN_FLIGHT_MAX: usize = 8;

type InFlight<'q> = Pin<Box<dyn Future<Output = Result<(), ImageError>> + 'q>>;

/// Writes a state, for the thread of one queue; [`VmStateSave::writer`] makes it.
///
/// Writes are under way when its methods return, and go on whenever one of them is called; only
/// [`VmStateWriter::flush`] waits for them. A failure of such a write is the result of a later call.
/// After an error the state can still be given up, or finished if the reason is gone: what could not be
/// written stays in memory. The exception are bytes of the call itself that failed.
pub struct VmStateWriter<'q, F: File> {
    save: Arc<VmStateSave>,
    queue: &'q Queue<F>,
    position: u64,
    in_flight: FuturesUnordered<InFlight<'q>>,
    failed: Option<ImageError>,
}

impl<'q, F: File> VmStateWriter<'q, F> {
    pub(super) fn new(save: Arc<VmStateSave>, queue: &'q Queue<F>) -> VmStateWriter<'q, F> {
        VmStateWriter {
            save,
            queue,
            position: 0,
            in_flight: FuturesUnordered::new(),
            failed: None,
        }
    }

    /// The state it writes to.
    pub fn save(&self) -> &Arc<VmStateSave> {
        &self.save
    }

    /// Where the next [`VmStateWriter::write`] goes.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Lets the next [`VmStateWriter::write`] go to byte `position`.
    pub fn set_position(&mut self, position: u64) {
        self.position = position;
    }

    /// Writes the next bytes of the state, all of them.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        let at = self.position;
        self.write_at(at, bytes).await?;
        self.position = at + bytes.len() as u64;
        Ok(())
    }

    /// Writes the next bytes of the state, part after part, all of them. There may be any number.
    pub async fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> Result<(), ImageError> {
        for part in parts {
            self.write(part).await?;
        }
        Ok(())
    }

    /// Writes bytes at `offset` of the state. Writers of several threads may do so at once, each in
    /// ranges of its own. What is not written stays a hole, which reads as zeros.
    pub async fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ImageError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.save.check_range(offset, bytes.len() as u64)?;
        let chunk_bytes = self.save.chunk_bytes;
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let within = at % chunk_bytes;
            let (piece, after) = rest.split_at(rest.len().min((chunk_bytes - within) as usize));
            let to_write = self.save.store(at / chunk_bytes, within as usize, piece)?;
            (at, rest) = (at + piece.len() as u64, after);
            self.save.reaches(at);
            if let Some(index) = to_write {
                self.start(index).await?;
            }
        }
        Ok(())
    }

    /// Waits until everything that this writer was given is in the file, and says whether it is. It is
    /// not durable then, that is what [`VmStateSave::finish`] does. Every writer must be flushed, or dropped,
    /// before that.
    pub async fn flush(&mut self) -> Result<(), ImageError> {
        for index in self.save.open_chunks() {
            self.start(index).await?;
        }
        while let Some(result) = self.in_flight.next().await {
            self.note(result);
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Puts a chunk on its way to the file.
    async fn start(&mut self, index: u64) -> Result<(), ImageError> {
        while self.in_flight.len() >= IN_FLIGHT_MAX
            && let Some(result) = self.in_flight.next().await
        {
            self.note(result);
        }
        let queue = self.queue;
        let Some(spill) = Spill::begin(&self.save, queue, index).await? else {
            return Ok(());
        };
        if must_wait(&self.save, queue) {
            spill.run(queue).await?;
        } else {
            self.in_flight.push(Box::pin(spill.run(queue)));
            self.turn().await;
        }
        if let Some(active) = queue.active() {
            active.relieve().await;
        }
        Ok(())
    }

    /// Starts what was put on its way, and lets others run once so that it leaves this thread.
    async fn turn(&mut self) {
        let mut yielded = false;
        poll_fn(|context| {
            while let Poll::Ready(Some(result)) = self.in_flight.poll_next_unpin(context) {
                self.note(result);
            }
            if self.in_flight.is_empty() || std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    fn note(&mut self, result: Result<(), ImageError>) {
        if let Err(error) = result {
            self.failed = Some(error);
        }
    }
}

impl<F: File> fmt::Debug for VmStateWriter<'_, F> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("VmStateWriter")
            .field("save", &self.save)
            .field("position", &self.position)
            .field("under_way", &self.in_flight.len())
            .finish_non_exhaustive()
    }
}
