//! Reading ahead: the next pieces of a state are on their way while one is being used.
//!
//! A piece on its way may wait unpolled for as long as the reader does something else, so it holds no
//! lock of the engine. Looking into a backing file needs some; where one shows, a piece ends early, and
//! the reader fetches the rest when it gets there.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::stream::{FuturesOrdered, StreamExt};
use gaur_block::{Errno, File};

use super::reader::State;
use super::writer::DEPTH;
use crate::pool::PoolBuffer;
use crate::queue::Queue;

/// A piece is this long, and begins at a multiple of it.
pub(super) const PIECE_BYTES: u64 = 1 << 20;

/// A piece of the state in memory.
struct Piece<F: File> {
    start: u64,
    /// Bytes of the memory that are filled.
    len: u64,
    memory: PoolBuffer<F>,
}

type Flying<'q, F> = Pin<Box<dyn Future<Output = Result<Piece<F>, Errno>> + 'q>>;

/// The piece that is being read, and those that come next.
pub(super) struct Ahead<'q, F: File> {
    current: Option<Piece<F>>,
    flying: FuturesOrdered<Flying<'q, F>>,
    /// Where the next piece to be asked for begins.
    next: u64,
    /// So many pieces are asked for: more the longer somebody reads on.
    depth: usize,
}

impl<F: File> Default for Ahead<'_, F> {
    fn default() -> Self {
        Ahead {
            current: None,
            flying: FuturesOrdered::new(),
            next: 0,
            depth: 1,
        }
    }
}

impl<'q, F: File> Ahead<'q, F> {
    /// Fills the beginning of `out` with bytes from `at` on, which is inside the state; at least one.
    pub(super) async fn read(
        &mut self,
        state: &Arc<State>,
        queue: &'q Queue<F>,
        at: u64,
        out: &mut [u8],
    ) -> Result<usize, Errno> {
        loop {
            if let Some(piece) = &self.current
                && let Some(span) = piece.span_at(at)
            {
                if let Some(count) = piece.copy(at, out) {
                    return Ok(count);
                }
                // The backing file shows here.
                let len = out.len().min(span);
                let out = out.get_mut(..len).unwrap_or_default();
                return state.fill(queue, at, out, true).await;
            }
            if self.expects(at) {
                self.ask(state, queue);
            } else {
                self.restart(state, queue, at);
            }
            let Some(piece) = self.flying.next().await else {
                return Err(Errno::EIO);
            };
            let piece = match piece {
                Ok(piece) => piece,
                Err(errno) => {
                    self.forget();
                    return Err(errno);
                }
            };
            self.depth = (self.depth * 2).min(DEPTH);
            self.current = Some(piece);
            // Keeps as many on their way as before.
            self.ask(state, queue);
        }
    }

    /// Whether the next piece on its way begins at or before `at` and is not over by then.
    fn expects(&self, at: u64) -> bool {
        let on_their_way = self.flying.len() as u64 * PIECE_BYTES;
        let aligned = self.next.next_multiple_of(PIECE_BYTES);
        on_their_way > 0 && aligned.checked_sub(on_their_way) == Some(at - at % PIECE_BYTES)
    }

    fn forget(&mut self) {
        self.current = None;
        self.flying = FuturesOrdered::new();
        self.depth = 1;
    }

    fn restart(&mut self, state: &Arc<State>, queue: &'q Queue<F>, at: u64) {
        self.forget();
        self.next = at - at % PIECE_BYTES;
        self.ask(state, queue);
    }

    fn ask(&mut self, state: &Arc<State>, queue: &'q Queue<F>) {
        while self.flying.len() < self.depth && self.next < state.size_bytes() {
            let start = self.next;
            let len = PIECE_BYTES.min(state.size_bytes() - start);
            self.next = start + len;
            let state = Arc::clone(state);
            self.flying.push_back(Box::pin(async move {
                let mut memory = queue.pool.take(queue.top_file(), len as usize);
                let len = state.fill(queue, start, &mut memory, false).await? as u64;
                Ok(Piece { start, len, memory })
            }));
        }
    }
}

impl<F: File> Piece<F> {
    /// How many bytes of the state it stands for from `at` on, filled or not; `None` for none.
    fn span_at(&self, at: u64) -> Option<usize> {
        let within = at.checked_sub(self.start)?;
        let left = (self.memory.len() as u64).checked_sub(within)?;
        (left > 0).then_some(left as usize)
    }

    /// Copies what it has at `at`; `None` if that is nothing.
    fn copy(&self, at: u64, out: &mut [u8]) -> Option<usize> {
        let within = at.checked_sub(self.start)?;
        let left = self.len.checked_sub(within).filter(|left| *left > 0)?;
        let count = out.len().min(left as usize);
        let bytes = self.memory.get(within as usize..)?.get(..count)?;
        out.get_mut(..count)?.copy_from_slice(bytes);
        Some(count)
    }
}
