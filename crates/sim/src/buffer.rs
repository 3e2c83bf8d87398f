//! Aligned buffer without unsafe code: a longer vector and the offset of its aligned part.

use std::ops::{Deref, DerefMut};

/// What [`gaur_block::File::buffer`] of a simulated file gives.
#[derive(Debug)]
pub struct SimBuffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl SimBuffer {
    /// `len` zero bytes at an address that is a multiple of `alignment`, but of no more than that:
    /// code that relies on a stricter alignment by luck fails.
    pub fn new(len: usize, alignment: usize) -> SimBuffer {
        let memory = vec![0; len + 2 * alignment + 1];
        let strict = memory.as_ptr().align_offset(2 * alignment);
        let start = if strict >= alignment {
            strict - alignment
        } else {
            strict + alignment
        };
        SimBuffer { memory, start, len }
    }
}

impl Deref for SimBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for SimBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_aligned_and_no_more() {
        for alignment in [1, 2, 512, 4096] {
            let buffer = SimBuffer::new(100, alignment);
            assert_eq!(buffer.len(), 100);
            let address = buffer.as_ptr() as usize;
            assert_eq!(address % alignment, 0);
            assert_ne!(address % (2 * alignment), 0);
        }
    }
}
