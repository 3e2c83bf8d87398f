//! Block locks: read-modify-write on files whose requests must be aligned.
//!
//! Where a file takes whole blocks only, a write of part of a block reads the block, changes it and
//! writes it back. Any other write to that block in between would be undone, so the two exclude each
//! other, on all queues of the image. Aligned writes to a file on which no request does this are the
//! common case, and cost one atomic addition and one subtraction:
//!
//! * An aligned write counts itself in (`fast`). If no request is `slow` it goes ahead.
//! * A write that changes part of a block is `slow`: it announces itself, waits until those counted
//!   in have left, and holds its range while it works. Aligned writes that come meanwhile are slow as
//!   well: they take their range.
//!
//! A plain load by aligned writes would not do: one already under way when a read-modify-write
//! begins must hold it up.
//!
//! Fair: a range is granted when no range asked for earlier overlaps it. No lock is
//! held over an await, and wakers run outside the mutex. A task asks for one range at a time and asks
//! for none while it is counted as fast, so there is no deadlock. The lists keep their capacity, so
//! after warm-up nothing is allocated.

use std::ops::Range;

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::waiters::Waiters;

const FAST: u64 = 1;
const SLOW: u64 = 1 << 32;
const FAST_MASK: u64 = SLOW - 1;

/// The locks of one file, shared by all queues of its image.
#[derive(Default)]
pub(crate) struct SectorLocks {
    /// Fast writers in the low half, slow ones (waiting or holding) in the high half.
    writers: AtomicU64,
    table: Mutex<Table>,
    /// Notified when something was given up that a slow writer may wait for.
    freed: Waiters,
}

#[derive(Default)]
struct Table {
    next_ticket: u64,
    /// Held and waited for, in order of arrival.
    claims: Vec<Claim>,
}

struct Claim {
    ticket: u64,
    bytes: Range<u64>,
}

impl Table {
    /// Whether no earlier claim overlaps this one.
    fn is_first(&self, ticket: u64) -> bool {
        let mut claims = self.claims.iter();
        let Some(at) = claims.position(|claim| claim.ticket == ticket) else {
            return false;
        };
        let (earlier, own) = (&self.claims[..at], &self.claims[at].bytes);
        let overlaps = |other: &Claim| own.start < other.bytes.end && other.bytes.start < own.end;
        !earlier.iter().any(overlaps)
    }
}

impl SectorLocks {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// For a write of whole blocks: goes ahead at once, or `None` when it must take its range.
    pub(crate) fn enter(&self) -> Option<Fast<'_>> {
        let before = self.writers.fetch_add(FAST, Ordering::AcqRel);
        let guard = Fast { locks: self };
        // Dropping the guard on the slow way out counts out again, and lets those waiting know.
        (before < SLOW).then_some(guard)
    }

    /// Waits for the blocks that cover `bytes` and holds them until the result is dropped. The
    /// caller rounds `bytes` out to whole blocks.
    pub(crate) async fn lock(&self, bytes: Range<u64>) -> Held<'_> {
        self.writers.fetch_add(SLOW, Ordering::AcqRel);
        let ticket = {
            let mut table = self.table();
            let ticket = table.next_ticket;
            table.next_ticket += 1;
            table.claims.push(Claim { ticket, bytes });
            ticket
        };
        // From here on a drop, also of the unfinished wait, takes the claim back.
        let held = Held {
            locks: self,
            ticket,
        };
        loop {
            let moment = self.freed.ticket();
            if self.may_go_ahead(ticket) {
                return held;
            }
            self.freed.wait(moment).await;
        }
    }

    /// Whether a claim is granted: no fast writer is left, and no earlier claim overlaps it.
    fn may_go_ahead(&self, ticket: u64) -> bool {
        let table = self.table();
        self.writers.load(Ordering::Acquire) & FAST_MASK == 0 && table.is_first(ticket)
    }
}

/// A write of whole blocks that did not need to wait. Drop it when the write has ended.
pub(crate) struct Fast<'a> {
    locks: &'a SectorLocks,
}

impl Drop for Fast<'_> {
    fn drop(&mut self) {
        let before = self.locks.writers.fetch_sub(FAST, Ordering::AcqRel);
        if before & FAST_MASK == FAST && before >= SLOW {
            self.locks.freed.notify();
        }
    }
}

/// A range held; or asked for, as long as the wait goes on.
pub(crate) struct Held<'a> {
    locks: &'a SectorLocks,
    ticket: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let other = |claim: &Claim| claim.ticket != self.ticket;
        self.locks.table().claims.retain(other);
        self.locks.writers.fetch_sub(SLOW, Ordering::AcqRel);
        self.locks.freed.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    fn poll<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn ranges_that_do_not_meet_are_held_at_once() {
        let locks = SectorLocks::default();
        let first = poll(pin!(locks.lock(0..4096)));
        let second = poll(pin!(locks.lock(4096..8192)));
        assert!(first.is_some() && second.is_some());
    }

    #[test]
    fn an_overlapping_range_waits_for_the_holder() {
        let locks = SectorLocks::default();
        let first = poll(pin!(locks.lock(0..4096)));
        let mut second = pin!(locks.lock(0..512));
        assert!(poll(second.as_mut()).is_none());
        drop(first);
        assert!(poll(second.as_mut()).is_some());
    }

    #[test]
    fn a_later_range_does_not_overtake_an_earlier_one_that_it_overlaps() {
        let locks = SectorLocks::default();
        let first = poll(pin!(locks.lock(0..4096)));
        let mut second = pin!(locks.lock(0..8192));
        let mut third = pin!(locks.lock(4096..8192));
        assert!(poll(second.as_mut()).is_none());
        assert!(
            poll(third.as_mut()).is_none(),
            "it is free, but the second asked first"
        );
        drop(first);
        let second_held = poll(second.as_mut());
        assert!(second_held.is_some());
        assert!(poll(third.as_mut()).is_none());
        drop(second_held);
        assert!(poll(third.as_mut()).is_some());
    }

    #[test]
    fn an_aligned_write_under_way_holds_up_a_range_and_is_not_joined_by_another() {
        let locks = SectorLocks::default();
        let under_way = locks.enter();
        assert!(under_way.is_some());
        let mut range = pin!(locks.lock(0..512));
        assert!(poll(range.as_mut()).is_none());
        assert!(locks.enter().is_none());
        assert!(poll(range.as_mut()).is_none());
        drop(under_way);
        let held = poll(range.as_mut());
        assert!(held.is_some());
        assert!(locks.enter().is_none());
        drop(held);
        assert!(locks.enter().is_some());
    }

    #[test]
    fn a_wait_that_is_dropped_frees_those_behind_it() {
        let locks = SectorLocks::default();
        let first = poll(pin!(locks.lock(0..512)));
        let mut third = pin!(locks.lock(512..1024));
        {
            let mut second = pin!(locks.lock(0..1024));
            assert!(poll(second.as_mut()).is_none());
            assert!(poll(third.as_mut()).is_none());
        }
        let held = poll(third.as_mut());
        assert!(held.is_some());
        drop(first);
        assert_eq!(
            locks.writers.load(Ordering::Relaxed),
            SLOW,
            "only the third one's claim"
        );
    }

    #[test]
    fn no_lock_is_left_when_all_requests_have_ended() {
        let locks = SectorLocks::default();
        drop(poll(pin!(locks.lock(0..512))));
        drop(locks.enter());
        assert_eq!(locks.writers.load(Ordering::Relaxed), 0);
        assert!(locks.table().claims.is_empty());
    }
}

#[cfg(all(test, loom))]
mod loom_model;
