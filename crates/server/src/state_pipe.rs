//! A pipe in memory for VM state, between a thread or socket and the engine. A few buffers go round, so
//! that one side reads while the other writes.
//!
//! Both ends wait without a runtime: a task on a reactor, or a thread by `block_on`. An end that is
//! dropped before the stream is complete breaks the pipe for the other end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use async_channel as channel;
use parking_lot::Mutex;

/// Bytes of a piece.
pub const PIECE_BYTES: usize = 1 << 20;
/// Pieces of a pipe.
const PIECES: usize = 16;
/// So many used pieces go back to the sender at once: threads that take turns piece by piece do little
/// else on a busy machine.
const PIECES_GIVEN_BACK: usize = PIECES / 2;

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

struct Pipe {
    free: (channel::Sender<Piece>, channel::Receiver<Piece>),
    full: (channel::Sender<Piece>, channel::Receiver<Piece>),
    /// Used pieces, soon to be free.
    used: Mutex<Vec<Piece>>,
    end: OnceLock<End>,
    sent_bytes: AtomicU64,
}

impl Pipe {
    /// Ends the stream, unless it has ended already.
    fn end(&self, end: End) {
        self.end.get_or_init(|| end);
        self.free.0.close();
        self.full.0.close();
    }
}

/// Where the bytes go in.
pub struct Sender(Arc<Pipe>);

/// Where they come out.
pub struct Receiver(Arc<Pipe>);

/// A way to look at a pipe, and to break it, from anywhere.
#[derive(Clone)]
pub struct Handle(Arc<Pipe>);

/// The stream broke: the other end was dropped, or the pipe was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// A new pipe.
pub fn pipe() -> (Sender, Receiver, Handle) {
    let pipe = Arc::new(Pipe {
        free: channel::unbounded(),
        full: channel::unbounded(),
        used: Mutex::default(),
        end: OnceLock::new(),
        sent_bytes: AtomicU64::new(0),
    });
    for _ in 0..PIECES {
        // It is open yet.
        let _ = pipe.free.0.try_send(Piece::new());
    }
    (
        Sender(Arc::clone(&pipe)),
        Receiver(Arc::clone(&pipe)),
        Handle(pipe),
    )
}

impl Sender {
    /// Memory for the next bytes, [`PIECE_BYTES`] long; waits until there is some.
    pub async fn piece(&self) -> Result<Piece, Broken> {
        match self.0.end.get() {
            Some(_) => Err(Broken),
            None => {
                let mut piece = self.0.free.1.recv().await.map_err(|_| Broken)?;
                piece.resize(PIECE_BYTES, 0);
                Ok(piece)
            }
        }
    }

    /// Sends a piece on.
    pub fn send(&self, piece: Piece) {
        let len_bytes = piece.len() as u64;
        self.0.sent_bytes.fetch_add(len_bytes, Ordering::Relaxed);
        // The receiver of a stream that has ended wants no more.
        let _ = self.0.full.0.try_send(piece);
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
        if self.0.end.get() == Some(&End::Broken) {
            return Err(Broken);
        }
        match (self.0.full.1.recv().await, self.0.end.get()) {
            (Ok(piece), _) => Ok(Some(piece)),
            (Err(_), Some(End::Complete)) => Ok(None),
            (Err(_), _) => Err(Broken),
        }
    }

    /// A piece whose bytes were used.
    pub fn give_back(&self, piece: Piece) {
        let mut used = self.0.used.lock();
        used.push(piece);
        if used.len() >= PIECES_GIVEN_BACK {
            for piece in used.drain(..) {
                // A sender whose stream has ended wants no more.
                let _ = self.0.free.0.try_send(piece);
            }
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
        self.0.sent_bytes.load(Ordering::Relaxed)
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
        let pipe = &receiver.0;
        assert!(pipe.free.1.len() + pipe.used.lock().len() + pipe.full.1.len() <= PIECES);
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
