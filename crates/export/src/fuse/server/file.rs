//! What the threads share of the file: who may do what with it, and when it was changed.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gaur_block::Errno;
use parking_lot::Mutex;

use crate::fuse::proto::{Attributes, Change, Moment};

/// Permissions of the file until a program changes them.
const MODE: u32 = 0o600;
const MODE_READ_ONLY: u32 = 0o400;
/// All permissions to write.
const MODE_WRITE: u32 = 0o222;
/// Good lengths of transfers, as programs are told; longer ones gain nothing.
const BLOCK_BYTES_MIN: u32 = 4096;
const BLOCK_BYTES_MAX: u32 = 1 << 20;

struct Times {
    accessed: Duration,
    modified: Duration,
    changed: Duration,
}

/// The file apart from its bytes.
pub(super) struct File {
    pub(super) read_only: bool,
    block_bytes: u32,
    mode: AtomicU32,
    uid: AtomicU32,
    gid: AtomicU32,
    times: Mutex<Times>,
    /// Written to since `times` were looked at.
    written: AtomicBool,
}

fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

impl File {
    pub(super) fn new(read_only: bool, preferred_block: u32) -> File {
        let now = now();
        let block_bytes = preferred_block.clamp(BLOCK_BYTES_MIN, BLOCK_BYTES_MAX);
        File {
            read_only,
            block_bytes: 1 << block_bytes.ilog2(),
            mode: AtomicU32::new(if read_only { MODE_READ_ONLY } else { MODE }),
            uid: AtomicU32::new(rustix::process::geteuid().as_raw()),
            gid: AtomicU32::new(rustix::process::getegid().as_raw()),
            times: Mutex::new(Times {
                accessed: now,
                modified: now,
                changed: now,
            }),
            written: AtomicBool::new(false),
        }
    }

    /// Notes that bytes were changed.
    pub(super) fn touch(&self) {
        // Most of the time it is set already, and a line that is only read stays where it is.
        if !self.written.load(Ordering::Relaxed) {
            self.written.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn attributes(&self, size_bytes: u64) -> Attributes {
        let mut times = self.times.lock();
        if self.written.swap(false, Ordering::Relaxed) {
            times.modified = now();
            times.changed = times.modified;
        }
        Attributes {
            size_bytes,
            allocated_bytes: allocated(size_bytes),
            mode: self.mode.load(Ordering::Relaxed),
            uid: self.uid.load(Ordering::Relaxed),
            gid: self.gid.load(Ordering::Relaxed),
            block_bytes: self.block_bytes,
            accessed: times.accessed,
            modified: times.modified,
            changed: times.changed,
        }
    }

    /// Whether [`File::change`] would be refused; for changes that begin with another one.
    pub(super) fn check(&self, change: &Change) -> Result<(), Errno> {
        match change.mode {
            Some(mode) if mode & !0o777 != 0 => Err(Errno::EINVAL),
            Some(mode) if self.read_only && mode & MODE_WRITE != 0 => Err(Errno::EROFS),
            _ => Ok(()),
        }
    }

    /// Changes everything but the size. The kernel has checked who asks.
    pub(super) fn change(&self, change: &Change) -> Result<(), Errno> {
        self.check(change)?;
        for (field, value) in [
            (&self.mode, change.mode),
            (&self.uid, change.uid),
            (&self.gid, change.gid),
        ] {
            if let Some(value) = value {
                field.store(value, Ordering::Relaxed);
            }
        }
        let mut times = self.times.lock();
        let at = |moment| match moment {
            Moment::Now => now(),
            Moment::At(time) => time,
        };
        if let Some(moment) = change.accessed {
            times.accessed = at(moment);
        }
        if let Some(moment) = change.modified {
            self.written.store(false, Ordering::Relaxed);
            times.modified = at(moment);
        }
        times.changed = now();
        Ok(())
    }
}

/// The space a file is said to take. What it takes depends on much more than the disk, and programs
/// ask only whether it may have holes: then they look for them. So it is said to have one, but never
/// to be nothing but a hole, which would keep some from looking at all.
fn allocated(size_bytes: u64) -> u64 {
    const BLOCK_BYTES: u64 = 512;
    match size_bytes.div_ceil(BLOCK_BYTES) {
        0 => 0,
        blocks => (blocks - 1).max(1) * BLOCK_BYTES,
    }
}
