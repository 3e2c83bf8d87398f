//! Lists of memory as the kernel reads them (`struct iovec`), while an operation of the ring runs.
//!
//! A list goes back to its thread when its operation has ended, so steady traffic allocates nothing.

use std::cell::{Cell, RefCell};
use std::ops::Deref;

use gaur_block::{Segment, Segments};

use crate::syscall::IOV_MAX;

/// The lists of one thread.
#[derive(Default)]
pub(crate) struct IovecPool {
    free: RefCell<Vec<Vec<libc::iovec>>>,
    /// One was taken since the last trim.
    active: Cell<bool>,
}

impl IovecPool {
    /// The list of `memory`, which has at most [`IOV_MAX`] pieces.
    pub(crate) fn list(&self, memory: Segments<'_>) -> Iovecs<'_> {
        self.active.set(true);
        let free = self.free.borrow_mut().pop();
        let mut entries = free.unwrap_or_else(|| Vec::with_capacity(IOV_MAX));
        entries.extend(memory.pieces().map(iovec_of));
        Iovecs {
            pool: self,
            entries,
        }
    }

    /// Drops what is free unless a list was taken since the last call.
    pub(crate) fn trim(&self) {
        if !self.active.take() {
            self.free.take();
        }
    }
}

/// A list that an operation may use for as long as this lives.
pub(crate) struct Iovecs<'a> {
    pool: &'a IovecPool,
    entries: Vec<libc::iovec>,
}

impl Deref for Iovecs<'_> {
    type Target = [libc::iovec];

    fn deref(&self) -> &[libc::iovec] {
        &self.entries
    }
}

impl Drop for Iovecs<'_> {
    fn drop(&mut self) {
        self.entries.clear();
        let entries = std::mem::take(&mut self.entries);
        self.pool.free.borrow_mut().push(entries);
    }
}

/// A piece of memory as the kernel takes it.
pub(crate) fn iovec_of(piece: Segment<'_>) -> libc::iovec {
    libc::iovec {
        iov_base: piece.start().cast(),
        iov_len: piece.len(),
    }
}
