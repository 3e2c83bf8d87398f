//! One io_uring, used by one thread: submission, completion, registered files and buffers.
//!
//! Entries pile up in the submission queue during a turn of the reactor and go to the kernel in one
//! call at its end. The kernel runs its completion work only inside that call where it can
//! (`DEFER_TASKRUN`), so it never interrupts the thread.
//!
//! Operations are slots of a slab that grows to the most that were ever in flight and then stays:
//! an operation allocates nothing. A slot is free again when its completion has been taken, so a
//! completion never meets a slot that another operation has by now.
//!
//! Registration is an improvement, never a need: where the kernel refuses (no privilege to pin
//! memory, an old kernel), plain descriptors and plain memory do the same.

use std::cell::{Cell, RefCell};
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::task::Waker;
use std::time::Duration;

use gaur_block::Errno;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use slab::Slab;

use crate::memory::Chunk;
use crate::syscall;

/// Places for files in the ring's table; a file without one uses its plain descriptor.
const FILE_SLOTS: u32 = 1024;

/// Places for chunks of the buffer pool, at the start of the ring's table of buffers.
pub(crate) const POOL_SLOTS: usize = 16;

/// Places for all buffers: those of the pool, and others that an export registers (ublk).
const BUFFER_SLOTS: u32 = 1024;

/// The first number of a buffer that an export may have the kernel register with the ring of its
/// thread; the numbers before it are the reactor's own.
pub const EXPORT_BUFFER_FIRST: u16 = POOL_SLOTS as u16;

/// How many such numbers there are.
pub const EXPORT_BUFFERS: u16 = BUFFER_SLOTS as u16 - EXPORT_BUFFER_FIRST;

/// Most kernel threads that a ring's operations on anything but files and disks may block in. None
/// has to; a peer that sends byte by byte would otherwise get one for each of its connections.
const SOCKET_WORKERS: u32 = 4;

/// Completions taken at a time.
const REAP_BATCH: usize = 64;

/// Completions of these numbers belong to no slot.
const CANCEL: u64 = u64::MAX;
const EVENT: u64 = u64::MAX - 1;

enum Slot {
    Waiting(Option<Waker>),
    Done(i32),
}

/// A ring.
pub(crate) struct Ring {
    uring: RefCell<IoUring>,
    slab: RefCell<Slab<Slot>>,
    vacant_files: RefCell<Vec<u32>>,
    chunks: RefCell<Vec<Chunk>>,
    has_buffer_table: bool,
    /// The kernel knows `IORING_OP_FTRUNCATE`.
    has_ftruncate: bool,
    /// The inbox's event is being watched.
    event_armed: Cell<bool>,
    /// The kernel writes to the inbox's event when there are completions.
    signals: Cell<bool>,
}

impl Ring {
    /// A ring with room for `entries` submissions in a turn (rounded up to a power of two).
    pub(crate) fn new(entries: u32) -> Result<Ring, Errno> {
        let uring = build(entries)?;
        let submitter = uring.submitter();
        let files = if submitter.register_files_sparse(FILE_SLOTS).is_ok() {
            FILE_SLOTS
        } else {
            0
        };
        let has_buffer_table = submitter.register_buffers_sparse(BUFFER_SLOTS).is_ok();
        // 0 leaves the number for files as it is. Linux before 5.15 has no limit.
        let _ = submitter.register_iowq_max_workers(&mut [0, SOCKET_WORKERS]);
        let mut probe = io_uring::Probe::new();
        let probed = submitter.register_probe(&mut probe).is_ok();
        let has_ftruncate = probed && probe.is_supported(opcode::Ftruncate::CODE);
        Ok(Ring {
            uring: RefCell::new(uring),
            slab: RefCell::default(),
            vacant_files: RefCell::new((0..files).rev().collect()),
            chunks: RefCell::default(),
            has_buffer_table,
            has_ftruncate,
            event_armed: Cell::new(false),
            signals: Cell::new(false),
        })
    }

    pub(crate) fn has_ftruncate(&self) -> bool {
        self.has_ftruncate
    }

    /// Gives a file a place in the ring's table; `None` when there is none left.
    pub(crate) fn register_file(&self, fd: RawFd) -> Option<u32> {
        let slot = self.vacant_files.borrow_mut().pop()?;
        let uring = self.uring.borrow();
        match uring.submitter().register_files_update(slot, &[fd]) {
            Ok(_) => Some(slot),
            Err(_) => {
                self.vacant_files.borrow_mut().push(slot);
                None
            }
        }
    }

    /// Takes the place back; no operation on it may be in flight.
    pub(crate) fn unregister_file(&self, slot: u32) {
        let uring = self.uring.borrow();
        // The kernel refuses nothing about an entry that was accepted before; should it do so, the
        // place is lost and nothing else.
        if uring.submitter().register_files_update(slot, &[-1]).is_ok() {
            self.vacant_files.borrow_mut().push(slot);
        }
    }

    /// Registers chunk `index` of the pool as the buffer of that number, if the kernel allows: where
    /// it does not, the chunk is memory like any other.
    pub(crate) fn register_chunk(&self, index: usize, chunk: Chunk) {
        let buffer = [libc::iovec {
            iov_base: chunk.start.as_ptr().cast(),
            iov_len: chunk.len_bytes,
        }];
        let uring = self.uring.borrow();
        // SAFETY: the chunk is memory of the pool, which the reactor keeps until the ring is gone.
        let result = unsafe {
            uring
                .submitter()
                .register_buffers_update(index as u32, &buffer, None)
        };
        let registered = self.has_buffer_table && index < POOL_SLOTS && result.is_ok();
        let mut chunks = self.chunks.borrow_mut();
        assert!(index <= chunks.len(), "the pool's chunks come in order");
        // One without length holds no memory.
        let len_bytes = if registered { chunk.len_bytes } else { 0 };
        let chunk = Chunk { len_bytes, ..chunk };
        match chunks.get_mut(index) {
            Some(place) => *place = chunk,
            None => chunks.push(chunk),
        }
    }

    /// Takes the registration of a chunk back, of which nothing is in use; `false` when the kernel
    /// still knows it.
    pub(crate) fn unregister_chunk(&self, index: usize) -> bool {
        let mut chunks = self.chunks.borrow_mut();
        let Some(chunk) = chunks.get_mut(index).filter(|chunk| chunk.len_bytes > 0) else {
            return true;
        };
        let nothing = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }];
        let uring = self.uring.borrow();
        let submitter = uring.submitter();
        // SAFETY: an empty entry holds no memory.
        let result = unsafe { submitter.register_buffers_update(index as u32, &nothing, None) };
        if result.is_ok() {
            chunk.len_bytes = 0;
        }
        result.is_ok()
    }

    /// The number of the registered buffer that holds all of this memory.
    pub(crate) fn buffer_of(&self, start: *const u8, len_bytes: usize) -> Option<u16> {
        let start = start as usize;
        let chunks = self.chunks.borrow();
        let holds = |chunk: &Chunk| {
            let offset = start.wrapping_sub(chunk.start.as_ptr() as usize);
            offset < chunk.len_bytes && len_bytes <= chunk.len_bytes - offset
        };
        chunks.iter().position(holds).map(|index| index as u16)
    }

    /// Where a registered buffer starts as the kernel counts: an address for memory of ours, 0 for
    /// a buffer that only the kernel sees.
    pub(crate) fn buffer_base(&self, index: u16) -> (u64, Option<u64>) {
        match self.chunks.borrow().get(usize::from(index)) {
            Some(chunk) => (chunk.start.as_ptr() as u64, Some(chunk.len_bytes as u64)),
            None => (0, None),
        }
    }

    /// Starts an operation and returns its slot.
    ///
    /// # Safety
    /// What the entry points to stays valid until [`Ring::take`] returns the slot's result.
    pub(crate) unsafe fn start(&self, entry: squeue::Entry, waker: Waker) -> u32 {
        let slot = self.slab.borrow_mut().insert(Slot::Waiting(Some(waker))) as u32;
        // SAFETY: the caller's promise.
        unsafe { self.push(&entry.user_data(u64::from(slot))) };
        slot
    }

    /// The result of the operation in `slot`, which is vacant afterwards; `None` while it is in
    /// flight, and `waker` will be woken.
    pub(crate) fn take(&self, slot: u32, waker: &Waker) -> Option<i32> {
        let mut slab = self.slab.borrow_mut();
        match &mut slab[slot as usize] {
            Slot::Done(result) => {
                let result = *result;
                slab.remove(slot as usize);
                Some(result)
            }
            Slot::Waiting(Some(old)) if old.will_wake(waker) => None,
            Slot::Waiting(old) => {
                let replaced = old.replace(waker.clone());
                // Dropping a waker may run code that comes back here.
                drop(slab);
                drop(replaced);
                None
            }
        }
    }

    /// Asks the kernel to give an operation up, and waits until it has let go of it.
    pub(crate) fn cancel(&self, slot: u32) -> i32 {
        let noop = Waker::noop();
        if let Some(result) = self.take(slot, noop) {
            return result;
        }
        let entry = opcode::AsyncCancel::new(u64::from(slot))
            .build()
            .user_data(CANCEL);
        // SAFETY: the entry points to nothing.
        unsafe { self.push(&entry) };
        loop {
            self.enter(1, None);
            self.reap();
            if let Some(result) = self.take(slot, noop) {
                return result;
            }
        }
    }

    /// # Safety
    /// What the entry points to stays valid until its completion has been taken.
    unsafe fn push(&self, entry: &squeue::Entry) {
        loop {
            {
                let mut uring = self.uring.borrow_mut();
                // SAFETY: the caller's promise.
                if unsafe { uring.submission().push(entry) }.is_ok() {
                    return;
                }
            }
            self.enter(0, None);
            // The kernel takes no more while completions that were not taken pile up.
            self.reap();
        }
    }

    /// Watches the inbox's event: a completion comes when another thread writes it.
    pub(crate) fn arm_event(&self, fd: RawFd) {
        if self.event_armed.replace(true) {
            return;
        }
        let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).build();
        // SAFETY: the entry points to nothing.
        unsafe { self.push(&entry.user_data(EVENT)) };
    }

    /// Has the kernel write to `event` when there are completions, or no longer; `false` when it refuses.
    pub(crate) fn signal(&self, event: Option<RawFd>) -> bool {
        if self.signals.get() == event.is_some() {
            return true;
        }
        let uring = self.uring.borrow();
        let changed = match event {
            Some(event) => uring.submitter().register_eventfd(event),
            None => uring.submitter().unregister_eventfd(),
        };
        if changed.is_ok() {
            self.signals.set(event.is_some());
        }
        changed.is_ok()
    }

    /// Whether the kernel writes to an event when there are completions.
    pub(crate) fn signals(&self) -> bool {
        self.signals.get()
    }

    /// Whether there are no completions and there is no reason to enter the kernel.
    pub(crate) fn is_idle(&self) -> bool {
        !self.needs_enter() && self.uring.borrow_mut().completion().is_empty()
    }

    /// Whether there is something to tell the kernel, or something it wants to do.
    pub(crate) fn needs_enter(&self) -> bool {
        let mut uring = self.uring.borrow_mut();
        let submission = uring.submission();
        !submission.is_empty() || submission.taskrun() || submission.cq_overflow()
    }

    /// Hands everything over and waits for `want` completions, or until `timeout`.
    pub(crate) fn enter(&self, want: usize, timeout: Option<Duration>) {
        let uring = self.uring.borrow();
        let submitter = uring.submitter();
        // Errors need no answer: EINTR, EBUSY and EAGAIN mean to take completions and come again,
        // as the caller does; ETIME is the timeout.
        let _ = match timeout {
            None => submitter.submit_and_wait(want),
            Some(timeout) => {
                let time = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&time);
                submitter.submit_with_args(want, &args)
            }
        };
    }

    /// Takes all completions and wakes the tasks that wait for them; `true` if the inbox's event was
    /// among them.
    pub(crate) fn reap(&self) -> bool {
        let mut event = false;
        loop {
            let mut space = [const { MaybeUninit::<cqueue::Entry>::uninit() }; REAP_BATCH];
            let mut uring = self.uring.borrow_mut();
            let entries = uring.completion().fill(&mut space);
            drop(uring);
            let count = entries.len();
            for entry in entries {
                match entry.user_data() {
                    CANCEL => {}
                    EVENT => {
                        self.event_armed.set(false);
                        event = true;
                    }
                    slot => self.complete(slot, entry.result()),
                }
            }
            if count < REAP_BATCH {
                return event;
            }
        }
    }

    fn complete(&self, slot: u64, result: i32) {
        let waker = {
            let mut slab = self.slab.borrow_mut();
            let slot = &mut slab[slot as usize];
            match std::mem::replace(slot, Slot::Done(result)) {
                Slot::Waiting(waker) => waker,
                Slot::Done(_) => unreachable!("an operation completes once"),
            }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The best ring that this kernel makes.
fn build(entries: u32) -> Result<IoUring, Errno> {
    let completions = entries.saturating_mul(4);
    let attempts: [fn(&mut io_uring::Builder); 3] = [
        // Linux 6.1
        |builder| {
            builder
                .setup_single_issuer()
                .setup_defer_taskrun()
                .setup_taskrun_flag();
            builder.setup_submit_all();
        },
        // Linux 5.19
        |builder| {
            builder
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all();
        },
        |_| {},
    ];
    let mut last = Errno::EINVAL;
    for configure in attempts {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp().setup_cqsize(completions);
        configure(&mut builder);
        match builder.build(entries) {
            // Both came with Linux 5.11; without them completions could be lost.
            Ok(uring)
                if uring.params().is_feature_nodrop() && uring.params().is_feature_ext_arg() =>
            {
                return Ok(uring);
            }
            Ok(_) => return Err(Errno::from_raw(libc::ENOSYS)),
            Err(error) => last = syscall::errno_of(&error),
        }
        if last != Errno::EINVAL {
            break;
        }
    }
    Err(last)
}

/// Why there is no io_uring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unavailable {
    /// What the kernel said.
    pub errno: Errno,
}

impl std::fmt::Display for Unavailable {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let why = match self.errno.raw() {
            libc::ENOSYS => "this kernel is too old or built without it",
            libc::EPERM | libc::EACCES => "kernel.io_uring_disabled or a seccomp filter forbids it",
            libc::ENOMEM => "not enough memory may be locked (ulimit -l)",
            _ => return write!(out, "io_uring is not available here ({})", self.errno),
        };
        write!(out, "io_uring is not available here: {why}")
    }
}

impl std::error::Error for Unavailable {}

/// Whether io_uring works for this process, found out by making a small ring.
pub fn available() -> Result<(), Unavailable> {
    Ring::new(8)
        .map(drop)
        .map_err(|errno| Unavailable { errno })
}
