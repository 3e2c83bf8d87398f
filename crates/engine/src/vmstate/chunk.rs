//! A chunk: a piece of the state that is put together in memory.

use std::ops::Range;

use super::memory::Memory;
use super::ranges::Ranges;

/// Bytes of one chunk. They go to the file as whole clusters; what a cluster lacks is read back before, or
/// zeros if the cluster is new.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) memory: Memory,
    /// Bytes that the file does not have. All others of the memory have no meaning.
    pub(super) dirty: Ranges,
    /// When it was last written to, by the save's own count.
    pub(super) used: u64,
}

impl Chunk {
    pub(super) fn new(memory: Memory) -> Chunk {
        Chunk {
            memory,
            dirty: Ranges::default(),
            used: 0,
        }
    }

    /// Takes bytes for `at` and on, counted from the start of the chunk; they end inside it.
    pub(super) fn store(&mut self, at: usize, bytes: &[u8]) {
        let range = at..at + bytes.len();
        self.memory[range.clone()].copy_from_slice(bytes);
        self.dirty.insert(range);
    }

    /// Whether every byte of it is new.
    pub(super) fn is_full(&self) -> bool {
        self.dirty.covers(&(0..self.memory.len()))
    }

    /// Makes what has no bytes in `range` zeros.
    pub(super) fn zero_gaps(&mut self, range: Range<usize>) {
        for gap in self.dirty.gaps(&range) {
            self.memory[gap].fill(0);
        }
        self.dirty.insert(range);
    }

    /// Takes the bytes of an older chunk where this one has none.
    pub(super) fn absorb(&mut self, older: &Chunk) {
        for range in older.dirty.iter() {
            for gap in self.dirty.gaps(range) {
                self.memory[gap.clone()].copy_from_slice(&older.memory[gap]);
            }
            self.dirty.insert(range.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk() -> Chunk {
        let mut memory = Memory::new(64);
        memory.fill(0xee);
        Chunk::new(memory)
    }

    #[test]
    fn gaps_of_a_new_cluster_are_zeros_and_other_clusters_are_left_alone() {
        let mut chunk = chunk();
        chunk.store(20, &[1, 2]);
        chunk.zero_gaps(16..32);
        assert_eq!(chunk.memory[16..24], [0, 0, 0, 0, 1, 2, 0, 0]);
        assert_eq!(chunk.dirty.iter().collect::<Vec<_>>(), [&(16..32)]);
        assert!(!chunk.is_full());
    }

    #[test]
    fn bytes_that_came_while_a_chunk_was_written_outlive_those_that_were_written() {
        let mut older = chunk();
        older.store(0, &[1; 63]);
        older.store(63, &[1]);
        assert!(older.is_full());
        let mut newer = chunk();
        newer.store(3, &[9]);
        newer.absorb(&older);
        assert!(newer.is_full());
        assert_eq!(newer.memory[..5], [1, 1, 1, 9, 1]);
    }
}
