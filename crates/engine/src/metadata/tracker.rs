//! Dirty tracking of the active mapping while a switch copies it: which entries changed since then.
//!
//! The switch begins to watch, and then looks at tables: in the cache first, and on the disk for what is not
//! there, which is at least as new as the moment of the look at the cache. What changed before that is in what
//! it saw, and what changes later is noted here. A change is noted after it was made, under no lock of
//! the cache; the cache's locks order it. If the look came before the change, then the change
//! sees that it is watched.

use std::collections::BTreeSet;

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};

/// The notes.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    on: AtomicBool,
    changed: Mutex<Changed>,
}

/// What has changed.
#[derive(Debug, Default)]
pub(crate) struct Changed {
    /// L1 entries.
    pub(crate) tables: BTreeSet<u64>,
    /// Slices of L2 tables, by guest offset divided by the guest bytes that a slice maps.
    pub(crate) slices: BTreeSet<u64>,
}

impl Tracker {
    /// Begins with nothing changed, or ends.
    pub(crate) fn watch(&self, on: bool) {
        let mut changed = self.changed.lock();
        *changed = Changed::default();
        self.on.store(on, Ordering::SeqCst);
    }

    /// Entry `index` of the L1 table was changed.
    pub(crate) fn table(&self, index: u64) {
        if self.on.load(Ordering::SeqCst) {
            self.changed.lock().tables.insert(index);
        }
    }

    /// The entry of guest offset `guest` was changed; a slice maps `slice_bytes`.
    #[inline]
    pub(crate) fn slice(&self, guest: u64, slice_bytes: u64) {
        if self.on.load(Ordering::SeqCst) {
            self.changed.lock().slices.insert(guest / slice_bytes);
        }
    }

    /// What changed since the last call.
    pub(crate) fn take(&self) -> Changed {
        std::mem::take(&mut *self.changed.lock())
    }
}
