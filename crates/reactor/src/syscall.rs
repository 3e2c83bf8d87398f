//! System calls as functions that return [`Errno`], with `EINTR` resolved here.
//!
//! Offsets and lengths are bytes. Nothing here interprets a result beyond success or error; short
//! transfers are the caller's business (`crate::whole`).

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use gaur_block::{Errno, Segments, SegmentsMut};

use crate::iovecs::iovec_of;

/// The most parts one vectored call takes (`IOV_MAX`).
pub(crate) const IOV_MAX: usize = 1024;

/// The most bytes the kernel moves in one call (`MAX_RW_COUNT`).
pub(crate) const RW_MAX: usize = 0x7fff_f000;

/// The error of the system call that just failed.
pub(crate) fn last_errno() -> Errno {
    Errno::from_raw(
        std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
    )
}

/// The error number inside a [`std::io::Error`], `EIO` when it has none.
pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

/// A count that a call returned, or its error; -1 means that `errno` holds the reason.
fn count(result: isize) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| last_errno())
}

/// Repeats a call for as long as a signal interrupts it.
fn retry(mut call: impl FnMut() -> isize) -> Result<usize, Errno> {
    loop {
        match count(call()) {
            Err(Errno::EINTR) => {}
            result => return result,
        }
    }
}

/// The same for calls that return an `int`.
pub(crate) fn retry_int(mut call: impl FnMut() -> libc::c_int) -> Result<libc::c_int, Errno> {
    // The value fits again: it came from an `int`.
    retry(|| call() as isize).map(|value| value as libc::c_int)
}

/// An offset as the kernel wants it; `EINVAL` beyond 2^63 - 1.
fn offset(offset_bytes: u64) -> Result<libc::off_t, Errno> {
    libc::off_t::try_from(offset_bytes).map_err(|_| Errno::EINVAL)
}

/// What the path names, links followed.
pub(crate) fn stat(path: &CStr) -> Result<libc::stat, Errno> {
    let mut facts = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the path ends in NUL and `facts` has room for one `stat`, which a success fills.
    unsafe {
        retry_int(|| libc::stat(path.as_ptr(), facts.as_mut_ptr()))?;
        Ok(facts.assume_init())
    }
}

/// What the descriptor refers to.
pub(crate) fn fstat(fd: BorrowedFd<'_>) -> Result<libc::stat, Errno> {
    let mut facts = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the descriptor is open and `facts` has room for one `stat`, which a success fills.
    unsafe {
        retry_int(|| libc::fstat(fd.as_raw_fd(), facts.as_mut_ptr()))?;
        Ok(facts.assume_init())
    }
}

/// The magic number of the file system that holds the file.
pub(crate) fn filesystem_magic(fd: BorrowedFd<'_>) -> Result<i64, Errno> {
    let mut facts = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the descriptor is open and `facts` has room for one `statfs`, which a success fills.
    unsafe {
        retry_int(|| libc::fstatfs(fd.as_raw_fd(), facts.as_mut_ptr()))?;
        #[allow(
            clippy::unnecessary_cast,
            reason = "the type differs between architectures"
        )]
        Ok(facts.assume_init().f_type as i64)
    }
}

/// Opens a path; `O_CLOEXEC` is added.
pub(crate) fn open(path: &CStr, flags: libc::c_int) -> Result<OwnedFd, Errno> {
    let flags = flags | libc::O_CLOEXEC | libc::O_NOCTTY;
    let mode: libc::c_uint = 0o644;
    // SAFETY: the path ends in NUL; a descriptor that open returns is new and ours alone.
    unsafe {
        let fd = retry_int(|| libc::open(path.as_ptr(), flags, mode))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// A path as the kernel wants it; `EINVAL` when it has a NUL inside.
pub(crate) fn path(name: &[u8]) -> Result<CString, Errno> {
    CString::new(name).map_err(|_| Errno::EINVAL)
}

/// Calls `call` with the list of `memory`, of which at most [`IOV_MAX`] pieces are looked at.
fn with_iovecs<T>(
    memory: Segments<'_>,
    call: impl FnOnce(*const libc::iovec, libc::c_int) -> T,
) -> T {
    if let Some(piece) = memory.single() {
        let one = iovec_of(piece);
        return call(&raw const one, 1);
    }
    let mut list = [const { MaybeUninit::<libc::iovec>::uninit() }; IOV_MAX];
    let mut count = 0;
    for (place, piece) in list.iter_mut().zip(memory.pieces()) {
        place.write(iovec_of(piece));
        count += 1;
    }
    call(list.as_ptr().cast(), count)
}

/// Reads once; the count may be short, 0 is the end of the file. `flags` are those of `preadv2(2)`, or 0.
pub(crate) fn read(
    fd: BorrowedFd<'_>,
    offset_bytes: u64,
    into: SegmentsMut<'_>,
    flags: libc::c_int,
) -> Result<usize, Errno> {
    let at = offset(offset_bytes)?;
    with_iovecs(*into, |list, count| {
        // SAFETY: the list has that many entries, and their memory may be written to.
        retry(|| unsafe {
            match flags {
                0 => libc::preadv(fd.as_raw_fd(), list, count, at),
                flags => with_flags(libc::SYS_preadv2, fd, list, count, at, flags),
            }
        })
    })
}

/// Writes once; the count may be short. `flags` are those of `pwritev2(2)`, or 0.
pub(crate) fn write(
    fd: BorrowedFd<'_>,
    offset_bytes: u64,
    from: Segments<'_>,
    flags: libc::c_int,
) -> Result<usize, Errno> {
    let at = offset(offset_bytes)?;
    with_iovecs(from, |list, count| {
        // SAFETY: the list has that many entries, and their memory may be read.
        retry(|| unsafe {
            match flags {
                0 => libc::pwritev(fd.as_raw_fd(), list, count, at),
                flags => with_flags(libc::SYS_pwritev2, fd, list, count, at, flags),
            }
        })
    })
}

/// `preadv2(2)` or `pwritev2(2)` by its number: musl has the functions since 1.2.5 only.
///
/// # Safety
/// The parts are those of slices, and may be written to if the call does so.
unsafe fn with_flags(
    call: libc::c_long,
    fd: BorrowedFd<'_>,
    parts: *const libc::iovec,
    count: libc::c_int,
    at: libc::off_t,
    flags: libc::c_int,
) -> isize {
    // The kernel takes the offset in two halves; where a half has 64 bits it is all of it.
    const HIGH_HALF: libc::c_long = 0;
    let count = libc::c_long::from(count);
    // SAFETY: the caller's promise.
    let result = unsafe { libc::syscall(call, fd.as_raw_fd(), parts, count, at, HIGH_HALF, flags) };
    result as isize
}

/// Whether a call refused its flags rather than what it was asked for.
pub(crate) fn is_refusal(errno: Errno) -> bool {
    errno == Errno::EOPNOTSUPP || errno.raw() == libc::ENOSYS
}

/// Reads what is there from a descriptor without a position, such as an event counter that has just been
/// readable, and does not wait even if it is not any more (where the kernel knows how, Linux 5.8).
pub(crate) fn read_now(fd: BorrowedFd<'_>, memory: &mut [u8]) -> Result<usize, Errno> {
    const NO_POSITION: libc::off_t = -1;
    let memory = SegmentsMut::from(memory);
    let read = |flags| {
        with_iovecs(*memory, |list, count| {
            // SAFETY: the list has that many entries, and their memory may be written to.
            retry(|| unsafe { with_flags(libc::SYS_preadv2, fd, list, count, NO_POSITION, flags) })
        })
    };
    match read(libc::RWF_NOWAIT) {
        Err(errno) if is_refusal(errno) => read(0),
        read => read,
    }
}

/// How often this thread has given up the processor to wait for something.
pub(crate) fn waits_of_thread() -> u64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: there is room for one `rusage`, and zeros are a value of it.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    #[allow(
        clippy::unnecessary_cast,
        reason = "the type differs between architectures"
    )]
    u64::try_from(usage.ru_nvcsw as i64).unwrap_or(0)
}

/// `fallocate(2)`.
pub(crate) fn fallocate(
    fd: BorrowedFd<'_>,
    mode: libc::c_int,
    offset_bytes: u64,
    len_bytes: u64,
) -> Result<(), Errno> {
    let (at, len) = (offset(offset_bytes)?, offset(len_bytes)?);
    // SAFETY: no memory is passed.
    retry_int(|| unsafe { libc::fallocate(fd.as_raw_fd(), mode, at, len) }).map(drop)
}

/// `fdatasync(2)`.
pub(crate) fn fdatasync(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: no memory is passed.
    retry_int(|| unsafe { libc::fdatasync(fd.as_raw_fd()) }).map(drop)
}

/// `ftruncate(2)`.
pub(crate) fn ftruncate(fd: BorrowedFd<'_>, len_bytes: u64) -> Result<(), Errno> {
    let len = offset(len_bytes)?;
    // SAFETY: no memory is passed.
    retry_int(|| unsafe { libc::ftruncate(fd.as_raw_fd(), len) }).map(drop)
}

/// `lseek(2)`. It moves the position that all users of the open file share, which nobody reads.
pub(crate) fn lseek(
    fd: BorrowedFd<'_>,
    offset_bytes: u64,
    whence: libc::c_int,
) -> Result<u64, Errno> {
    let at = offset(offset_bytes)?;
    // SAFETY: no memory is passed.
    let result = unsafe { libc::lseek(fd.as_raw_fd(), at, whence) };
    u64::try_from(result).map_err(|_| last_errno())
}

/// The size of a block device's logical sectors in bytes (`BLKSSZGET`).
pub(crate) fn sector_size(fd: BorrowedFd<'_>) -> Result<u32, Errno> {
    let mut size: libc::c_int = 0;
    // SAFETY: the request stores one `int`, for which there is room.
    retry_int(|| unsafe { libc::ioctl(fd.as_raw_fd(), libc::BLKSSZGET, &raw mut size) })?;
    u32::try_from(size).map_err(|_| Errno::EIO)
}

/// Tells a block device that a range is no longer needed (`BLKDISCARD`).
pub(crate) fn block_discard(
    fd: BorrowedFd<'_>,
    offset_bytes: u64,
    len_bytes: u64,
) -> Result<(), Errno> {
    /// `_IO(0x12, 119)`; without direction or size the number is the same nearly everywhere, and
    /// where it is not the kernel answers `ENOTTY`.
    const BLKDISCARD: libc::c_int = 0x1277;
    let range = [offset_bytes, len_bytes];
    // SAFETY: the request reads two `u64`.
    let result = retry_int(|| unsafe {
        libc::ioctl(fd.as_raw_fd(), BLKDISCARD as libc::Ioctl, range.as_ptr())
    });
    match result {
        Ok(_) => Ok(()),
        Err(errno) if errno.raw() == libc::ENOTTY => Err(Errno::EOPNOTSUPP),
        Err(errno) => Err(errno),
    }
}

/// What O_DIRECT asks of memory and of offsets, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectAlignment {
    pub(crate) memory: u32,
    pub(crate) offset: u32,
}

/// What the kernel says of O_DIRECT on this file (`STATX_DIOALIGN`, Linux 6.1); `None` when it
/// says nothing.
pub(crate) fn direct_alignment(fd: BorrowedFd<'_>) -> Option<DirectAlignment> {
    const STATX_DIOALIGN: u32 = 0x2000;
    /// Where `stx_dio_mem_align` and `stx_dio_offset_align` stand in `struct statx`, in words.
    const MEM_WORD: usize = 0x98 / 4;
    /// `struct statx` is 256 bytes long; aligned as its `u64` fields ask.
    #[repr(C, align(8))]
    struct Statx([u32; 64]);
    let mut facts = Statx([0; 64]);
    // SAFETY: the path is an empty string, and `facts` is as large as `struct statx`.
    let result = unsafe {
        libc::syscall(
            libc::SYS_statx,
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            STATX_DIOALIGN,
            facts.0.as_mut_ptr(),
        )
    };
    let answered = result == 0 && facts.0[0] & STATX_DIOALIGN != 0;
    let found = DirectAlignment {
        memory: facts.0[MEM_WORD],
        offset: facts.0[MEM_WORD + 1],
    };
    (answered && found.memory.is_power_of_two() && found.offset.is_power_of_two()).then_some(found)
}
