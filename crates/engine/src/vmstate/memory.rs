//! Memory of a chunk, which the threads of a save share.
//!
//! The buffers of a queue stay with its thread. These go from one to another, so they are plain memory
//! with room to start at a good address.

use std::ops::{Deref, DerefMut};

/// Starts at a multiple of this many bytes, which suits every file known; a file that wants more gets
/// its bytes through a buffer of its queue.
const ALIGNMENT: usize = 4096;

/// Aligned memory.
#[derive(Debug)]
pub(super) struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    /// Memory of `len` zeros.
    pub(super) fn new(len: usize) -> Memory {
        let bytes = vec![0; len + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Memory { bytes, start, len }
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // `new` made it that long.
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_zeros() {
        let memory = Memory::new(8192);
        assert_eq!(memory.as_ptr().addr() % ALIGNMENT, 0);
        assert_eq!(*memory, [0; 8192]);
    }
}
