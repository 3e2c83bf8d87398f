//! Payload memory of one connection.
//!
//! Invariant: memory handed out and memory kept together never exceed the budget, which is at least
//! the longest payload; so a request may have to wait for others to end, but never for ever. Sizes
//! are powers of two from [`SMALLEST_BYTES`] on, kept by size, so that steady traffic allocates
//! nothing.

use gaur_reactor::Buffer;

/// A page, and what O_DIRECT wants at most.
const SMALLEST_BYTES: usize = 4096;

pub(super) struct Pool {
    budget_bytes: usize,
    /// In use and kept.
    held_bytes: usize,
    /// By size class, smallest first.
    kept: Vec<Vec<Buffer>>,
}

impl Pool {
    pub(super) fn new(budget_bytes: usize) -> Pool {
        Pool {
            budget_bytes,
            held_bytes: 0,
            kept: Vec::new(),
        }
    }

    /// Memory of at least `len_bytes`, or `None` until some of what is in use comes back. What it
    /// holds is left from earlier requests of the same connection.
    pub(super) fn take(&mut self, len_bytes: usize) -> Option<Buffer> {
        let class = class_of(len_bytes);
        if let Some(buffer) = self.kept.get_mut(class).and_then(Vec::pop) {
            return Some(buffer);
        }
        let size_bytes = SMALLEST_BYTES << class;
        while self.held_bytes + size_bytes > self.budget_bytes {
            // Give back what is kept in other sizes, largest first.
            let buffer = self.kept.iter_mut().rev().find_map(Vec::pop)?;
            self.held_bytes -= buffer.len();
        }
        self.held_bytes += size_bytes;
        Some(gaur_reactor::buffer(size_bytes))
    }

    /// Takes memory back.
    pub(super) fn give(&mut self, buffer: Buffer) {
        let class = class_of(buffer.len());
        if self.kept.len() <= class {
            self.kept.resize_with(class + 1, Vec::new);
        }
        self.kept[class].push(buffer);
    }
}

fn class_of(len_bytes: usize) -> usize {
    let pages = len_bytes
        .max(1)
        .div_ceil(SMALLEST_BYTES)
        .next_power_of_two();
    pages.trailing_zeros() as usize
}
