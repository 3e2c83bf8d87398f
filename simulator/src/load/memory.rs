//! The memory of a request: in one piece, or scattered over several as a guest's pages are.

use std::io::IoSliceMut;

use gaur_block::Segment;
use gaur_sim::{Random, SimBuffer};

/// About as many pieces, at most, has the memory of a request.
const PIECES_USUAL: usize = 1 << 16;

pub(super) struct GuestMemory(Vec<SimBuffer>);

impl GuestMemory {
    /// `len` bytes in one piece.
    pub(super) fn whole(len: usize, alignment: usize) -> GuestMemory {
        GuestMemory(vec![SimBuffer::new(len, alignment)])
    }

    /// `len` bytes in pieces, which obey the limits of some files and break those of others.
    pub(super) fn scattered(len: usize, random: &mut Random) -> GuestMemory {
        let alignment = random.pick(&[1, 512, 512, 4096]);
        let grain = random.pick(&[1, 16, 512, 512, 4096]);
        // A long request in pieces of some bytes, each of which is aligned, would take all memory.
        let grain = grain.max(len / PIECES_USUAL);
        let mut pieces = Vec::new();
        let mut left = len;
        while left > 0 {
            let piece = left.min(grain * random.between(1, 9) as usize);
            pieces.push(SimBuffer::new(piece, alignment));
            left -= piece;
        }
        GuestMemory(pieces)
    }

    pub(super) fn fill_from(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        for piece in &mut self.0 {
            let (now, later) = rest.split_at(piece.len());
            piece.copy_from_slice(now);
            rest = later;
        }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.0
            .iter()
            .flat_map(|piece| piece.iter().copied())
            .collect()
    }

    pub(super) fn source(&self) -> Vec<Segment<'_>> {
        self.0
            .iter()
            .map(|piece| Segment::from(&piece[..]))
            .collect()
    }

    pub(super) fn target(&mut self) -> Vec<IoSliceMut<'_>> {
        self.0
            .iter_mut()
            .map(|piece| IoSliceMut::new(piece))
            .collect()
    }
}
