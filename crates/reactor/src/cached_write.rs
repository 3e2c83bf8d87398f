//! Writes to the page cache, which are a copy most of the time and a long wait now and then.
//!
//! A ring hands every cached write to a worker thread on file systems that cannot promise not to
//! wait (ext4 among them, Linux 6.18), which costs more than the copy, and one file's writes go one
//! after the other there. So small writes are done by the thread itself: without waiting where the
//! file system knows how (`RWF_NOWAIT`), and otherwise for as long as that turns out to be quick. A
//! write that had to wait (too many dirty pages, a journal commit) sends those that follow to the
//! ring for a while, so that a slow disk stalls the thread for one write and not for all.

use std::cell::Cell;
use std::time::{Duration, Instant};

use gaur_block::Errno;

/// Larger writes go to the ring: a worker may copy while this thread goes on.
const MAX_BYTES: usize = 128 << 10;

/// A write that takes longer has waited for something.
const SLOW: Duration = Duration::from_millis(4);

/// For how long the ring gets the writes after that.
const AVOID: Duration = Duration::from_millis(250);

/// What is known of one file's cached writes.
pub(crate) struct CachedWrites {
    /// `RWF_NOWAIT` has not been refused.
    nowait: Cell<bool>,
    avoid_until: Cell<Option<Instant>>,
}

impl CachedWrites {
    pub(crate) fn new() -> CachedWrites {
        CachedWrites {
            nowait: Cell::new(true),
            avoid_until: Cell::new(None),
        }
    }

    /// Does the write, given the flags for `pwritev2(2)`, if it is one to do here; `None` leaves it
    /// to the ring.
    pub(crate) fn attempt(
        &self,
        len_bytes: usize,
        write: impl Fn(libc::c_int) -> Result<usize, Errno>,
    ) -> Option<Result<usize, Errno>> {
        if len_bytes > MAX_BYTES {
            return None;
        }
        if self.nowait.get() {
            match write(libc::RWF_NOWAIT) {
                Err(Errno::EAGAIN) => return None,
                Err(errno) if errno == Errno::EOPNOTSUPP || errno.raw() == libc::ENOSYS => {
                    self.nowait.set(false);
                }
                result => return Some(result),
            }
        }
        let start = Instant::now();
        if self.avoid_until.get().is_some_and(|until| start < until) {
            return None;
        }
        let result = write(0);
        let end = Instant::now();
        let slow = end.duration_since(start) > SLOW;
        self.avoid_until.set(slow.then(|| end + AVOID));
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_that_never_wait_are_done_here() {
        let writes = CachedWrites::new();
        assert_eq!(
            writes.attempt(4096, |flags| Ok(flags as usize)),
            Some(Ok(8))
        );
        assert_eq!(writes.attempt(4096, |_| Err(Errno::EAGAIN)), None);
        assert_eq!(
            writes.attempt(4096, |_| Err(Errno::ENOSPC)),
            Some(Err(Errno::ENOSPC))
        );
        assert_eq!(
            writes.attempt(MAX_BYTES + 1, |_| panic!("it is too large")),
            None
        );
    }

    #[test]
    fn a_slow_write_sends_the_next_ones_to_the_ring_for_a_while() {
        let writes = CachedWrites::new();
        let unsupported = |flags| match flags {
            0 => Ok(1),
            _ => Err(Errno::EOPNOTSUPP),
        };
        assert_eq!(writes.attempt(4096, unsupported), Some(Ok(1)));
        let slow = |flags| {
            assert_eq!(flags, 0, "what was refused once is not tried again");
            std::thread::sleep(SLOW * 2);
            Ok(2)
        };
        assert_eq!(writes.attempt(4096, slow), Some(Ok(2)));
        assert_eq!(
            writes.attempt(4096, |_| panic!("the ring has its turn")),
            None
        );
        std::thread::sleep(AVOID);
        assert_eq!(writes.attempt(4096, |_| Ok(3)), Some(Ok(3)));
    }
}
