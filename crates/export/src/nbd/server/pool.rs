//! Payload memory of the connections of a server.
//!
//! Memory handed out and memory kept count together, against a budget of the connection and one of the
//! server. Of the server's a connection takes at most as much as it leaves for others, so that one that
//! holds what it has for ever does not keep a newcomer from being served. Without asking it may have
//! [`OWN_BYTES`]: with these every request can be served, in pieces. So no connection waits for another
//! connection's memory. Sizes are powers of two from [`SMALLEST_BYTES`] on, kept by size, so that
//! steady traffic allocates nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gaur_reactor::Buffer;

/// A page, and what O_DIRECT wants at most.
const SMALLEST_BYTES: usize = 4096;

/// What a connection has in any case, and the length of a piece.
pub(super) const OWN_BYTES: usize = 256 << 10;

/// Payload memory of all connections.
pub(super) struct Budget {
    limit_bytes: usize,
    used_bytes: AtomicUsize,
}

impl Budget {
    pub(super) fn new(limit_bytes: usize) -> Arc<Budget> {
        Arc::new(Budget {
            limit_bytes,
            used_bytes: AtomicUsize::new(0),
        })
    }

    /// Whether a connection may have so many bytes when so many are used in all.
    fn allows(&self, held_bytes: usize, used_bytes: usize) -> bool {
        held_bytes <= OWN_BYTES || used_bytes.saturating_add(held_bytes) <= self.limit_bytes
    }

    /// Takes `more_bytes` for a connection that holds `held_bytes` with them.
    fn take(&self, more_bytes: usize, held_bytes: usize) -> bool {
        let used_bytes = self.used_bytes.fetch_add(more_bytes, Ordering::Relaxed) + more_bytes;
        let allowed = self.allows(held_bytes, used_bytes);
        if !allowed {
            self.give(more_bytes);
        }
        allowed
    }

    fn give(&self, bytes: usize) {
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The memory of one connection.
pub(super) struct Pool {
    limit_bytes: usize,
    budget: Arc<Budget>,
    /// In use and kept.
    held_bytes: usize,
    /// By size class, smallest first.
    kept: Vec<Vec<Buffer>>,
    /// A bit for each class that was asked for since the last trim.
    active: u32,
}

impl Pool {
    pub(super) fn new(limit_bytes: usize, budget: &Arc<Budget>) -> Pool {
        Pool {
            limit_bytes,
            budget: Arc::clone(budget),
            held_bytes: 0,
            kept: Vec::new(),
            active: 0,
        }
    }

    /// Memory of at least `len_bytes`, or `None` until some of what is in use comes back. What it
    /// holds is left from earlier requests of the same connection.
    pub(super) fn take(&mut self, len_bytes: usize) -> Option<Buffer> {
        let class = class_of(len_bytes);
        self.active |= 1 << class;
        if let Some(buffer) = self.kept.get_mut(class).and_then(Vec::pop) {
            return Some(buffer);
        }
        let size_bytes = SMALLEST_BYTES << class;
        while !self.grow(size_bytes) {
            // Give back what is kept in other sizes, largest first.
            let buffer = self.kept.iter_mut().rev().find_map(Vec::pop)?;
            self.give_up(buffer);
        }
        Some(gaur_reactor::buffer(size_bytes))
    }

    fn grow(&mut self, more_bytes: usize) -> bool {
        let held_bytes = self.held_bytes + more_bytes;
        let grows = held_bytes <= self.limit_bytes && self.budget.take(more_bytes, held_bytes);
        if grows {
            self.held_bytes = held_bytes;
        }
        grows
    }

    fn give_up(&mut self, buffer: Buffer) {
        self.held_bytes -= buffer.len();
        self.budget.give(buffer.len());
    }

    /// Takes memory back; it is not kept when others need it.
    pub(super) fn give(&mut self, buffer: Buffer) {
        let used_bytes = self.budget.used_bytes.load(Ordering::Relaxed);
        if !self.budget.allows(self.held_bytes, used_bytes) {
            return self.give_up(buffer);
        }
        let class = class_of(buffer.len());
        if self.kept.len() <= class {
            self.kept.resize_with(class + 1, Vec::new);
        }
        self.kept[class].push(buffer);
    }

    /// Gives up what is kept of sizes that were not asked for since the last call.
    pub(super) fn trim(&mut self) {
        let active = std::mem::take(&mut self.active);
        for class in 0..self.kept.len() {
            if active & 1 << class == 0 {
                for buffer in std::mem::take(&mut self.kept[class]) {
                    self.give_up(buffer);
                }
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.budget.give(self.held_bytes);
    }
}

fn class_of(len_bytes: usize) -> usize {
    let pages = len_bytes
        .max(1)
        .div_ceil(SMALLEST_BYTES)
        .next_power_of_two();
    pages.trailing_zeros() as usize
}
