//! Giving memory back that was not used for a while.
//!
//! Pools keep what they have handed out once, so that steady traffic allocates nothing. A process with
//! a clock calls [`trim_memory`] from time to time; each reactor then lets its pools drop what they
//! had no use for since the last call. Nothing of this is on the way of a request.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::context;
use crate::inbox::{Inbox, Message};

/// The reactors of the process.
static REACTORS: Mutex<Vec<Listed>> = Mutex::new(Vec::new());

/// The allocator may have free pages.
static FREED: AtomicBool = AtomicBool::new(false);

struct Listed {
    inbox: Weak<Inbox>,
    /// It has been asked and did not get round to it yet.
    asked: Arc<AtomicBool>,
}

pub(crate) fn list(inbox: &Arc<Inbox>) {
    let mut reactors = REACTORS.lock();
    reactors.retain(|listed| listed.inbox.strong_count() > 0);
    reactors.push(Listed {
        inbox: Arc::downgrade(inbox),
        asked: Arc::default(),
    });
}

/// Has every reactor of the process give back what its pools had no use for since the last call.
pub fn trim_memory() {
    let reactors = REACTORS.lock();
    for Listed { inbox, asked } in reactors.iter() {
        let Some(inbox) = inbox.upgrade() else {
            continue;
        };
        if asked.swap(true, Ordering::AcqRel) {
            continue;
        }
        let asked = Arc::clone(asked);
        let trim = move || {
            asked.store(false, Ordering::Release);
            context::current().trim();
        };
        // One that has ended has nothing to give.
        let _ = inbox.send(Message::Run(Box::new(trim)));
    }
}

/// Has `trim` called on this thread with every [`trim_memory`], until it returns `false`. Without a
/// reactor it is not.
pub fn keep_trimmed(trim: impl Fn() -> bool + 'static) {
    if let Some(core) = context::find() {
        core.keep_trimmed(Box::new(trim));
    }
}

/// Much memory was freed just now: [`trim_heap`] is worth its while.
pub fn freed_memory() {
    FREED.store(true, Ordering::Release);
}

/// Gives free pages of the allocator back to the system if [`freed_memory`] was called.
pub fn trim_heap() {
    if FREED.swap(false, Ordering::AcqRel) {
        #[cfg(target_env = "gnu")]
        // SAFETY: it takes no memory, and the allocator's own locks guard what it does.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}
