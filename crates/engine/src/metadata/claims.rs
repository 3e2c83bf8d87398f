//! Range locks: guest ranges whose mapping is about to change.
//!
//! A write that needs a new mapping claims the range it will map before it does any input or
//! output, and gives the claim up after it has committed or aborted. Every other request that wants to
//! change a mapping in that range waits. Reads, and writes in place, do not look here: they go by
//! the mapping that is committed.
//!
//! Lock order: claims, then maps, then alloc.

use crate::sync::{Mutex, MutexGuard};
use crate::waiters::{Ticket, Waiters};

/// The claims of one image, in parts by the L2 slice that maps the range: a claim never spans two
/// slices, and claims in different slices need not know of each other.
#[derive(Debug)]
pub(crate) struct Claims {
    /// Guest bytes that a slice maps.
    slice_bytes: u64,
    parts: Vec<Part>,
}

/// A part on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part {
    list: Mutex<ClaimList>,
    waiters: Waiters,
}

/// The claims of a part while they are locked.
#[derive(Debug, Default)]
pub(crate) struct ClaimList {
    claims: Vec<Claim>,
    next: u64,
}

/// Claims that a part holds without asking for memory.
const CLAIMS_USUAL: usize = 8;
/// Number of parts, a power of two.
const PARTS: usize = 32;

#[derive(Debug)]
struct Claim {
    id: u64,
    start: u64,
    end: u64,
}

impl Claims {
    /// No claims; a slice maps `slice_bytes` guest bytes.
    pub(crate) fn new(slice_bytes: u64) -> Claims {
        Claims {
            slice_bytes,
            parts: (0..PARTS)
                .map(|_| {
                    let part = Part::default();
                    part.list.lock().claims.reserve(CLAIMS_USUAL);
                    part
                })
                .collect(),
        }
    }

    fn part(&self, guest: u64) -> &Part {
        &self.parts[(guest / self.slice_bytes) as usize % PARTS]
    }

    /// Where the slice ends that maps guest offset `guest`: as far as one lock reaches.
    pub(crate) fn end_of_slice(&self, guest: u64) -> u64 {
        (guest / self.slice_bytes + 1).saturating_mul(self.slice_bytes)
    }

    /// Locks the claims in the slice that maps `guest`; look at the maps and insert a claim under
    /// one lock.
    pub(crate) fn lock(&self, guest: u64) -> MutexGuard<'_, ClaimList> {
        self.part(guest).list.lock()
    }

    /// Marks the moment before the claims at `guest` were looked at.
    pub(crate) fn ticket(&self, guest: u64) -> Ticket {
        self.part(guest).waiters.ticket()
    }

    /// What to wait for: it is notified whenever a claim near `guest` is given up.
    pub(crate) fn waiters(&self, guest: u64) -> &Waiters {
        &self.part(guest).waiters
    }

    /// Gives up claim `id` at `guest`.
    pub(crate) fn remove(&self, guest: u64, id: u64) {
        let part = self.part(guest);
        {
            let mut list = part.list.lock();
            if let Some(at) = list.claims.iter().position(|claim| claim.id == id) {
                list.claims.swap_remove(at);
            }
        }
        part.waiters.notify();
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

    /// Claims guest bytes `start..end`, which no other claim touches; returns the claim's number.
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
