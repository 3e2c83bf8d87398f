//! The log of requests in flight, in memory that outlives the server.
//!
//! Layout and procedure are those of the vhost-user specification ("Inflight I/O tracking", split
//! virtqueues), so that any server may go on where another was killed:
//!
//! ```text
//!  0  u64 features (0)       16 + 16 n  u8  descriptor n is in flight
//!  8  u16 version (1)                   5   unused
//! 10  u16 descriptors                   u16 next descriptor of the batch
//! 12  u16 last batch's head             u64 when it was popped: a counter
//! 14  u16 used index
//! ```
//!
//! A request is marked before it is served. A batch of completions is linked, its head is noted, the
//! used index is published, and then the marks are cleared and the used index is noted. A server that finds
//! the two indices to differ clears the marks of the last batch: the driver has seen it.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use super::memory::Mapping;

const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const VERSION: u16 = 1;

/// Bytes of a log for a ring of `size` entries.
pub(crate) fn log_bytes(size: u16) -> usize {
    (HEADER_BYTES + ENTRY_BYTES * usize::from(size)).next_multiple_of(64)
}

/// The log of one ring.
pub(crate) struct InflightLog {
    start: NonNull<u8>,
    _mapping: Arc<Mapping>,
    size: u16,
    counter: u64,
    /// The completions that are not published: head of the list, and how many.
    batch: (u16, u16),
}

// SAFETY: the memory is mapped while `_mapping` lives; one ring, on one thread, uses it at a time.
unsafe impl Send for InflightLog {}

impl InflightLog {
    /// The log at `offset` for a ring of `size` entries; a blank one is made ready.
    pub(crate) fn open(
        mapping: &Arc<Mapping>,
        offset: u64,
        size: u16,
    ) -> Result<InflightLog, String> {
        let run = mapping
            .run(offset, log_bytes(size))
            .filter(|run| run.len == log_bytes(size))
            .filter(|run| run.start.as_ptr().align_offset(16) == 0)
            .ok_or(
                "the log of requests in flight is shorter than its rings need, or not aligned",
            )?;
        let log = InflightLog {
            start: run.start,
            _mapping: mapping.clone(),
            size,
            counter: 0,
            batch: (0, 0),
        };
        match log.get(8) {
            0 => {
                log.set(10, size);
                log.set(8, VERSION);
            }
            VERSION if log.get(10) == size => {}
            VERSION => {
                let found = log.get(10);
                return Err(format!(
                    "the log of requests in flight is for {found} descriptors, the ring has {size}"
                ));
            }
            version => {
                return Err(format!(
                    "the log of requests in flight has version {version}"
                ));
            }
        }
        Ok(log)
    }

    /// What was in flight when the last server ended, first popped first. `used` is the used index
    /// that the driver sees.
    pub(crate) fn recover(&mut self, used: u16) -> Vec<u16> {
        let published = used.wrapping_sub(self.get(14));
        if published != 0 && published <= self.size {
            let mut head = self.get(12);
            for _ in 0..published {
                if head >= self.size {
                    break;
                }
                self.mark(head, 0);
                head = self.get(entry(head) + 6);
            }
        }
        self.set(14, used);
        let mut found: Vec<(u64, u16)> = (0..self.size)
            .filter(|head| self.marked(*head))
            .map(|head| (self.when(head), head))
            .collect();
        found.sort_unstable();
        self.counter = found.last().map_or(0, |(when, _)| when.wrapping_add(1));
        found.into_iter().map(|(_, head)| head).collect()
    }

    /// A request was popped.
    pub(crate) fn popped(&mut self, head: u16) {
        debug_assert!(head < self.size, "heads are checked against the ring");
        // SAFETY: the entry is inside the log and aligned to 16.
        unsafe { self.at::<u64>(entry(head) + 8).write_volatile(self.counter) };
        self.counter = self.counter.wrapping_add(1);
        self.mark(head, 1);
    }

    /// A request's completion was pushed, and is not published.
    pub(crate) fn pushed(&mut self, head: u16) {
        self.set(entry(head) + 6, self.batch.0);
        self.batch = (head, self.batch.1 + 1);
    }

    /// What was pushed is about to be published.
    pub(crate) fn before_publish(&mut self) {
        self.set(12, self.batch.0);
        // A killed process has made its stores in the order of its instructions.
        compiler_fence(Ordering::SeqCst);
    }

    /// It was published; the driver sees the used index `used`.
    pub(crate) fn published(&mut self, used: u16) {
        compiler_fence(Ordering::SeqCst);
        let (mut head, count) = self.batch;
        for _ in 0..count {
            self.mark(head, 0);
            // Only this process writes the log; a client that does too gets its own ring wrong.
            head = self.get(entry(head) + 6).min(self.size - 1);
        }
        compiler_fence(Ordering::SeqCst);
        self.set(14, used);
        self.batch = (0, 0);
    }

    fn mark(&self, head: u16, value: u8) {
        // SAFETY: the entry is inside the log.
        unsafe { self.at::<u8>(entry(head)).write_volatile(value) };
    }

    fn marked(&self, head: u16) -> bool {
        // SAFETY: the entry is inside the log.
        unsafe { self.at::<u8>(entry(head)).read_volatile() != 0 }
    }

    fn when(&self, head: u16) -> u64 {
        // SAFETY: the entry is inside the log and aligned to 16.
        unsafe { self.at::<u64>(entry(head) + 8).read_volatile() }
    }

    fn get(&self, offset: usize) -> u16 {
        // SAFETY: callers pass even offsets inside the log, which is aligned to 16.
        unsafe { self.at::<u16>(offset).read_volatile() }
    }

    fn set(&self, offset: usize, value: u16) {
        // SAFETY: as above.
        unsafe { self.at::<u16>(offset).write_volatile(value) };
    }

    /// # Safety
    /// The offset is inside the log.
    unsafe fn at<T>(&self, offset: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.start.as_ptr().add(offset).cast() }
    }
}

fn entry(head: u16) -> usize {
    HEADER_BYTES + ENTRY_BYTES * usize::from(head)
}
