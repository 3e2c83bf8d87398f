//! Reading ahead: the next pieces of a state are on their way while one is being used.
//!
//! A piece on its way may wait unpolled for as long as the reader does something else, so it holds no
//! lock of the engine: what its bytes are is looked up before. Looking into a backing file needs locks;
//! where one shows, a piece ends early, and the reader fetches the rest when it gets there.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::stream::{FuturesOrdered, StreamExt};
use gaur_block::File;

use super::reader::State;
use super::writer::IN_FLIGHT_MAX;
use crate::error::ImageError;
use crate::pool::PoolBuffer;
use crate::queue::Queue;

/// A piece is this long, and begins at a multiple of it.
pub(super) const PIECE_BYTES: u64 = 1 << 20;

/// A piece of the state in memory.
struct Piece<F: File> {
    start: u64,
    /// Bytes of the memory that are filled.
    len: usize,
    memory: PoolBuffer<F>,
}

type InFlight<'q, F> = Pin<Box<dyn Future<Output = Result<Piece<F>, ImageError>> + 'q>>;

/// The piece that is being read, and those that come next.
pub(super) struct Ahead<'q, F: File> {
    current: Option<Piece<F>>,
    in_flight: FuturesOrdered<InFlight<'q, F>>,
    /// Where the first piece on its way begins, and the next one to be asked for.
    first: u64,
    next: u64,
    /// So many pieces are asked for: more the longer a reader reads on.
    depth: usize,
}

impl<F: File> Default for Ahead<'_, F> {
    fn default() -> Self {
        Ahead {
            current: None,
            in_flight: FuturesOrdered::new(),
            first: 0,
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
    ) -> Result<usize, ImageError> {
        loop {
            if let Some(piece) = &self.current
                && let Some(within) = at.checked_sub(piece.start)
                && within < piece.memory.len() as u64
            {
                let within = within as usize;
                let filled = piece.memory.get(within..piece.len).unwrap_or_default();
                if filled.is_empty() {
                    // The backing file shows here, or something is wrong.
                    let count = out.len().min(piece.memory.len() - within);
                    let out = out.get_mut(..count).unwrap_or_default();
                    state.read(queue, at, out).await?;
                    return Ok(count);
                }
                let count = out.len().min(filled.len());
                out[..count].copy_from_slice(&filled[..count]);
                return Ok(count);
            }
            if self.in_flight.is_empty() || self.first != at - at % PIECE_BYTES {
                *self = Ahead::default();
                (self.first, self.next) = (at - at % PIECE_BYTES, at - at % PIECE_BYTES);
            }
            self.ask(state, queue).await;
            let piece = match self.in_flight.next().await {
                Some(Ok(piece)) => piece,
                Some(Err(error)) => {
                    *self = Ahead::default();
                    return Err(error);
                }
                None => continue,
            };
            self.depth = (self.depth * 2).min(IN_FLIGHT_MAX);
            self.first += PIECE_BYTES;
            self.current = Some(piece);
            // Keeps as many on their way as before.
            self.ask(state, queue).await;
        }
    }

    async fn ask(&mut self, state: &Arc<State>, queue: &'q Queue<F>) {
        while self.in_flight.len() < self.depth && self.next < state.size_bytes() {
            let start = self.next;
            let span = PIECE_BYTES.min(state.size_bytes() - start);
            let mut extents = Vec::new();
            let mut len = 0;
            while len < span {
                let at = start + len;
                match state.extent(queue, at, span - len).await {
                    Ok(extent) if !state.shows_backing(queue, &extent, at) => {
                        extents.push(extent);
                        len += extent.len;
                    }
                    // An error is told to a reader that gets there.
                    _ => break,
                }
            }
            self.next = start + PIECE_BYTES;
            let state = Arc::clone(state);
            self.in_flight.push_back(Box::pin(async move {
                let mut memory = queue.pool.take(queue.top_file(), span as usize);
                let mut at = 0;
                for extent in extents {
                    let end = at + extent.len as usize;
                    let part = memory.get_mut(at..end).unwrap_or_default();
                    state.fetch(queue, extent, start + at as u64, part).await?;
                    at = end;
                }
                Ok(Piece {
                    start,
                    len: at,
                    memory,
                })
            }));
        }
    }
}
