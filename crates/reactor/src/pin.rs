//! Keeping a process in memory, for servers of block devices.
//!
//! When memory is short the kernel writes to block devices to get some. A server of such a device that
//! needs memory itself to serve these writes would wait for its own work. Three things keep it from
//! that: its pages are never taken away ([`lock_memory`]); it has what it will need before it serves
//! ([`reserve`]); and where it asks the kernel for more all the same, the kernel gets it without any
//! input or output ([`io_flusher`]).

use gaur_block::Errno;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, Rlimit, configure_io_flusher_behavior, getrlimit, setrlimit};

use crate::syscall::{self, again};

/// Without the right to lock any amount, the limit must leave this much room, in bytes: what is taken
/// after the memory was locked counts too, and would fail at the limit.
const ROOM_BYTES: u64 = 256 << 20;

/// `CAP_IPC_LOCK`, by which the limit does not count.
const CAPABILITY_IPC_LOCK: u32 = 14;

/// Why memory is not locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockError {
    /// The limit of locked memory (`ulimit -l`) is too low for this process.
    Limit {
        /// The limit in bytes.
        limit_bytes: u64,
        /// What it would have to be.
        needed_bytes: u64,
    },
    /// The kernel refused.
    Refused(Errno),
}

/// Locks all memory of the process, that which it has and that which it will get. The limit of locked
/// memory is raised first as far as it may be.
///
/// # Errors
/// When it would not hold for long, or the kernel refuses; nothing is locked then.
pub fn lock_memory() -> Result<(), LockError> {
    let limit_bytes = raise(Resource::Memlock);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let needed_bytes = size_bytes(&status).saturating_add(ROOM_BYTES);
    if limit_bytes < needed_bytes && !has_capability(&status, CAPABILITY_IPC_LOCK) {
        return Err(LockError::Limit {
            limit_bytes,
            needed_bytes,
        });
    }
    keep_heap();
    again(|| mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE)).map_err(LockError::Refused)
}

/// Tells the kernel that the calling thread does the input and output of a block device. Threads that it
/// starts afterwards do, too.
///
/// # Errors
/// What the kernel says: `EPERM` without `CAP_SYS_RESOURCE`.
pub fn io_flusher() -> Result<(), Errno> {
    again(|| configure_io_flusher_behavior(true))
}

/// Schedules the calling thread before all ordinary ones (`SCHED_RR` at its lowest priority), and threads
/// that it starts afterwards. A device that the kernel swaps to needs what comes with it: when no memory
/// is free but a reserve, the kernel gives of that to such threads. Others wait for memory then,
/// and an [`io_flusher`] waits for ever when there is none without input and output.
///
/// # Errors
/// What the kernel says: `EPERM` without `CAP_SYS_NICE` and a limit (`RLIMIT_RTPRIO`) of 0.
pub fn real_time() -> Result<(), Errno> {
    // The system call itself: musl's function of that name always fails. The kernel's `sched_param` is
    // one number.
    let lowest: libc::c_int = 1;
    // SAFETY: the pointer is to parameters that outlive the call.
    let set = unsafe {
        libc::syscall(
            libc::SYS_sched_setscheduler,
            0,
            libc::SCHED_RR,
            &raw const lowest,
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(syscall::last_errno()),
    }
}

/// Has the kernel end other processes when it runs out of memory: this one looks large, and the memory
/// that others want back is what it writes. Returns whether that was allowed.
pub fn outlive_others() -> bool {
    std::fs::write("/proc/self/oom_score_adj", "-1000").is_ok()
}

/// Takes `len_bytes` from the kernel now, for what the process will allocate later. Effective after
/// [`lock_memory`], with which freed memory stays in the process.
pub fn reserve(len_bytes: usize) {
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    let mut left = len_bytes;
    // In pieces that the allocator takes from the heap, where they grow together when they are freed.
    while left > 0 {
        let piece = left.min(PIECE_BYTES);
        // Not zero, so that every page is written.
        pieces.push(vec![1; piece]);
        left -= piece;
    }
    std::hint::black_box(&pieces);
}

const PIECE_BYTES: usize = 1 << 20;

/// Raises the limit of open files of this process as far as it may be, and returns it.
pub fn raise_file_limit() -> u64 {
    raise(Resource::Nofile)
}

/// Raises a limit to the most this process may have; returns what it is then.
fn raise(resource: Resource) -> u64 {
    let limit = getrlimit(resource);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let now = match limit.current == limit.maximum || setrlimit(resource, raised).is_err() {
        true => limit.current,
        false => limit.maximum,
    };
    // None is for no limit.
    now.unwrap_or(u64::MAX)
}

/// Has the allocator keep what was freed, in one heap for all threads: memory that went back to the
/// kernel would have to be asked for again.
fn keep_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: these set numbers of the allocator and touch no memory that it handed out.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
    }
}

/// Size of the process in bytes, by `/proc/self/status`.
fn size_bytes(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    let kib: u64 = number.and_then(|text| text.parse().ok()).unwrap_or(0);
    kib << 10
}

/// Whether the process has a capability, by `/proc/self/status`.
fn has_capability(status: &str, number: u32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or(0) >> number & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tgaur\nVmSize:\t   12345 kB\nCapEff:\t0000000000004000\n";

    #[test]
    fn what_the_kernel_says_of_a_process_is_read() {
        assert_eq!(size_bytes(STATUS), 12345 << 10);
        assert!(has_capability(STATUS, CAPABILITY_IPC_LOCK));
        assert!(!has_capability(STATUS, CAPABILITY_IPC_LOCK + 1));
        assert_eq!(size_bytes(""), 0);
        assert!(!has_capability("", CAPABILITY_IPC_LOCK));
    }

    #[test]
    fn the_limit_of_files_is_raised_to_the_most_there_may_be() {
        let raised = raise_file_limit();
        assert_eq!(raise_file_limit(), raised);
    }
}
