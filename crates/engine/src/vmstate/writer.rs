//! One thread's handle on a state that is being saved.

use std::fmt;
use std::future::poll_fn;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::stream::{FuturesUnordered, StreamExt};
use gaur_block::{File, Target};

use super::chunk::{Chunk, Stored};
use super::ranges::Ranges;
use super::save::{Hold, Opened, Taken, VmStateSave};
use super::spill::{Spill, suits_memory, write_piece};
use crate::align;
use crate::error::ImageError;
use crate::queue::Queue;

/// Most writes that a writer has under way.
pub(super) const DEPTH: usize = 8;
/// A call that brings so many bytes need not copy them if they are aligned: it keeps the disk busy by
/// itself.
const DIRECT_BYTES: usize = 4 << 20;
/// Chunks that a writer remembers to have written to.
const TOUCHED_MAX: usize = 128;

type Flying<'q> = Pin<Box<dyn Future<Output = Result<(), ImageError>> + 'q>>;

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
    current: Option<Arc<Chunk>>,
    /// Chunks with bytes of this writer, unless they went to the file.
    touched: Vec<Arc<Chunk>>,
    flying: FuturesUnordered<Flying<'q>>,
    failed: Option<ImageError>,
}

impl<'q, F: File> VmStateWriter<'q, F> {
    pub(super) fn new(save: Arc<VmStateSave>, queue: &'q Queue<F>) -> VmStateWriter<'q, F> {
        VmStateWriter {
            save,
            queue,
            position: 0,
            current: None,
            touched: Vec::new(),
            flying: FuturesUnordered::new(),
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
    /// ranges of its own. What nobody writes to stays a hole, which reads as zeros.
    pub async fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ImageError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.save.check_range(offset, bytes.len() as u64)?;
        let chunk_bytes = self.save.chunk_bytes;
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let within = at % chunk_bytes;
            let mut count = rest.len().min((chunk_bytes - within) as usize);
            let direct = if within == 0 && self.may_go_directly(rest) {
                self.write_directly(at / chunk_bytes, rest).await?
            } else {
                0
            };
            if direct > 0 {
                count = direct;
            } else {
                let piece = rest.get(..count).unwrap_or_default();
                self.store(at / chunk_bytes, within as usize, piece).await?;
            }
            rest = rest.get(count..).unwrap_or_default();
            at += count as u64;
        }
        self.save.reaches(at);
        Ok(())
    }

    /// Waits until everything that this writer was given is in the file, and says whether it is. It is
    /// not durable then, that is what [`VmStateSave::finish`] does. Every writer must be flushed, or dropped,
    /// before that.
    pub async fn flush(&mut self) -> Result<(), ImageError> {
        self.current = None;
        for chunk in std::mem::take(&mut self.touched) {
            self.start(&chunk, false).await?;
        }
        while let Some(result) = self.flying.next().await {
            self.note(result);
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Puts bytes into a chunk, and the chunk on its way if it is full.
    async fn store(&mut self, index: u64, at: usize, bytes: &[u8]) -> Result<(), ImageError> {
        loop {
            let chunk = match &self.current {
                Some(chunk) if chunk.index == index => chunk,
                _ => {
                    let whole = bytes.len() as u64 == self.save.chunk_bytes;
                    let chunk = self.open(index, whole).await?;
                    self.remember(&chunk);
                    self.current.insert(chunk)
                }
            };
            match chunk.store(at, bytes) {
                Stored::More => return Ok(()),
                Stored::Closed => self.current = None,
                Stored::Full => {
                    let chunk = Arc::clone(chunk);
                    self.current = None;
                    self.touched.retain(|one| !Arc::ptr_eq(one, &chunk));
                    return self.start(&chunk, true).await;
                }
            }
        }
    }

    fn remember(&mut self, chunk: &Arc<Chunk>) {
        if self.touched.iter().any(|one| Arc::ptr_eq(one, chunk)) {
            return;
        }
        if self.touched.len() >= TOUCHED_MAX {
            self.touched.retain(|chunk| !chunk.is_closed());
        }
        self.touched.push(Arc::clone(chunk));
    }

    async fn open(&mut self, index: u64, whole: bool) -> Result<Arc<Chunk>, ImageError> {
        loop {
            let ticket = self.save.waiters.ticket();
            match self.save.open(index, whole)? {
                Opened::Ready(chunk) => return Ok(chunk),
                Opened::Load(hold) => return self.load(hold).await,
                Opened::Busy => self.save.waiters.wait(ticket).await,
                Opened::Crowded(chunk) => {
                    self.start(&chunk, true).await?;
                    // If there was nothing to write.
                    self.save.retire(&chunk, Chunk::close_clean);
                }
            }
        }
    }

    /// Reads back what of a chunk is in the file.
    async fn load(&self, hold: Hold) -> Result<Arc<Chunk>, ImageError> {
        let fail = |errno| ImageError::io(errno, "cannot read back the state of the machine");
        let (save, size) = (&self.save, self.save.cluster_bytes);
        let base = hold.index * save.chunk_clusters();
        let places: Vec<_> = {
            let shared = save.shared.lock();
            let clusters = base..base + save.chunk_clusters();
            shared.places.inside(clusters).collect()
        };
        let mut memory = save.memory();
        let mut valid = Ranges::default();
        for place in places {
            let start = ((place.first - base) * size) as usize;
            let range = start..start + (place.len * size) as usize;
            let target = Target::Memory(memory.get_mut(range.clone()).unwrap_or_default());
            let (file, pool) = (self.queue.top_file(), &self.queue.pool);
            let read = align::read(file, pool, place.host * size, target).await;
            read.map_err(fail)?;
            valid.insert(range);
        }
        Ok(hold.open(memory, valid))
    }

    /// Puts a chunk on its way to the file.
    async fn start(&mut self, chunk: &Arc<Chunk>, close: bool) -> Result<(), ImageError> {
        while self.flying.len() >= DEPTH
            && let Some(result) = self.flying.next().await
        {
            self.note(result);
        }
        let Some(spill) = Spill::begin(&self.save, self.queue, chunk, close).await? else {
            return Ok(());
        };
        if spill.must_wait() {
            spill.run().await?;
        } else {
            self.flying.push(Box::pin(spill.run()));
            self.turn().await;
        }
        if let Some(active) = self.queue.active() {
            active.relieve().await;
        }
        Ok(())
    }

    /// Starts what was put on its way, and lets others run once so that it leaves this thread.
    async fn turn(&mut self) {
        let mut yielded = false;
        poll_fn(|context| {
            while let Poll::Ready(Some(result)) = self.flying.poll_next_unpin(context) {
                if let Err(error) = result {
                    self.failed = Some(error);
                }
            }
            if self.flying.is_empty() || std::mem::replace(&mut yielded, true) {
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

    /// Whether these bytes can be written from where they are.
    fn may_go_directly(&self, bytes: &[u8]) -> bool {
        let file = self.queue.top_file();
        let enough = bytes.len() >= DIRECT_BYTES && bytes.len() as u64 >= self.save.chunk_bytes;
        enough
            && self.save.cluster_bytes >= u64::from(file.limits().request_alignment)
            && suits_memory(file, bytes)
    }

    /// Writes whole chunks from the caller's memory, from number `index` on; how many bytes that were.
    /// Ends before a chunk of which somebody has bytes in memory.
    async fn write_directly(&self, index: u64, bytes: &[u8]) -> Result<usize, ImageError> {
        let (save, queue) = (&self.save, self.queue);
        let chunk_bytes = save.chunk_bytes as usize;
        let mut writes = FuturesUnordered::new();
        let mut count = 0;
        for (index, bytes) in (index..).zip(bytes.chunks_exact(chunk_bytes)) {
            let Some(hold) = save.claim(index)? else {
                break;
            };
            while writes.len() >= DEPTH
                && let Some(result) = writes.next().await
            {
                result?;
            }
            let mut taken = Taken::new(save);
            let whole = 0..chunk_bytes;
            let pieces = save.place(queue, index, &whole, &mut taken).await?;
            writes.push(async move {
                for piece in &pieces {
                    let bytes = bytes.get(piece.range.clone()).unwrap_or_default();
                    write_piece(queue, piece.host_bytes, bytes).await?;
                }
                taken.keep();
                drop(hold);
                Ok(())
            });
            count += chunk_bytes;
        }
        while let Some(result) = writes.next().await {
            result?;
        }
        Ok(count)
    }
}

impl<F: File> fmt::Debug for VmStateWriter<'_, F> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("VmStateWriter")
            .field("save", &self.save)
            .field("position", &self.position)
            .field("under_way", &self.flying.len())
            .finish_non_exhaustive()
    }
}
