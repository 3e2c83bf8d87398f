//! Buffer pool of a queue: memory kept for the next request.
//!
//! A queue allocates while it warms up and then runs on what it kept: a server whose memory the
//! kernel is reclaiming through it must not ask the kernel for more. Buffers come in sizes that are
//! powers of two; a request gets the smallest that holds it. What is kept is bounded per size, so a
//! burst is given back to the system; and so is a size that was not asked for between two calls of
//! a [`Pool::trimmer`].
//!
//! One thread at a time uses it: locks are never waited for, and atomics are never contended. They are there
//! so that a queue of the blocking host can move to another thread.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use gaur_block::File;

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::waiters::{AsyncLock, Waiters};

/// Smallest size, as a power of two: a page, and the largest request alignment in common use.
const MIN_BITS: u32 = 12;
/// Largest size that is kept: the input of one compressed cluster (up to twice 2 MiB) together
/// with the blocks at its edges.
const MAX_BITS: u32 = 23;
const CLASSES: usize = (MAX_BITS - MIN_BITS + 1) as usize;
/// Most bytes kept of one size, but always [`KEPT_MIN`] buffers.
const KEPT_BYTES: usize = 16 << 20;
const KEPT_MIN: usize = 8;
/// Most bytes that the requests of a queue have in bounce buffers at once. A guest chooses how its memory is
/// aligned, so without a limit it could have a buffer for every request that its rings hold.
const BOUNCE_BYTES_MAX: usize = 16 << 20;

/// The buffers of one queue. They may serve all files of the queue: a kept buffer that is not
/// aligned enough for a file is replaced.
pub(crate) struct Pool<F: File> {
    kept: Arc<Kept<F>>,
}

struct Kept<F: File> {
    classes: [Mutex<Vec<F::Buffer>>; CLASSES],
    /// A bit for each size that was asked for since the last trim.
    active: AtomicUsize,
    /// Bytes of bounce buffers in use.
    bounce_bytes: AtomicUsize,
    /// Notified when a bounce buffer comes back.
    bounce_freed: Waiters,
    /// The next request to get a bounce buffer has it, so that none is overtaken.
    bounce_turn: AsyncLock,
}

impl<F: File> Pool<F> {
    /// A pool that holds nothing yet.
    pub(crate) fn new() -> Pool<F> {
        Pool {
            kept: Arc::new(Kept {
                classes: std::array::from_fn(|_| Mutex::new(Vec::new())),
                active: AtomicUsize::new(0),
                bounce_bytes: AtomicUsize::new(0),
                bounce_freed: Waiters::default(),
                bounce_turn: AsyncLock::default(),
            }),
        }
    }

    /// A buffer of `len_bytes` that suits requests to `file`. It holds whatever its last user left
    /// in it. It goes back to the pool when it is dropped.
    pub(crate) fn take(&self, file: &F, len_bytes: usize) -> PoolBuffer<F> {
        let Some(class) = class_of(len_bytes) else {
            let buffer = Some(file.buffer(len_bytes));
            return PoolBuffer {
                kept: Arc::clone(&self.kept),
                buffer,
                len_bytes,
                class: None,
            };
        };
        self.kept.active.fetch_or(1 << class, Ordering::Relaxed);
        let alignment = file.limits().memory_alignment.max(1) as usize;
        let kept = self.kept.classes[class].lock().pop();
        let buffer = match kept {
            Some(buffer) if buffer.as_ptr().addr().is_multiple_of(alignment) => buffer,
            _ => file.buffer(class_bytes(class)),
        };
        PoolBuffer {
            kept: Arc::clone(&self.kept),
            buffer: Some(buffer),
            len_bytes,
            class: Some(class),
        }
    }
}

impl<F: File> Pool<F> {
    /// A bounce buffer, as [`Pool::take`] gives it, once the queue has room for it. Before the caller gives it
    /// back it waits for its file and nothing else, so every wait ends.
    pub(crate) async fn take_bounce(&self, file: &F, len_bytes: usize) -> BounceBuffer<F> {
        let kept = &self.kept;
        let _turn = kept.bounce_turn.lock().await;
        loop {
            let ticket = kept.bounce_freed.ticket();
            let used = kept.bounce_bytes.load(Ordering::Relaxed) + len_bytes;
            if used <= BOUNCE_BYTES_MAX || used == len_bytes {
                kept.bounce_bytes.store(used, Ordering::Relaxed);
                return BounceBuffer(self.take(file, len_bytes));
            }
            kept.bounce_freed.wait(ticket).await;
        }
    }
}

impl<F: File + 'static> Pool<F> {
    /// Drops the buffers of sizes that were not asked for since it was called last; `false` when the
    /// pool is gone.
    pub(crate) fn trimmer(&self) -> impl Fn() -> bool + 'static {
        let kept = Arc::downgrade(&self.kept);
        move || {
            let Some(kept) = kept.upgrade() else {
                return false;
            };
            let active = kept.active.swap(0, Ordering::Relaxed);
            for (class, buffers) in kept.classes.iter().enumerate() {
                if active & 1 << class == 0 {
                    *buffers.lock() = Vec::new();
                }
            }
            true
        }
    }
}

fn class_of(len_bytes: usize) -> Option<usize> {
    let bits = len_bytes
        .max(1)
        .checked_next_power_of_two()?
        .trailing_zeros()
        .max(MIN_BITS);
    (bits <= MAX_BITS).then_some((bits - MIN_BITS) as usize)
}

fn class_bytes(class: usize) -> usize {
    1 << (class + MIN_BITS as usize)
}

/// A buffer on loan from a [`Pool`].
pub(crate) struct PoolBuffer<F: File> {
    kept: Arc<Kept<F>>,
    /// `Some` until the drop.
    buffer: Option<F::Buffer>,
    len_bytes: usize,
    class: Option<usize>,
}

impl<F: File> Deref for PoolBuffer<F> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer
            .as_deref()
            .map_or(&[], |buffer| &buffer[..self.len_bytes])
    }
}

impl<F: File> DerefMut for PoolBuffer<F> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer
            .as_deref_mut()
            .map_or(&mut [], |buffer| &mut buffer[..self.len_bytes])
    }
}

impl<F: File> Drop for PoolBuffer<F> {
    fn drop(&mut self) {
        if let (Some(class), Some(buffer)) = (self.class, self.buffer.take()) {
            let mut kept = self.kept.classes[class].lock();
            if kept.len() < (KEPT_BYTES / class_bytes(class)).max(KEPT_MIN) {
                kept.push(buffer);
            }
        }
    }
}

/// A buffer that counts as a bounce buffer.
pub(crate) struct BounceBuffer<F: File>(PoolBuffer<F>);

impl<F: File> Deref for BounceBuffer<F> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl<F: File> DerefMut for BounceBuffer<F> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl<F: File> Drop for BounceBuffer<F> {
    fn drop(&mut self) {
        let kept = &self.0.kept;
        kept.bounce_bytes
            .fetch_sub(self.0.len_bytes, Ordering::Relaxed);
        kept.bounce_freed.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_file::{TestFile, cached_limits};

    #[test]
    fn a_returned_buffer_is_handed_out_again() {
        let file = TestFile::new(Vec::new(), cached_limits());
        let pool = Pool::new();
        let first = pool.take(&file, 5000);
        assert_eq!(first.len(), 5000);
        let address = first.as_ptr();
        drop(first);
        let second = pool.take(&file, 8192);
        assert_eq!((second.as_ptr(), second.len()), (address, 8192));
        assert_eq!(file.buffers_made(), 1);
    }

    #[test]
    fn buffers_in_use_are_never_shared_and_their_number_is_what_was_needed_at_once() {
        let file = TestFile::new(Vec::new(), cached_limits());
        let pool = Pool::new();
        for _ in 0..10 {
            let held: Vec<_> = (0..5).map(|_| pool.take(&file, 65536)).collect();
            let mut addresses: Vec<_> = held.iter().map(|buffer| buffer.as_ptr()).collect();
            addresses.sort();
            addresses.dedup();
            assert_eq!(addresses.len(), 5);
        }
        assert_eq!(file.buffers_made(), 5);
    }

    #[test]
    fn what_is_kept_after_a_burst_is_bounded() {
        let file = TestFile::new(Vec::new(), cached_limits());
        let pool = Pool::<TestFile>::new();
        let held: Vec<_> = (0..40).map(|_| pool.take(&file, 2 << 20)).collect();
        drop(held);
        assert_eq!(
            pool.kept.classes[class_of(2 << 20).unwrap()].lock().len(),
            8
        );
    }

    #[test]
    fn a_trim_drops_what_was_not_asked_for_since_the_last() {
        let file = TestFile::new(Vec::new(), cached_limits());
        let pool = Pool::new();
        let trim = pool.trimmer();
        drop((pool.take(&file, 4096), pool.take(&file, 65536)));
        let kept = |len| pool.kept.classes[class_of(len).unwrap()].lock().len();
        assert!(trim());
        assert_eq!((kept(4096), kept(65536)), (1, 1));
        drop(pool.take(&file, 4096));
        assert!(trim());
        assert_eq!((kept(4096), kept(65536)), (1, 0));
        drop(pool);
        assert!(!trim());
    }

    #[test]
    fn sizes_at_the_edges_get_a_class_or_none() {
        assert_eq!(class_of(0), Some(0));
        assert_eq!(class_of(4096), Some(0));
        assert_eq!(class_of(4097), Some(1));
        assert_eq!(class_of(8 << 20), Some(CLASSES - 1));
        assert_eq!(class_of((8 << 20) + 1), None);
        assert_eq!(class_of(usize::MAX), None);
    }

    #[test]
    fn a_kept_buffer_that_is_not_aligned_enough_is_not_used() {
        let loose = TestFile::new(Vec::new(), cached_limits());
        let mut limits = cached_limits();
        limits.memory_alignment = 1 << 16;
        let strict = TestFile::new(Vec::new(), limits);
        let pool = Pool::new();
        let held: Vec<_> = (0..4).map(|_| pool.take(&loose, 4096)).collect();
        drop(held);
        for _ in 0..4 {
            assert_eq!(pool.take(&strict, 4096).as_ptr().addr() % (1 << 16), 0);
        }
    }
}
