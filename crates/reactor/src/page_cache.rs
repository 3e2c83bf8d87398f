//! Transfers to and from the page cache, which are a copy most of the time and a long wait now and
//! then. A small one is done by the thread itself while it is a copy, and left to the ring when not.
//!
//! Reads that hit cost less this way than through the ring, and those that miss say so
//! (`RWF_NOWAIT`): the ring then waits for the disk without a thread. Misses come in streaks, during
//! which most reads go to the ring at once. So do short ones when there are many at a time: then one
//! call takes them all to the kernel, which copies what it has while it takes them, and that costs
//! less than a call each. Of long ones the copy costs more than the call, and memory that was just
//! filled is used while it is near the processor.
//!
//! Writes a ring hands to a worker thread wherever the file system cannot promise not to wait (ext4
//! among them, Linux 6.18), at several times the cost of the copy, and one file's writes go one
//! after the other there. So they are done here: without waiting where the file system knows how,
//! and otherwise for as long as that turns out not to wait. Once writes do wait (too many dirty
//! pages, a journal commit), those that follow go to the ring for a while: a slow disk stalls the
//! thread for a write or two and not for all.

use std::cell::Cell;
use std::time::{Duration, Instant};

use gaur_block::Errno;

use crate::syscall::{self, is_refusal};

/// Larger transfers go to the ring: a worker may copy while this thread goes on.
const MAX_BYTES: usize = 128 << 10;

/// Up to this length the call is the larger part of a transfer, and one call for many worth it.
const CROWD_BYTES: usize = 16 << 10;

/// The most reads that go to the ring unasked after a miss.
const MAX_SKIP: u32 = 63;

/// A write that takes longer has either waited or lost the processor.
const SLOW: Duration = Duration::from_millis(4);

/// For how long after a slow write each write is watched, to tell the two apart.
const WATCH: Duration = Duration::from_secs(1);

/// For how long the ring gets the writes after one that waited.
const AVOID: Duration = Duration::from_millis(250);

/// Whether a transfer is better off in one call with the others.
fn is_one_of_many(len_bytes: usize, crowded: bool) -> bool {
    crowded && len_bytes <= CROWD_BYTES
}

/// What is known of one file's reads.
pub(crate) struct CachedReads {
    /// `RWF_NOWAIT` has not been refused.
    nowait: Cell<bool>,
    /// Reads to leave to the ring before the next attempt.
    skip: Cell<u32>,
    /// What `skip` was set to last; 0 after a hit.
    last_skip: Cell<u32>,
}

impl CachedReads {
    pub(crate) fn new() -> CachedReads {
        CachedReads {
            nowait: Cell::new(true),
            skip: Cell::new(0),
            last_skip: Cell::new(0),
        }
    }

    /// Does the read, given the flags for `preadv2(2)`, if the page cache has it; `None` leaves it
    /// to the ring.
    pub(crate) fn attempt(
        &self,
        len_bytes: usize,
        crowded: bool,
        read: impl FnOnce(libc::c_int) -> Result<usize, Errno>,
    ) -> Option<Result<usize, Errno>> {
        if len_bytes > MAX_BYTES || is_one_of_many(len_bytes, crowded) || !self.nowait.get() {
            return None;
        }
        if let Some(left) = self.skip.get().checked_sub(1) {
            self.skip.set(left);
            return None;
        }
        match read(libc::RWF_NOWAIT) {
            Err(Errno::EAGAIN) => {
                let skip = (self.last_skip.get() * 2 + 1).min(MAX_SKIP);
                self.last_skip.set(skip);
                self.skip.set(skip);
                None
            }
            Err(errno) if is_refusal(errno) => {
                self.nowait.set(false);
                None
            }
            result => {
                self.last_skip.set(0);
                Some(result)
            }
        }
    }
}

/// What is known of one file's writes.
pub(crate) struct CachedWrites {
    /// `RWF_NOWAIT` has not been refused.
    nowait: Cell<bool>,
    /// `RWF_NOWAIT` was taken: the ring needs no worker thread either.
    taken: Cell<bool>,
    watch_until: Cell<Option<Instant>>,
    avoid_until: Cell<Option<Instant>>,
}

impl CachedWrites {
    pub(crate) fn new() -> CachedWrites {
        CachedWrites {
            nowait: Cell::new(true),
            taken: Cell::new(false),
            watch_until: Cell::new(None),
            avoid_until: Cell::new(None),
        }
    }

    /// Does the write, given the flags for `pwritev2(2)`, if it is one to do here; `None` leaves it
    /// to the ring.
    pub(crate) fn attempt(
        &self,
        len_bytes: usize,
        crowded: bool,
        write: impl Fn(libc::c_int) -> Result<usize, Errno>,
    ) -> Option<Result<usize, Errno>> {
        if len_bytes > MAX_BYTES || (is_one_of_many(len_bytes, crowded) && self.taken.get()) {
            return None;
        }
        if self.nowait.get() {
            match write(libc::RWF_NOWAIT) {
                Err(errno) if is_refusal(errno) => self.nowait.set(false),
                result => {
                    self.taken.set(true);
                    return (result != Err(Errno::EAGAIN)).then_some(result);
                }
            }
        }
        let start = Instant::now();
        if self.avoid_until.get().is_some_and(|until| start < until) {
            return None;
        }
        let watched = self.watch_until.get().is_some_and(|until| start < until);
        let waits_before = if watched {
            syscall::waits_of_thread()
        } else {
            u64::MAX
        };
        let result = write(0);
        let end = Instant::now();
        if end.duration_since(start) > SLOW {
            self.watch_until.set(Some(end + AVOID + WATCH));
            if watched && syscall::waits_of_thread() > waits_before {
                self.avoid_until.set(Some(end + AVOID));
            }
        }
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_that_miss_go_to_the_ring_and_come_back() {
        let reads = CachedReads::new();
        assert_eq!(
            reads.attempt(4096, false, |flags| Ok(flags as usize)),
            Some(Ok(8))
        );
        assert_eq!(
            reads.attempt(MAX_BYTES + 1, false, |_| panic!("it is too large")),
            None
        );
        let mut attempts = 0;
        for _ in 0..1000 {
            let miss = |_| {
                attempts += 1;
                Err(Errno::EAGAIN)
            };
            assert_eq!(reads.attempt(4096, false, miss), None);
        }
        assert!((10..30).contains(&attempts), "{attempts}");
        let hits = (0..100)
            .filter(|_| reads.attempt(4096, false, |_| Ok(1)).is_some())
            .count();
        assert!(hits >= 100 - MAX_SKIP as usize, "{hits}");
        assert_eq!(
            reads.attempt(4096, false, |_| Err(Errno::EIO)),
            Some(Err(Errno::EIO))
        );
        assert_eq!(reads.attempt(4096, false, |_| Err(Errno::EOPNOTSUPP)), None);
        assert_eq!(
            reads.attempt(4096, false, |_| panic!("refused once is not asked again")),
            None
        );
    }

    #[test]
    fn writes_that_never_wait_are_done_here() {
        let writes = CachedWrites::new();
        assert_eq!(
            writes.attempt(4096, false, |flags| Ok(flags as usize)),
            Some(Ok(8))
        );
        assert_eq!(writes.attempt(4096, false, |_| Err(Errno::EAGAIN)), None);
        assert_eq!(
            writes.attempt(4096, false, |_| Err(Errno::ENOSPC)),
            Some(Err(Errno::ENOSPC))
        );
        assert_eq!(
            writes.attempt(MAX_BYTES + 1, false, |_| panic!("it is too large")),
            None
        );
    }

    /// A file system that refuses `RWF_NOWAIT`, and a write that takes long in its own way.
    fn slow(how: impl Fn()) -> impl Fn(libc::c_int) -> Result<usize, Errno> {
        move |flags| match flags {
            0 => {
                how();
                Ok(1)
            }
            _ => Err(Errno::EOPNOTSUPP),
        }
    }

    #[test]
    fn writes_that_wait_go_to_the_ring_for_a_while() {
        let writes = CachedWrites::new();
        let waits = slow(|| std::thread::sleep(SLOW * 2));
        assert_eq!(writes.attempt(4096, false, &waits), Some(Ok(1)));
        assert_eq!(writes.attempt(4096, false, &waits), Some(Ok(1)));
        assert_eq!(
            writes.attempt(4096, false, |_| panic!("the ring has its turn")),
            None
        );
        std::thread::sleep(AVOID);
        assert_eq!(writes.attempt(4096, false, slow(|| {})), Some(Ok(1)));
    }

    #[test]
    fn a_busy_machine_does_not_count_as_a_slow_disk() {
        let writes = CachedWrites::new();
        let computes = slow(|| {
            let start = Instant::now();
            while start.elapsed() < SLOW * 2 {}
        });
        for _ in 0..5 {
            assert_eq!(writes.attempt(4096, false, &computes), Some(Ok(1)));
        }
    }

    #[test]
    fn many_at_a_time_go_to_the_ring_which_needs_no_worker_for_them() {
        let reads = CachedReads::new();
        assert_eq!(reads.attempt(4096, true, |_| panic!("one of many")), None);
        assert!(reads.attempt(CROWD_BYTES + 1, true, |_| Ok(1)).is_some());
        assert!(reads.attempt(4096, false, |_| Ok(1)).is_some());
        let writes = CachedWrites::new();
        assert!(
            writes.attempt(4096, true, |_| Ok(1)).is_some(),
            "nobody knows yet"
        );
        assert_eq!(writes.attempt(4096, true, |_| panic!("one of many")), None);
        assert!(writes.attempt(CROWD_BYTES + 1, true, |_| Ok(1)).is_some());
        let workers = CachedWrites::new();
        for _ in 0..2 {
            assert_eq!(workers.attempt(4096, true, slow(|| {})), Some(Ok(1)));
        }
    }
}
