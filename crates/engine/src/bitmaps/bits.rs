//! The bits of a bitmap in memory: marked by many threads at once, without a lock.
//!
//! Memory comes in pieces of a cluster of the image, with the first bit that is set in each. A bit only ever goes
//! from zero to one; clearing a bitmap is putting another in its place.

use gaur_format::bitmap::BitmapShape;

use crate::range::GuestRange;
use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The bits of a bitmap.
#[derive(Debug)]
pub struct BitmapBits {
    shape: BitmapShape,
    /// Words of a piece, as a power of two.
    piece_bits: u32,
    pieces: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

impl BitmapBits {
    /// All zero.
    pub(crate) fn new(shape: BitmapShape) -> BitmapBits {
        let pieces = (0..shape.table_entries()).map(|_| OnceLock::new());
        BitmapBits {
            shape,
            piece_bits: (shape.bits_per_cluster() / 64).ilog2(),
            pieces: pieces.collect(),
        }
    }

    pub(crate) fn shape(&self) -> BitmapShape {
        self.shape
    }

    fn piece(&self, index: u64) -> Option<&[AtomicU64]> {
        Some(self.pieces.get(index as usize)?.get()?)
    }

    /// The piece of the word with this index, and its index there.
    fn place(&self, index: u64) -> (usize, usize) {
        let within = (1 << self.piece_bits) - 1;
        (
            (index >> self.piece_bits) as usize,
            (index & within) as usize,
        )
    }

    /// The word with this index, if it was ever made.
    fn existing_word(&self, index: u64) -> Option<&AtomicU64> {
        let (piece, within) = self.place(index);
        self.pieces.get(piece)?.get()?.get(within)
    }

    /// The word with this index, which is made if it is not there.
    fn word(&self, index: u64) -> Option<&AtomicU64> {
        let (piece, within) = self.place(index);
        let piece = self.pieces.get(piece)?;
        let words = piece.get_or_init(|| {
            let zeros = (0..1_u64 << self.piece_bits).map(|_| AtomicU64::new(0));
            zeros.collect()
        });
        words.get(within)
    }

    /// Sets the bits of a range of the disk.
    pub(crate) fn mark(&self, range: GuestRange) {
        let bits = self.shape.bits_of(range.start, range.len);
        self.set(bits.start, bits.end, u64::MAX);
    }

    /// Whether all bits of a range of the disk are set.
    pub(crate) fn has(&self, range: GuestRange) -> bool {
        let bits = self.shape.bits_of(range.start, range.len);
        let mut at = bits.start;
        while at < bits.end {
            let upto = (at / 64 * 64 + 64).min(bits.end);
            let mask = mask(at % 64, upto - at);
            let word = self.existing_word(at / 64);
            if word.is_none_or(|word| word.load(Ordering::Acquire) & mask != mask) {
                return false;
            }
            at = upto;
        }
        true
    }

    /// Sets those bits from `first` to `end` of which `pattern`, for each word alike, has one.
    fn set(&self, first: u64, end: u64, pattern: u64) {
        let mut at = first;
        while at < end {
            let upto = (at / 64 * 64 + 64).min(end);
            let mask = mask(at % 64, upto - at) & pattern;
            let Some(word) = self.word(at / 64) else {
                return;
            };
            // Most writes go to a block that is marked; a look costs other threads nothing.
            if word.load(Ordering::Relaxed) & mask != mask {
                word.fetch_or(mask, Ordering::Release);
            }
            at = upto;
        }
    }

    /// Sets all bits of the piece with this index.
    pub(crate) fn fill_piece(&self, index: u64) {
        let first = index * self.shape.bits_per_cluster();
        let end = (first + self.shape.bits_per_cluster()).min(self.shape.bits());
        self.set(first, end, u64::MAX);
    }

    /// Sets the bits of the piece with this index that `bytes` of a file have.
    pub(crate) fn load_piece(&self, index: u64, bytes: &[u8]) {
        let bits = self.shape.bits_per_cluster();
        let mut at = index * bits;
        for word in bytes.as_chunks().0 {
            let end = (at + 64).min(self.shape.bits());
            match u64::from_le_bytes(*word) {
                0 => {}
                word => self.set(at, end, word),
            }
            at += 64;
        }
    }

    /// Puts the piece with this index into `bytes`, as a file has it; `false` if it is all zero.
    pub(crate) fn store_piece(&self, index: u64, bytes: &mut [u8]) -> bool {
        let Some(words) = self.piece(index) else {
            return false;
        };
        let mut any = false;
        for (out, word) in bytes.chunks_exact_mut(8).zip(words) {
            let word = word.load(Ordering::Relaxed);
            any |= word != 0;
            out.copy_from_slice(&word.to_le_bytes());
        }
        any
    }

    /// Shows the ranges of the disk whose bits are set, ascending.
    pub fn each_range(&self, mut visit: impl FnMut(u64, u64)) {
        let granularity = 1_u64 << self.shape.granularity_bits();
        let mut open: Option<(u64, u64)> = None;
        for (piece, words) in self.pieces.iter().enumerate() {
            for (word, bits) in words.get().into_iter().flatten().enumerate() {
                let mut bits = bits.load(Ordering::Relaxed);
                let base = (((piece as u64) << self.piece_bits) + word as u64) * 64;
                while bits != 0 {
                    let first = u64::from(bits.trailing_zeros());
                    let len = u64::from((bits >> first).trailing_ones());
                    bits &= !mask(first, len);
                    let (start, end) = (base + first, base + first + len);
                    match &mut open {
                        Some((_, last)) if *last == start => *last = end,
                        open => {
                            if let Some((start, end)) = open.replace((start, end)) {
                                visit(start * granularity, (end - start) * granularity);
                            }
                        }
                    }
                }
            }
        }
        if let Some((start, end)) = open {
            visit(start * granularity, (end - start) * granularity);
        }
    }

    /// The run of equal bits from an offset of the disk on: its length, at most `len`, and whether they are set.
    pub fn run_at(&self, offset: u64, len: u64) -> (u64, bool) {
        let bits = self.shape.bits_of(offset, len);
        let is_set = |bit: u64| {
            let word = self.existing_word(bit / 64);
            word.map_or(0, |word| word.load(Ordering::Relaxed))
        };
        let first = is_set(bits.start) >> (bits.start % 64) & 1 == 1;
        let mut at = bits.start;
        while at < bits.end {
            let word = is_set(at);
            let others = if first { !word } else { word } >> (at % 64);
            let equal = u64::from(others.trailing_zeros()).min(64 - at % 64);
            at += equal;
            if equal == 0 || !at.is_multiple_of(64) {
                break;
            }
        }
        let end = at.min(bits.end) << self.shape.granularity_bits();
        (end.saturating_sub(offset).clamp(1, len), first)
    }

    /// Sets the bits of every range that another bitmap has, of whatever granularity.
    pub(crate) fn merge(&self, other: &BitmapBits) {
        other.each_range(|start, len| self.mark(GuestRange::new(start, len)));
    }

    /// The same bits for a disk of another size.
    pub(crate) fn copy_to(&self, shape: BitmapShape) -> BitmapBits {
        let copy = BitmapBits::new(shape);
        copy.merge(self);
        copy
    }
}

/// `len` bits from `first` on.
fn mask(first: u64, len: u64) -> u64 {
    match len {
        64 => u64::MAX,
        len => ((1_u64 << len) - 1) << first,
    }
}

#[cfg(test)]
mod tests {
    use gaur_format::Geometry;
    use gaur_format::geometry::Version;

    use super::*;

    fn bits(size_bytes: u64, granularity_bits: u8) -> BitmapBits {
        let geometry = Geometry::new(Version::V3, 9, false, 4).unwrap();
        BitmapBits::new(BitmapShape::new(size_bytes, granularity_bits, &geometry).unwrap())
    }

    fn ranges(bits: &BitmapBits) -> Vec<(u64, u64)> {
        let mut list = Vec::new();
        bits.each_range(|start, len| list.push((start, len)));
        list
    }

    #[test]
    fn marked_ranges_are_whole_blocks_and_stay_inside_the_disk() {
        // Three pieces of 4096 bits, the last not full.
        let map = bits((8192 + 100) * 512, 9);
        map.mark(GuestRange::new(511, 2));
        map.mark(GuestRange::new(4095 * 512, 1024));
        map.mark(GuestRange::new(8291 * 512, u64::MAX - (1 << 40)));
        let expected = vec![(0, 1024), (4095 * 512, 1024), (8291 * 512, 512)];
        assert_eq!(ranges(&map), expected);
        let copy = bits((8192 + 100) * 512, 9);
        let mut bytes = [0; 512];
        for index in 0..3 {
            assert!(map.store_piece(index, &mut bytes));
            copy.load_piece(index, &bytes);
        }
        assert_eq!(ranges(&copy), expected);
        assert_eq!(bytes[12], 8, "the lowest bit of a byte comes first");
    }

    #[test]
    fn pieces_without_bits_are_not_stored() {
        let map = bits(8192 * 512, 9);
        map.mark(GuestRange::new(5000 * 512, 1));
        let mut bytes = [0; 512];
        assert!(!map.store_piece(0, &mut bytes));
        assert!(map.store_piece(1, &mut bytes));
        let full = bits(100 * 512, 9);
        full.fill_piece(0);
        full.load_piece(0, &[0xff; 512]);
        assert_eq!(ranges(&full), [(0, 100 * 512)], "nothing behind the end");
    }

    #[test]
    fn runs_are_those_of_the_ranges() {
        let size = (8192 + 100) * 512;
        let map = bits(size, 9);
        for (start, len) in [(511, 2), (64 * 512, 64 * 512), (4000 * 512, 300 * 512)] {
            map.mark(GuestRange::new(start, len));
        }
        let mut found = Vec::new();
        let mut at = 0;
        while at < size {
            let (len, is_set) = map.run_at(at, size - at);
            match found.last_mut() {
                Some((start, end)) if is_set && *end == at => *end = *start + len,
                _ if is_set => found.push((at, at + len)),
                _ => {}
            }
            at += len;
        }
        let found: Vec<_> = found
            .iter()
            .map(|(start, end)| (*start, end - start))
            .collect();
        assert_eq!(found, ranges(&map));
        assert_eq!(map.run_at(65 * 512 + 7, 100), (100, true));
        assert_eq!(map.run_at(2 * 512 + 7, 1 << 30), (62 * 512 - 7, false));
    }

    #[test]
    fn merge_covers_what_either_has_at_any_granularity() {
        let fine = bits(1 << 20, 9);
        fine.mark(GuestRange::new(70_000, 1));
        let coarse = bits(1 << 20, 16);
        coarse.merge(&fine);
        assert_eq!(ranges(&coarse), [(65536, 65536)]);
        fine.merge(&coarse);
        assert_eq!(ranges(&fine), [(65536, 65536)]);
        let shape = bits(100_000, 9).shape();
        assert_eq!(ranges(&fine.copy_to(shape)), [(65536, 34_816)]);
    }
}
