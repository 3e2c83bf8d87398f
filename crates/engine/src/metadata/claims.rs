//! Which guest ranges have a mapping in the making.
//!
//! A write that needs a new mapping claims the range it will map before it does any input or
//! output, and gives the claim up after it has committed or aborted. Everybody else who wants to
//! change a mapping in that range waits. Reads, and writes in place, do not look here: they go by
//! the mapping that is committed.
//!
//! Lock order: claims, then maps, then alloc.

use parking_lot::{Mutex, MutexGuard};

use crate::waiters::{Ticket, Waiters};

/// The claims of one image.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    list: Mutex<ClaimList>,
    waiters: Waiters,
}

/// The claims while they are locked.
#[derive(Debug, Default)]
pub(crate) struct ClaimList {
    claims: Vec<Claim>,
    next: u64,
}

#[derive(Debug)]
struct Claim {
    id: u64,
    start: u64,
    end: u64,
}

impl Claims {
    /// Locks the list; look at the maps and insert a claim under one lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ClaimList> {
        self.list.lock()
    }

    /// Marks the moment before the list was looked at.
    pub(crate) fn ticket(&self) -> Ticket {
        self.waiters.ticket()
    }

    /// What to wait for: it is notified whenever a claim is given up.
    pub(crate) fn waiters(&self) -> &Waiters {
        &self.waiters
    }

    /// Gives up claim `id`.
    pub(crate) fn remove(&self, id: u64) {
        {
            let mut list = self.list.lock();
            if let Some(at) = list.claims.iter().position(|claim| claim.id == id) {
                list.claims.swap_remove(at);
            }
        }
        self.waiters.notify();
    }
}

impl ClaimList {
    /// Length of the prefix of guest bytes `start..end` that no claim touches.
    pub(crate) fn free_prefix(&self, start: u64, end: u64) -> u64 {
        let mut first = end;
        for claim in &self.claims {
            if claim.start < first && claim.end > start {
                first = claim.start.max(start);
            }
        }
        first - start
    }

    /// Claims guest bytes `start..end`, which nobody else holds; returns the claim's number.
    pub(crate) fn insert(&mut self, start: u64, end: u64) -> u64 {
        debug_assert_eq!(
            self.free_prefix(start, end),
            end - start,
            "a range is claimed once"
        );
        self.next += 1;
        self.claims.push(Claim {
            id: self.next,
            start,
            end,
        });
        self.next
    }
}
