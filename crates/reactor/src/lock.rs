//! The locks by which QEMU keeps two programs from writing one image.
//!
//! They are byte-range locks of the open file description (`F_OFD_SETLK`, `fcntl(2)`), so that
//! duplicates of a descriptor share them. They go with the last `OpenFile`. A program shows what it
//! does with an image by read locks on single bytes: byte 100 + n for each permission n it uses,
//! byte 200 + n for each it does not share. After taking its own it looks, by `F_OFD_GETLK` as if
//! for a write lock, whether locks of another process contradict them: two that start at once both see the
//! other, and both give up. The numbers are those of QEMU's `file-posix` driver (2.10 and later).
//!
//! The bytes are locked, never written; an image may be shorter.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use gaur_block::{Access, Errno, OpenError};

use crate::open::refused;
use crate::syscall;

/// First byte of those that say what is in use.
const USED_BASE: i64 = 100;
/// First byte of those that say what is not shared.
const UNSHARED_BASE: i64 = 200;

/// A permission, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Permission {
    bit: i64,
    name: &'static str,
}

const CONSISTENT_READ: Permission = Permission {
    bit: 0,
    name: "consistent read",
};
const WRITE: Permission = Permission {
    bit: 1,
    name: "write",
};
const RESIZE: Permission = Permission {
    bit: 3,
    name: "resize",
};

const USED_BY_WRITER: &[Permission] = &[CONSISTENT_READ, WRITE, RESIZE];
const USED_BY_READER: &[Permission] = &[CONSISTENT_READ];
const UNSHARED: &[Permission] = &[WRITE, RESIZE];

/// How long locks are waited for. The kernel takes the ring of a process that was killed apart in its own time; until
/// then requests may be on their way, and the locks are held.
const LINGER: Duration = Duration::from_millis(250);
const PAUSE: Duration = Duration::from_millis(5);

/// Takes the locks for `access`, and checks that no other process holds one that contradicts them. They last as long
/// as the open file description.
pub(crate) fn acquire(fd: BorrowedFd<'_>, access: Access) -> Result<(), OpenError> {
    let start = Instant::now();
    let mut outcome = try_acquire(fd, access);
    while matches!(&outcome, Err(error) if error.errno == Errno::EAGAIN) && start.elapsed() < LINGER
    {
        // Others that try meanwhile do not see this one, which only looks.
        release(fd);
        std::thread::sleep(PAUSE);
        if contradiction(fd, access).map_err(cannot_lock)?.is_none() {
            outcome = try_acquire(fd, access);
        }
    }
    outcome
}

/// What an access uses, and what it does not share.
fn permissions(access: Access) -> (&'static [Permission], &'static [Permission]) {
    let used = if access.write {
        USED_BY_WRITER
    } else {
        USED_BY_READER
    };
    let unshared = if access.force_share && !access.write {
        &[]
    } else {
        UNSHARED
    };
    (used, unshared)
}

fn try_acquire(fd: BorrowedFd<'_>, access: Access) -> Result<(), OpenError> {
    let (used, unshared) = permissions(access);
    for permission in used {
        take(fd, USED_BASE + permission.bit).map_err(cannot_lock)?;
    }
    for permission in unshared {
        take(fd, UNSHARED_BASE + permission.bit).map_err(cannot_lock)?;
    }
    match contradiction(fd, access).map_err(cannot_lock)? {
        None => Ok(()),
        Some(permission) => Err(conflict(access, permission)),
    }
}

/// Which permission another process does not leave for the access.
fn contradiction(fd: BorrowedFd<'_>, access: Access) -> Result<Option<Permission>, Errno> {
    let (used, unshared) = permissions(access);
    let used = used.iter().map(|one| (one, UNSHARED_BASE));
    let unshared = unshared.iter().map(|one| (one, USED_BASE));
    for (permission, base) in used.chain(unshared) {
        if held_by_other(fd, base + permission.bit)? {
            return Ok(Some(*permission));
        }
    }
    Ok(None)
}

/// Gives every lock back, now. Closing the descriptor would too, but a ring that is being taken down
/// keeps its registered files open a little longer than the process that made it.
pub(crate) fn release(fd: BorrowedFd<'_>) {
    let mut lock = byte(libc::F_UNLCK, USED_BASE);
    lock.l_len = UNSHARED_BASE + 100 - USED_BASE;
    // Giving back locks that are not held changes nothing.
    let _ = call(fd, libc::F_OFD_SETLK, &mut lock);
}

/// One byte's lock, as `fcntl` takes it.
fn byte(kind: libc::c_int, at: i64) -> libc::flock {
    // SAFETY: `flock` is plain integers, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = at as libc::off_t;
    lock.l_len = 1;
    lock
}

/// Makes a call about a lock, which may change it.
fn call(fd: BorrowedFd<'_>, command: libc::c_int, lock: &mut libc::flock) -> Result<(), Errno> {
    // SAFETY: the commands used here read and write one `flock`.
    match unsafe { libc::fcntl(fd.as_raw_fd(), command, std::ptr::from_mut(lock)) } {
        0 => Ok(()),
        _ => Err(syscall::last_errno()),
    }
}

fn take(fd: BorrowedFd<'_>, at: i64) -> Result<(), Errno> {
    call(fd, libc::F_OFD_SETLK, &mut byte(libc::F_RDLCK, at))
}

/// Takes a lock of this open file on a range of bytes, or gives it back: `EAGAIN` when another has one there.
pub(crate) fn claim(fd: BorrowedFd<'_>, kind: libc::c_int, bytes: Range<u64>) -> Result<(), Errno> {
    let invalid = |_| Errno::EINVAL;
    let start = i64::try_from(bytes.start).map_err(invalid)?;
    let len = i64::try_from(bytes.end - bytes.start).map_err(invalid)?;
    let mut lock = byte(kind, start);
    lock.l_len = len as libc::off_t;
    call(fd, libc::F_OFD_SETLK, &mut lock)
}

fn held_by_other(fd: BorrowedFd<'_>, at: i64) -> Result<bool, Errno> {
    let mut lock = byte(libc::F_WRLCK, at);
    call(fd, libc::F_OFD_GETLK, &mut lock)?;
    Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK)
}

fn conflict(access: Access, permission: Permission) -> OpenError {
    let hint = if access.write {
        "is another program using the image?"
    } else {
        "another program is writing to the image"
    };
    let reason = format!("cannot get the \"{}\" lock; {hint}", permission.name);
    refused(Errno::EAGAIN, reason)
}

fn cannot_lock(errno: Errno) -> OpenError {
    // A write lock of another kind than QEMU's lies in the way.
    if errno == Errno::EAGAIN || errno == Errno::EACCES {
        let reason = "the file is locked; is another program using the image?";
        return refused(Errno::EAGAIN, reason);
    }
    let reason = format!("cannot lock the file ({errno}); does its file system support locks?");
    refused(errno, reason)
}
