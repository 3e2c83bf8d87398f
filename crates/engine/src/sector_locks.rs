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
//! Fair: a range is granted when no range held and no range asked for earlier overlaps it. No lock is
//! held over an await, and wakers run outside the mutex. A task asks for one range at a time and asks
//! for none while it is counted as fast, so there is no deadlock. The lists keep their capacity, so
//! after warm-up nothing is allocated.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};

const FAST: u64 = 1;
const SLOW: u64 = 1 << 32;
const FAST_MASK: u64 = SLOW - 1;

/// The locks of one file, shared by all queues of its image.
#[derive(Default)]
pub(crate) struct SectorLocks {
    /// Fast writers in the low half, slow ones (waiting or holding) in the high half.
    writers: AtomicU64,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next_ticket: u64,
    held: Vec<Claim>,
    /// In order of arrival.
    waiting: VecDeque<Waiting>,
}

struct Claim {
    ticket: u64,
    bytes: Range<u64>,
}

struct Waiting {
    claim: Claim,
    waker: Option<Waker>,
}

impl Claim {
    fn overlaps(&self, other: &Claim) -> bool {
        self.bytes.start < other.bytes.end && other.bytes.start < self.bytes.end
    }
}

impl Table {
    /// Moves the first claim that may go ahead to the held ones; its waker if it left one.
    fn grant_one(&mut self) -> Option<Option<Waker>> {
        let free = |index: usize, waiting: &Waiting| {
            let earlier = self
                .waiting
                .iter()
                .take(index)
                .map(|earlier| &earlier.claim);
            !self
                .held
                .iter()
                .chain(earlier)
                .any(|other| other.overlaps(&waiting.claim))
        };
        let index = self
            .waiting
            .iter()
            .enumerate()
            .position(|(index, waiting)| free(index, waiting))?;
        let granted = self.waiting.remove(index)?;
        self.held.push(granted.claim);
        Some(granted.waker)
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
            table.waiting.push_back(Waiting {
                claim: Claim { ticket, bytes },
                waker: None,
            });
            ticket
        };
        // From here on a drop, also of the unfinished wait, takes the claim back.
        let held = Held {
            locks: self,
            ticket,
        };
        self.grant();
        Wait {
            locks: self,
            ticket,
        }
        .await;
        held
    }

    /// Grants whatever can be granted. Called after every change that may have freed something.
    fn grant(&self) {
        loop {
            let granted = {
                let mut table = self.table();
                if self.writers.load(Ordering::Acquire) & FAST_MASK != 0 {
                    // The last of them to leave calls this again.
                    return;
                }
                table.grant_one()
            };
            match granted {
                Some(waker) => waker.into_iter().for_each(Waker::wake),
                None => return,
            }
        }
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
            self.locks.grant();
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
        {
            let mut table = self.locks.table();
            table.held.retain(|claim| claim.ticket != self.ticket);
            table
                .waiting
                .retain(|waiting| waiting.claim.ticket != self.ticket);
        }
        self.locks.writers.fetch_sub(SLOW, Ordering::AcqRel);
        self.locks.grant();
    }
}

struct Wait<'a> {
    locks: &'a SectorLocks,
    ticket: u64,
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut table = self.locks.table();
        let mine = table
            .waiting
            .iter_mut()
            .find(|waiting| waiting.claim.ticket == self.ticket);
        match mine {
            None => Poll::Ready(()),
            Some(waiting) => {
                match &mut waiting.waker {
                    Some(waker) => waker.clone_from(context.waker()),
                    none => *none = Some(context.waker().clone()),
                }
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

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
        assert!(locks.table().held.is_empty() && locks.table().waiting.is_empty());
    }
}

#[cfg(all(test, loom))]
mod loom_model;
