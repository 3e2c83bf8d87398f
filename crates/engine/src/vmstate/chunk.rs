//! A piece of the state that is being put together in memory.
//!
//! Open, it takes bytes from any thread. On its way to the file it goes on taking bytes: the memory that
//! is being written stays as it is, and the new bytes go to a copy of it. Once it is closed whoever
//! still knows it looks for the piece again.

use std::ops::Range;
use std::sync::Arc;

use super::memory::Memory;
use super::ranges::Ranges;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

/// A piece of the state in memory.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Its number: where it begins, in units of its length.
    pub(super) index: u64,
    /// When somebody last wrote to it, by the save's own count.
    used: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    stage: Stage,
    memory: Option<Arc<Memory>>,
    /// Bytes that are what the state has there; all others of the memory are of no meaning.
    valid: Ranges,
    /// Bytes that were written since the last write to the file began.
    dirty: Ranges,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Open,
    Writing,
    Closed,
}

/// What became of bytes that were to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    /// They are in.
    More,
    /// They are in, and every byte of the chunk is new: it can go to the file.
    Full,
    /// The chunk is closed.
    Closed,
}

/// What is to be written to the file: whole clusters.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) memory: Arc<Memory>,
    pub(super) ranges: Ranges,
}

impl Chunk {
    /// The chunk number `index`, whose bytes in `valid` are in `memory` already.
    pub(super) fn new(index: u64, memory: Memory, valid: Ranges, now: u64) -> Chunk {
        Chunk {
            index,
            used: AtomicU64::new(now),
            state: Mutex::new(State {
                stage: Stage::Open,
                memory: Some(Arc::new(memory)),
                valid,
                dirty: Ranges::default(),
            }),
        }
    }

    /// Somebody writes to it now.
    pub(super) fn touch(&self, now: u64) {
        self.used.store(now, Ordering::Relaxed);
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes bytes for `at` and on, counted from the start of the chunk; they end inside it.
    pub(super) fn store(&self, at: usize, bytes: &[u8]) -> Stored {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(shared) = &mut state.memory else {
            return Stored::Closed;
        };
        // Copies the memory if it is just being written.
        let memory = Arc::make_mut(shared);
        let len = memory.len();
        memory[at..at + bytes.len()].copy_from_slice(bytes);
        state.valid.insert(at..at + bytes.len());
        state.dirty.insert(at..at + bytes.len());
        if state.stage == Stage::Open && state.dirty.covers(&(0..len)) {
            Stored::Full
        } else {
            Stored::More
        }
    }

    /// Whether it waits in memory, on its way nowhere.
    pub(super) fn is_idle(&self) -> bool {
        self.state.lock().stage == Stage::Open
    }

    /// Whether it takes no more bytes.
    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().stage == Stage::Closed
    }

    /// Begins to write what is new: whole clusters of `unit` bytes, with zeros where nothing was ever
    /// written. `None` if nothing is new, or it is being written already.
    pub(super) fn begin_write(&self, unit: usize) -> Option<Copy> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        if state.stage != Stage::Open || state.dirty.is_empty() {
            return None;
        }
        let ranges = state.dirty.rounded_out(unit);
        let shared = state.memory.as_mut()?;
        for range in ranges.iter() {
            for gap in state.valid.gaps(range) {
                Arc::make_mut(shared)[gap].fill(0);
            }
            state.valid.insert(range.clone());
        }
        state.dirty = Ranges::default();
        state.stage = Stage::Writing;
        Some(Copy {
            memory: Arc::clone(shared),
            ranges,
        })
    }

    /// The write that [`Chunk::begin_write`] began has failed, or nobody waited for its end.
    pub(super) fn write_failed(&self, ranges: &Ranges) {
        let mut state = self.state.lock();
        for range in ranges.iter() {
            state.dirty.insert(range.clone());
        }
        state.stage = Stage::Open;
    }

    /// The write that [`Chunk::begin_write`] began is done. Nothing new, and wanted so (`close`) or all
    /// there: the chunk is closed, and its memory may be used again.
    pub(super) fn write_done(&self, close: bool) -> Ended {
        let mut state = self.state.lock();
        state.stage = Stage::Open;
        let whole = |memory: &Arc<Memory>| state.valid.covers(&(0..memory.len()));
        let wanted = close || state.memory.as_ref().is_some_and(whole);
        if wanted && state.dirty.is_empty() {
            return state.close();
        }
        Ended::Open
    }

    /// Closes it if nothing in it is new.
    pub(super) fn close_clean(&self) -> Ended {
        let mut state = self.state.lock();
        if state.stage == Stage::Open && state.dirty.is_empty() {
            return state.close();
        }
        Ended::Open
    }

    /// Closes it and forgets what is new.
    pub(super) fn discard(&self) {
        self.state.lock().close();
    }
}

/// Whether a chunk goes on.
#[derive(Debug)]
pub(super) enum Ended {
    /// It does.
    Open,
    /// It does not; this was its memory, if nobody else has it.
    Closed(Option<Memory>),
}

impl State {
    fn close(&mut self) -> Ended {
        self.stage = Stage::Closed;
        self.valid = Ranges::default();
        self.dirty = Ranges::default();
        Ended::Closed(self.memory.take().and_then(Arc::into_inner))
    }
}

impl Copy {
    /// The bytes in `range`.
    pub(super) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.memory[range]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk() -> Chunk {
        let mut memory = Memory::new(64);
        memory.fill(0xee);
        Chunk::new(0, memory, Ranges::default(), 0)
    }

    /// Where the ranges to be written begin and end.
    fn ends(copy: &Copy) -> Vec<(usize, usize)> {
        let ranges = copy.ranges.iter();
        ranges.map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn what_was_never_written_in_a_cluster_is_zeros_and_other_clusters_are_left_alone() {
        let chunk = chunk();
        assert_eq!(chunk.store(20, &[1, 2]), Stored::More);
        let copy = chunk.begin_write(16).unwrap();
        assert_eq!(ends(&copy), [(16, 32)]);
        assert_eq!(copy.bytes(16..32)[..8], [0, 0, 0, 0, 1, 2, 0, 0]);
        assert!(chunk.begin_write(16).is_none(), "one write at a time");
    }

    #[test]
    fn bytes_that_come_while_it_is_written_go_to_a_copy_and_are_written_next() {
        let chunk = chunk();
        assert_eq!(chunk.store(0, &[1; 63]), Stored::More);
        assert_eq!(chunk.store(63, &[1]), Stored::Full);
        let copy = chunk.begin_write(16).unwrap();
        assert_eq!(chunk.store(3, &[9]), Stored::More);
        assert_eq!(copy.bytes(0..64), [1; 64]);
        drop(copy);
        assert!(matches!(chunk.write_done(false), Ended::Open));
        let copy = chunk.begin_write(16).unwrap();
        assert_eq!(ends(&copy), [(0, 16)]);
        assert_eq!(copy.bytes(0..4), [1, 1, 1, 9]);
        drop(copy);
        let Ended::Closed(Some(_)) = chunk.write_done(false) else {
            panic!("nothing is left to do");
        };
        assert_eq!(chunk.store(0, &[1]), Stored::Closed);
    }

    #[test]
    fn a_write_that_failed_is_still_to_be_done() {
        let chunk = chunk();
        chunk.store(20, &[1]);
        let copy = chunk.begin_write(16).unwrap();
        chunk.write_failed(&copy.ranges);
        drop(copy);
        assert!(matches!(chunk.close_clean(), Ended::Open));
        assert_eq!(chunk.begin_write(16).unwrap().bytes(16..21)[4], 1);
    }
}
