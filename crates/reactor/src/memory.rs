//! Memory for transfers: zeroed, aligned to a page, and where possible registered with a ring.
//!
//! A [`Pool`] belongs to a reactor. It takes memory from the system in chunks, which its ring
//! registers if it may, and hands out blocks of 2^n pages, which come back into a free list of their
//! size. Memory is taken at start and kept, so the lists are short and the
//! lock is rarely contended; [`Pool::trim`] gives idle chunks back. Buffers
//! outside any reactor, and those that do not fit the pool, come straight from the system.
//!
//! Invariant: a block is in exactly one place, a [`Buffer`] or a free list. A chunk lives as long as
//! its pool or any buffer from it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::trim::freed_memory;

/// Every buffer starts at a multiple of this, in bytes: enough for O_DIRECT on any known disk.
pub(crate) const PAGE: usize = 4096;

/// Size of a chunk in bytes; larger blocks get a chunk of their own size.
const CHUNK: usize = 4 << 20;

/// Free lists: block sizes from one page to 2^(CLASSES - 1) pages (64 MiB).
const CLASSES: usize = 15;

/// Memory of a fixed length, for file and socket transfers. Zeroed when made.
pub struct Buffer {
    start: NonNull<u8>,
    len_bytes: usize,
    /// Size class and pool that the block goes back to; `None` when it goes back to the system.
    home: Option<(usize, Arc<Pool>)>,
}

// SAFETY: a buffer is the only owner of its memory, and the pool behind it is `Sync`.
unsafe impl Send for Buffer {}
// SAFETY: shared references only read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Memory straight from the system.
    pub(crate) fn from_system(len_bytes: usize) -> Buffer {
        Buffer {
            start: take_from_system(len_bytes),
            len_bytes,
            home: None,
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the buffer owns `len_bytes` initialised bytes from `start` on.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the exclusive borrow makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Buffer({} bytes)", self.len_bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match self.home.take() {
            Some((class, pool)) => pool.give_back(class, self.start),
            None => give_to_system(self.start, self.len_bytes),
        }
    }
}

fn layout(len_bytes: usize) -> Layout {
    // Not zero, which the allocator refuses; a length beyond isize::MAX is a mistake of the caller.
    Layout::from_size_align(len_bytes.max(1), PAGE).expect("a buffer fits the address space")
}

/// From here on memory is mapped, which the kernel zeroes when it is first touched: the allocator
/// would fill aligned memory with zeros at once, page by page.
const MAPPED_MIN: usize = 1 << 20;

fn take_from_system(len_bytes: usize) -> NonNull<u8> {
    let layout = layout(len_bytes);
    if len_bytes < MAPPED_MIN {
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        return NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
    }
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: new memory, wherever the kernel likes.
    let start =
        unsafe { mmap_anonymous(ptr::null_mut(), len_bytes, protection, MapFlags::PRIVATE) };
    let start = start.ok().and_then(|start| NonNull::new(start.cast()));
    start.unwrap_or_else(|| handle_alloc_error(layout))
}

fn give_to_system(start: NonNull<u8>, len_bytes: usize) {
    if len_bytes < MAPPED_MIN {
        freed_memory();
        // SAFETY: the memory came from `take_from_system` with the same length.
        unsafe { dealloc(start.as_ptr(), layout(len_bytes)) }
    } else {
        // SAFETY: as above.
        let _ = unsafe { munmap(start.as_ptr().cast(), len_bytes) };
    }
}

/// Has the kernel take the pages of a chunk, which reads as zeros afterwards; `false` when they are
/// locked in memory.
fn discard(chunk: Chunk) -> bool {
    let start = chunk.start.as_ptr().cast();
    // SAFETY: whole pages of the pool's own memory, of which nothing is in use.
    unsafe { madvise(start, chunk.len_bytes, Advice::LinuxDontNeed) }.is_ok()
}

/// A run of memory of a pool; its number in the pool is its number in the ring's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) start: NonNull<u8>,
    pub(crate) len_bytes: usize,
}

/// A chunk and the blocks cut from it.
struct Cut {
    chunk: Chunk,
    /// First byte that is in no block. The ring knows the chunk from the first block on.
    used_bytes: usize,
}

impl Cut {
    fn holds(&self, block: NonNull<u8>) -> bool {
        let offset = block
            .addr()
            .get()
            .wrapping_sub(self.chunk.start.addr().get());
        offset < self.chunk.len_bytes
    }
}

struct State {
    chunks: Vec<Cut>,
    /// A block was taken since the last trim.
    active: bool,
    free: [Vec<NonNull<u8>>; CLASSES],
    /// Blocks that exist of each class, here or outside.
    blocks: [usize; CLASSES],
}

/// Where a reactor's buffers come from.
pub(crate) struct Pool {
    state: Mutex<State>,
    limit_bytes: usize,
    limit_chunks: usize,
}

// SAFETY: the pointers are owned by the pool and only touched under the lock.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool that takes at most `limit_bytes` in at most `limit_chunks` chunks.
    pub(crate) fn new(limit_bytes: usize, limit_chunks: usize) -> Arc<Pool> {
        let state = State {
            chunks: Vec::new(),
            active: false,
            free: [const { Vec::new() }; CLASSES],
            blocks: [0; CLASSES],
        };
        Arc::new(Pool {
            state: Mutex::new(state),
            limit_bytes,
            limit_chunks,
        })
    }

    /// A buffer, from the pool if it has room. `register` is told of a chunk before its first use.
    pub(crate) fn buffer(
        self: &Arc<Pool>,
        len_bytes: usize,
        register: impl FnOnce(usize, Chunk),
    ) -> Buffer {
        let class = class_of(len_bytes);
        let taken = class.and_then(|class| Some((class, self.take(class, register)?)));
        let Some((class, (start, used))) = taken else {
            return Buffer::from_system(len_bytes);
        };
        let mut buffer = Buffer {
            start,
            len_bytes,
            home: Some((class, self.clone())),
        };
        // A chunk comes zeroed, and to touch all of it would cost a page fault for each page.
        if used {
            buffer.fill(0);
        }
        buffer
    }

    /// A block, and whether it was used before.
    fn take(
        &self,
        class: usize,
        register: impl FnOnce(usize, Chunk),
    ) -> Option<(NonNull<u8>, bool)> {
        let mut state = self.state.lock();
        state.active = true;
        if let Some(start) = state.free[class].pop() {
            return Some((start, true));
        }
        let need_bytes = PAGE << class;
        let has_room = |cut: &Cut| cut.chunk.len_bytes - cut.used_bytes >= need_bytes;
        let index = match state.chunks.iter().position(has_room) {
            Some(index) => index,
            None => self.grow(&mut state, need_bytes)?,
        };
        let cut = state.chunks.get_mut(index)?;
        if cut.used_bytes == 0 {
            register(index, cut.chunk);
        }
        // SAFETY: `used_bytes + need_bytes` is at most the length of the chunk.
        let start = unsafe { cut.chunk.start.add(cut.used_bytes) };
        cut.used_bytes += need_bytes;
        // Room for every block's return, so that giving one back never allocates.
        state.blocks[class] += 1;
        let blocks = state.blocks[class];
        state.free[class].reserve(blocks);
        Some((start, false))
    }

    /// Adds a chunk; its number.
    fn grow(&self, state: &mut State, need_bytes: usize) -> Option<usize> {
        let held: usize = state.chunks.iter().map(|cut| cut.chunk.len_bytes).sum();
        let len_bytes = need_bytes.max(CHUNK.min(self.limit_bytes.saturating_sub(held)));
        if held + len_bytes > self.limit_bytes || state.chunks.len() >= self.limit_chunks {
            return None;
        }
        let chunk = Chunk {
            start: take_from_system(len_bytes),
            len_bytes,
        };
        state.chunks.push(Cut {
            chunk,
            used_bytes: 0,
        });
        Some(state.chunks.len() - 1)
    }

    /// Gives the memory of chunks back of which nothing is in use, unless a block was taken since the
    /// last call. They keep their addresses and start anew. `unregister` has the ring forget a chunk;
    /// where it cannot, the chunk stays as it is.
    pub(crate) fn trim(&self, mut unregister: impl FnMut(usize) -> bool) {
        let mut state = self.state.lock();
        if std::mem::take(&mut state.active) {
            return;
        }
        let State {
            chunks,
            free,
            blocks,
            ..
        } = &mut *state;
        for (index, cut) in chunks.iter_mut().enumerate() {
            let unused = |(class, list): (usize, &Vec<NonNull<u8>>)| {
                list.iter().filter(|block| cut.holds(**block)).count() * (PAGE << class)
            };
            let unused_bytes: usize = free.iter().enumerate().map(unused).sum();
            if cut.used_bytes == 0
                || unused_bytes < cut.used_bytes
                || !unregister(index)
                || !discard(cut.chunk)
            {
                continue;
            }
            for (list, blocks) in free.iter_mut().zip(blocks.iter_mut()) {
                let before = list.len();
                list.retain(|block| !cut.holds(*block));
                *blocks -= before - list.len();
            }
            cut.used_bytes = 0;
        }
    }

    fn give_back(&self, class: usize, start: NonNull<u8>) {
        let mut state = self.state.lock();
        state.free[class].push(start);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        for Cut { chunk, .. } in state.chunks.drain(..) {
            give_to_system(chunk.start, chunk.len_bytes);
        }
    }
}

/// The free list for blocks of `len_bytes`: sizes are rounded up to a power of two of pages.
fn class_of(len_bytes: usize) -> Option<usize> {
    let pages = len_bytes
        .div_ceil(PAGE)
        .max(1)
        .checked_next_power_of_two()?;
    let class = pages.trailing_zeros() as usize;
    (class < CLASSES).then_some(class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_zeroed_and_reused() {
        let pool = Pool::new(16 << 20, 4);
        let mut buffer = pool.buffer(5000, |_, _| ());
        assert_eq!(buffer.as_ptr() as usize % PAGE, 0);
        assert_eq!(buffer.len(), 5000);
        buffer.fill(7);
        let first = buffer.as_ptr();
        drop(buffer);
        let again = pool.buffer(8192, |_, _| panic!("the chunk is there already"));
        assert_eq!(again.as_ptr(), first);
        assert!(again.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn the_limit_holds_and_the_system_steps_in() {
        let pool = Pool::new(CHUNK, 4);
        let whole = pool.buffer(CHUNK, |_, _| ());
        assert!(whole.home.is_some());
        let more = pool.buffer(PAGE, |_, _| panic!("the pool is at its limit"));
        assert!(more.home.is_none());
    }

    #[test]
    fn trim_gives_back_idle_chunks_and_only_those() {
        let pool = Pool::new(4 * CHUNK, 4);
        let mut registered = Vec::new();
        let mut buffer = |len| pool.buffer(len, |index, _| registered.push(index));
        let (mut small, kept) = (buffer(CHUNK), buffer(PAGE));
        small.fill(7);
        let start = small.as_ptr();
        drop(small);
        let mut asked = Vec::new();
        for _ in 0..2 {
            pool.trim(|index| {
                asked.push(index);
                true
            });
        }
        assert_eq!(asked, [0], "not at once, and not what is in use");
        let again = pool.buffer(CHUNK, |index, _| registered.push(index));
        assert_eq!(again.as_ptr(), start);
        assert!(again.iter().all(|byte| *byte == 0));
        assert_eq!(registered, [0, 1, 0]);
        drop(kept);
    }

    #[test]
    fn a_chunk_that_the_ring_does_not_forget_stays() {
        let pool = Pool::new(CHUNK, 4);
        drop(pool.buffer(PAGE, |_, _| ()));
        pool.trim(|_| false);
        pool.trim(|_| false);
        drop(pool.buffer(PAGE, |_, _| panic!("the chunk is registered still")));
    }

    #[test]
    fn an_empty_buffer_is_fine() {
        assert_eq!(Buffer::from_system(0).len(), 0);
        assert_eq!(Pool::new(CHUNK, 1).buffer(0, |_, _| ()).len(), 0);
    }
}
