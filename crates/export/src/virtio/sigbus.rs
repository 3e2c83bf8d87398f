//! SIGBUS handling for guest memory truncated by the peer.
//!
//! Guest memory is a file that the client has too. When the client makes the file shorter, the kernel has
//! no page for what lies behind its new end, and a thread that touches that gets `SIGBUS`, which ends the
//! process with all its exports. So there is a handler: it puts zeroed memory of our own in the place of the
//! whole mapping, marks the mapping as truncated, and lets the thread go on. What the guest reads and
//! writes there is its own loss; its rings are given up at the next look.

use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Mappings that are looked after at once. Those of further clients are not.
const WATCHED_MAX: usize = 4096;

/// A mapping that the handler may replace.
struct Watched {
    /// A [`Watch`] has this place.
    taken: AtomicBool,
    /// Address of its first byte; 0 while it is none. Set last and cleared first.
    start: AtomicUsize,
    len: AtomicUsize,
    truncated: AtomicBool,
}

static WATCHED: [Watched; WATCHED_MAX] = [const {
    Watched {
        taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        truncated: AtomicBool::new(false),
    }
}; WATCHED_MAX];

/// Places behind this one were never taken.
static USED: AtomicUsize = AtomicUsize::new(0);

/// What was done about the signal before; `None` when there is no handler of ours.
static BEFORE: OnceLock<Option<Action>> = OnceLock::new();

struct Action(libc::sigaction);

// SAFETY: it is plain integers and the address of a function.
unsafe impl Send for Action {}
// SAFETY: as above.
unsafe impl Sync for Action {}

/// A mapping that is looked after until this is dropped, which has to be before it is unmapped.
#[derive(Debug)]
pub(super) struct Watch {
    place: Option<usize>,
}

impl Watch {
    /// Looks after the mapping of `len` bytes at `start`.
    pub(super) fn new(start: usize, len: usize) -> Watch {
        if BEFORE.get_or_init(install).is_none() {
            return Watch { place: None };
        }
        let take = |watched: &Watched| {
            let taken = &watched.taken;
            !taken.load(Ordering::Relaxed) && !taken.swap(true, Ordering::AcqRel)
        };
        let place = WATCHED.iter().position(take);
        if let Some(index) = place {
            let watched = &WATCHED[index];
            watched.truncated.store(false, Ordering::Relaxed);
            watched.len.store(len, Ordering::Relaxed);
            watched.start.store(start, Ordering::Release);
            USED.fetch_max(index + 1, Ordering::Release);
        }
        Watch { place }
    }

    /// Whether the peer has truncated the file, and a thread has touched what is gone.
    pub(super) fn is_truncated(&self) -> bool {
        self.place
            .is_some_and(|index| WATCHED[index].truncated.load(Ordering::Acquire))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(index) = self.place {
            WATCHED[index].start.store(0, Ordering::Release);
            WATCHED[index].taken.store(false, Ordering::Release);
        }
    }
}

fn install() -> Option<Action> {
    // SAFETY: `sigaction` is plain integers, for which zero is a value; the handler does no more than a
    // handler may.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut before: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = handle;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigemptyset(&raw mut action.sa_mask);
        let done = libc::sigaction(libc::SIGBUS, &raw const action, &raw mut before) == 0;
        done.then_some(Action(before))
    }
}

/// The handler: nothing but atomics and system calls.
extern "C" fn handle(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a `siginfo_t`, of a kind that has an address.
    let address = unsafe { (*info).si_addr() } as usize;
    // SAFETY: every thread has an `errno`.
    let errno = unsafe { *libc::__errno_location() };
    let used = USED.load(Ordering::Acquire);
    let found = WATCHED[..used].iter().any(|watched| {
        let start = watched.start.load(Ordering::Acquire);
        let len = watched.len.load(Ordering::Relaxed);
        // The place may have changed hands in between; that of this thread's memory does not.
        let same = watched.start.load(Ordering::Acquire) == start;
        let inside = start != 0 && same && (start..start + len).contains(&address);
        inside && replace(start, len) && {
            watched.truncated.store(true, Ordering::Release);
            true
        }
    });
    if !found && let Some(Some(before)) = BEFORE.get() {
        // Not guest memory: the instruction is run again, and then the action before decides.
        // SAFETY: the action is one that the kernel gave.
        unsafe { libc::sigaction(libc::SIGBUS, &raw const before.0, null_mut()) };
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn replace(start: usize, len: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let at = std::ptr::with_exposed_provenance_mut(start);
    // SAFETY: the range is a mapping of guest memory, which is only used byte by byte and may change at
    // any time as it is; its owner still has it, since a thread is just touching it.
    unsafe { libc::mmap(at, len, protection, flags, -1, 0) != libc::MAP_FAILED }
}
