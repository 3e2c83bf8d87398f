//! A pipe in memory for VM state, between a thread or socket and the engine. A few buffers go round, so
//! that one side reads while the other writes.
//!
//! Both ends wait without a runtime: a task on a reactor, or a thread by `block_on`. An end that is
//! dropped before the stream is complete breaks the pipe for the other end.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// Bytes of a piece.
pub const PIECE_BYTES: usize = 1 << 20;
/// Pieces of a pipe.
const PIECES: usize = 16;
/// A sender that waits for memory goes on when so many pieces are free: threads that take turns piece by
/// piece do little else on a busy machine.
const PIECES_TO_WAKE: usize = PIECES / 2;

/// A piece of the stream.
pub type Piece = Vec<u8>;

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All of it was sent.
    Complete,
    /// One end was dropped, or the pipe was cancelled.
    Broken,
}

struct State {
    free: Vec<Piece>,
    full: VecDeque<Piece>,
    end: Option<End>,
    sent_bytes: u64,
    sender: Option<Waker>,
    receiver: Option<Waker>,
}

#[derive(Clone)]
struct Shared(Arc<Mutex<State>>);

impl Shared {
    fn end(&self, end: End) {
        let wakers = {
            let mut state = self.0.lock();
            state.end.get_or_insert(end);
            [state.sender.take(), state.receiver.take()]
        };
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Where the bytes go in.
pub struct Sender(Shared);

/// Where they come out.
pub struct Receiver(Shared);

/// A way to look at a pipe, and to break it, from anywhere.
#[derive(Clone)]
pub struct Handle(Shared);

/// The stream broke: the other end was dropped, or the pipe was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// A new pipe.
pub fn pipe() -> (Sender, Receiver, Handle) {
    let shared = Shared(Arc::new(Mutex::new(State {
        free: vec![Piece::new(); PIECES],
        full: VecDeque::new(),
        end: None,
        sent_bytes: 0,
        sender: None,
        receiver: None,
    })));
    (
        Sender(shared.clone()),
        Receiver(shared.clone()),
        Handle(shared),
    )
}

impl Sender {
    /// Memory for the next bytes, [`PIECE_BYTES`] long; waits until there is some.
    pub async fn piece(&self) -> Result<Piece, Broken> {
        let mut piece = poll_fn(|context| self.poll_piece(context)).await?;
        piece.resize(PIECE_BYTES, 0);
        Ok(piece)
    }

    fn poll_piece(&self, context: &Context<'_>) -> Poll<Result<Piece, Broken>> {
        let mut state = self.0.0.lock();
        if state.end.is_some() {
            return Poll::Ready(Err(Broken));
        }
        if let Some(piece) = state.free.pop() {
            return Poll::Ready(Ok(piece));
        }
        state.sender = Some(context.waker().clone());
        Poll::Pending
    }

    /// Sends a piece on.
    pub fn send(&self, piece: Piece) {
        let waker = {
            let mut state = self.0.0.lock();
            state.sent_bytes += piece.len() as u64;
            state.full.push_back(piece);
            state.receiver.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// That was all.
    pub fn finish(self) {
        self.0.end(End::Complete);
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.0.end(End::Broken);
    }
}

impl Receiver {
    /// The next piece; `None` after the last.
    pub async fn next(&self) -> Result<Option<Piece>, Broken> {
        poll_fn(|context| {
            let mut state = self.0.0.lock();
            match (state.end, state.full.pop_front()) {
                (Some(End::Broken), _) => Poll::Ready(Err(Broken)),
                (_, Some(piece)) => Poll::Ready(Ok(Some(piece))),
                (Some(End::Complete), None) => Poll::Ready(Ok(None)),
                (None, None) => {
                    state.receiver = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// A piece whose bytes were used.
    pub fn give_back(&self, piece: Piece) {
        let waker = {
            let mut state = self.0.0.lock();
            state.free.push(piece);
            let enough = state.free.len() >= PIECES_TO_WAKE;
            if enough { state.sender.take() } else { None }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // After the last piece this changes nothing.
        self.0.end(End::Broken);
    }
}

impl Handle {
    /// Ends the stream for both sides, unless it is complete.
    pub fn cancel(&self) {
        self.0.end(End::Broken);
    }

    /// Bytes that were sent.
    pub fn sent_bytes(&self) -> u64 {
        self.0.0.lock().sent_bytes
    }
}

#[cfg(test)]
mod tests {
    use gaur_reactor::block_on;

    use super::*;

    fn send(sender: &Sender, bytes: &[u8]) -> Result<(), Broken> {
        let mut piece = block_on(sender.piece())?;
        piece.truncate(bytes.len());
        piece.copy_from_slice(bytes);
        sender.send(piece);
        Ok(())
    }

    #[test]
    fn pipe_keeps_order_with_bounded_memory() {
        let (sender, receiver, handle) = pipe();
        let writer = std::thread::spawn(move || {
            for number in 0..1000_u32 {
                send(&sender, &number.to_be_bytes()).expect("a receiver");
            }
            sender.finish();
        });
        let mut expected = 0_u32;
        while let Some(piece) = block_on(receiver.next()).expect("whole") {
            assert_eq!(piece, expected.to_be_bytes());
            expected += 1;
            receiver.give_back(piece);
        }
        writer.join().expect("no panic");
        assert_eq!((expected, handle.sent_bytes()), (1000, 4000));
        let state = receiver.0.0.lock();
        assert!(state.free.len() + state.full.len() <= PIECES);
    }

    #[test]
    fn dropping_one_end_breaks_the_pipe() {
        let (sender, receiver, _) = pipe();
        send(&sender, b"x").expect("room");
        drop(sender);
        assert_eq!(block_on(receiver.next()).map(|_| ()), Err(Broken));

        let (sender, receiver, _) = pipe();
        let waiting =
            std::thread::spawn(move || (0..PIECES + 1).try_for_each(|_| send(&sender, b"x")));
        drop(receiver);
        assert_eq!(waiting.join().expect("no panic"), Err(Broken));
    }

    #[test]
    fn a_complete_stream_stays_complete() {
        let (sender, receiver, handle) = pipe();
        send(&sender, b"all").expect("room");
        sender.finish();
        handle.cancel();
        let piece = block_on(receiver.next()).expect("whole").expect("a piece");
        assert_eq!(piece, b"all");
        assert!(block_on(receiver.next()).expect("whole").is_none());
    }

    #[test]
    fn a_cancelled_stream_wakes_both_sides() {
        let (sender, receiver, handle) = pipe();
        let reading = std::thread::spawn(move || block_on(receiver.next()).map(|_| ()));
        handle.cancel();
        assert_eq!(reading.join().expect("no panic"), Err(Broken));
        assert!(send(&sender, b"x").is_err());
    }
}
