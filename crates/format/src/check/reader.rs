//! Table reader: a table in chunks, each inside the file.

/// Longest single read in bytes; every table entry is eight bytes and starts at a multiple of that,
/// so no piece cuts one.
const PIECE_BYTES: u64 = 1 << 20;

/// A run of bytes of the file: something refers to it, or it is still to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Range {
    pub(super) fn new(offset: u64, len: u64) -> Range {
        Range { offset, len }
    }
}

/// What is left of a table.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reader {
    offset: u64,
    end: u64,
    /// Number of the entry that is read next.
    pub(super) index: u64,
}

impl Reader {
    /// `len` bytes at `offset`, cut off at the end of the file: what is beyond reads as zeros, and
    /// zeros are empty entries.
    pub(super) fn new(offset: u64, len: u64, file_len: u64) -> Reader {
        Reader {
            offset,
            end: offset.saturating_add(len).min(file_len),
            index: 0,
        }
    }

    pub(super) fn left(&self) -> u64 {
        self.end.saturating_sub(self.offset)
    }

    pub(super) fn wanted(&self) -> Option<Range> {
        let len = self.left().min(PIECE_BYTES);
        (len > 0).then_some(Range::new(self.offset, len))
    }

    /// So many bytes were read, or could not be.
    pub(super) fn advance(&mut self, len: u64) {
        self.offset = self.offset.saturating_add(len);
        self.index = self.index.saturating_add(len / 8);
    }
}
