//! `--pin`: a server whose memory stays, so that a block device it serves cannot wait for itself.

use gaur_engine::Image;
use gaur_reactor::pin::{self, LockError};
use parking_lot::Mutex;

use crate::failure::Failure;
use crate::notice::say;
use crate::size::human;

/// Whether the process is pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wish {
    /// Or fail.
    Always,
    /// Where the kernel's memory may depend on an export, as far as it is allowed.
    #[default]
    WhereNeeded,
    /// Not at all.
    Never,
}

/// What a server will export, as far as its command line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prospect {
    /// Block devices of this machine.
    Devices,
    /// What commands will ask for: block devices, maybe.
    Commands,
    /// No block device, ever.
    Neither,
}

/// What an image needs besides its caches, in bytes: payloads and lists of its queues.
const QUEUES_BYTES: u64 = 32 << 20;

/// The pinning of this process.
#[derive(Default)]
pub struct Pin {
    wish: Wish,
    real_time: bool,
    locked: Mutex<Option<bool>>,
}

impl Pin {
    /// By this wish; with threads that the kernel schedules before all ordinary ones, or fails, if they
    /// are to be `real_time`.
    pub fn new(wish: Wish, real_time: bool) -> Pin {
        Pin {
            wish,
            real_time,
            locked: Mutex::new(None),
        }
    }

    /// At the start of a server, before it has threads: a thread that is there already cannot be
    /// pinned, and they all share memory and what is locked in it.
    pub fn start(&self, prospect: Prospect) -> Result<(), Failure> {
        if self.real_time {
            pin::real_time().map_err(real_time_failure)?;
        }
        match (self.wish, prospect) {
            (Wish::Always, _) | (Wish::WhereNeeded, Prospect::Devices) => self.apply(),
            (Wish::WhereNeeded, Prospect::Commands) => {
                // It costs nothing as long as there is no device, and if it is refused the first
                // device says so.
                let _ = pin::io_flusher();
                Ok(())
            }
            (Wish::WhereNeeded, Prospect::Neither) | (Wish::Never, _) => Ok(()),
        }
    }

    /// Before an export of `image` is started by this thread; on those that are `devices` of this
    /// machine the kernel's memory may depend.
    pub fn before_export(&self, image: &Image, devices: bool) -> Result<(), Failure> {
        if self.wish == Wish::Never || (self.wish == Wish::WhereNeeded && !devices) {
            return Ok(());
        }
        self.apply()?;
        let locked = *self.locked.lock();
        if locked == Some(true) {
            pin::reserve(usize::try_from(needed_bytes(image)).unwrap_or(usize::MAX >> 1));
        }
        Ok(())
    }

    /// Whether memory is locked.
    pub fn is_locked(&self) -> bool {
        *self.locked.lock() == Some(true)
    }

    /// Pins the process, and the calling thread with those that it starts.
    fn apply(&self) -> Result<(), Failure> {
        let mut locked = self.locked.lock();
        let first = locked.is_none();
        let memory = match *locked {
            None => pin::lock_memory(),
            Some(_) => Ok(()),
        };
        let flusher = pin::io_flusher();
        if first {
            // The right to that is the one of the line before, which says when it is missing.
            let _ = pin::outlive_others();
        }
        locked.get_or_insert(memory.is_ok());
        drop(locked);
        let failures = [
            memory.err().map(memory_failure),
            flusher.err().map(flusher_failure),
        ];
        for failure in failures.into_iter().flatten() {
            if self.wish == Wish::Always {
                return Err(failure);
            }
            if first {
                say(format!("not pinned: {failure}"));
            }
        }
        Ok(())
    }
}

fn memory_failure(error: LockError) -> Failure {
    match error {
        LockError::Limit {
            limit_bytes,
            needed_bytes,
        } => {
            let (limit, needed) = (human(limit_bytes), human(needed_bytes));
            let message =
                format!("memory is not locked: the limit is {limit}, and {needed} are needed");
            Failure::new(message).hint("'ulimit -l unlimited' or LimitMEMLOCK=infinity raises it")
        }
        LockError::Refused(errno) => Failure::new(format!("memory is not locked: {errno}")),
    }
}

fn flusher_failure(errno: gaur_block::Errno) -> Failure {
    let failure = Failure::new(format!(
        "the kernel does not take it for a device's server: {errno}"
    ));
    failure.hint("that needs root, or CAP_SYS_RESOURCE")
}

fn real_time_failure(errno: gaur_block::Errno) -> Failure {
    let failure = Failure::new(format!("the kernel does not schedule it first: {errno}"));
    failure.hint("that needs root, CAP_SYS_NICE or a limit ('ulimit -r') above 0")
}

/// What an image's queues and caches may come to hold.
fn needed_bytes(image: &Image) -> u64 {
    let refcounts = image.refcount_cache().map_or(0, |cache| cache.budget_bytes);
    // A base that is shared was counted for the first image over it.
    let layers = image.layers();
    let own = match image.shares_base() {
        true => 1,
        false => layers.len(),
    };
    let tables = layers.iter().take(own).filter_map(|layer| {
        let cache = layer.l2_cache()?;
        // An eighth more than all its entries is as much as any image can use.
        let clusters = layer.size_bytes() >> CLUSTER_BITS_MIN_USUAL;
        let all = clusters.saturating_mul(ENTRY_BYTES_MAX);
        Some(cache.budget_bytes.min(all + (all >> 3) + CACHE_BYTES_MIN))
    });
    QUEUES_BYTES + refcounts.min(CACHE_BYTES_MIN) + tables.sum::<u64>()
}

/// Clusters are seldom smaller than 2^12 bytes; with smaller ones the budget decides.
const CLUSTER_BITS_MIN_USUAL: u32 = 12;
/// Bytes of an entry with subclusters.
const ENTRY_BYTES_MAX: u64 = 16;
/// What a cache has in any case.
const CACHE_BYTES_MIN: u64 = 8 << 20;
