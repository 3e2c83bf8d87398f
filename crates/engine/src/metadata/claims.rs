//! Range locks: guest ranges whose mapping is about to change.
//!
//! A write that needs a new mapping claims the range it will map before it does any input or
//! output, and gives the claim up after it has committed or aborted. Every other request that wants to
//! change a mapping in that range waits. Reads, and writes in place, do not look here: they go by
//! the mapping that is committed. But in a data file a cluster comes back to the place that it had, so writes in place
//! are noted there, and a mapping is not given up before they are over: they would land on what comes next.
//!
//! Lock order: claims, then maps, then alloc.

use crate::range::GuestRange;
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
    claims: Vec<Held>,
    next: u64,
}

/// Claims that a part holds without asking for memory.
const CLAIMS_USUAL: usize = 8;
/// Number of parts, a power of two.
const PARTS: usize = 32;

/// A claim in its list.
#[derive(Debug)]
struct Held {
    id: u64,
    range: GuestRange,
    /// A write in place, which many may have at once.
    in_place: bool,
}

/// A claimed guest range; given up when dropped.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    part: &'a Part,
    id: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        {
            let held = &mut self.part.list.lock().claims;
            if let Some(at) = held.iter().position(|held| held.id == self.id) {
                held.swap_remove(at);
            }
        }
        self.part.waiters.notify();
    }
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

    /// The part of a range that is mapped by the same slice as its start: as far as one lock reaches.
    pub(crate) fn within_slice(&self, range: GuestRange) -> GuestRange {
        range.first(self.slice_bytes - range.start % self.slice_bytes)
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

    /// Claims a range that no other claim touches, under the lock of `list`.
    pub(crate) fn claim(&self, list: &mut ClaimList, range: GuestRange) -> Claim<'_> {
        debug_assert_eq!(list.free_prefix(range), range, "a range is claimed once");
        self.hold(list, range, false)
    }

    /// Notes a write in place, under the lock of `list`.
    pub(crate) fn note_in_place(&self, list: &mut ClaimList, range: GuestRange) -> Claim<'_> {
        self.hold(list, range, true)
    }

    fn hold(&self, list: &mut ClaimList, range: GuestRange, in_place: bool) -> Claim<'_> {
        list.next += 1;
        let id = list.next;
        list.claims.push(Held {
            id,
            range,
            in_place,
        });
        let part = self.part(range.start);
        Claim { part, id }
    }
}

impl ClaimList {
    /// The prefix of a guest range that no claim touches.
    pub(crate) fn free_prefix(&self, range: GuestRange) -> GuestRange {
        self.prefix(range, |held| !held.in_place)
    }

    /// The prefix of a guest range that no claim touches, and no write in place that is noted.
    pub(crate) fn quiet_prefix(&self, range: GuestRange) -> GuestRange {
        self.prefix(range, |_| true)
    }

    fn prefix(&self, range: GuestRange, counts: impl Fn(&Held) -> bool) -> GuestRange {
        let touching = self.claims.iter().filter(|held| held.range.overlaps(range));
        let first = touching.filter(|held| counts(held));
        let first = first.map(|held| held.range.start).min();
        let end = first.unwrap_or(range.end()).clamp(range.start, range.end());
        GuestRange::between(range.start, end)
    }
}
