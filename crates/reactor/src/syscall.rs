//! System calls as functions that return [`Errno`], with `EINTR` resolved here.
//!
//! Offsets and lengths are bytes. Nothing here interprets a result beyond success or error; short
//! transfers are the caller's business (`crate::whole`).

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use gaur_block::{Errno, Segments, SegmentsMut};
use rustix::fs::{self, AtFlags, FallocateFlags, Mode, OFlags, ResolveFlags, StatxFlags};

use crate::iovecs::iovec_of;

/// The most parts one vectored call takes (`IOV_MAX`).
pub(crate) const IOV_MAX: usize = 1024;

/// The most bytes the kernel moves in one call (`MAX_RW_COUNT`).
pub(crate) const RW_MAX: usize = 0x7fff_f000;

/// Has the file system write over a file's data in place (btrfs). Only for one that is empty.
pub(crate) fn set_nocow(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let flags = again(|| fs::ioctl_getflags(fd))?;
    let nocow = flags | fs::IFlags::NOCOW;
    again(|| fs::ioctl_setflags(fd, nocow))
}

/// Has the file system allocate a file's space in so many bytes at a time (XFS).
pub(crate) fn set_extent_size(fd: BorrowedFd<'_>, bytes: u32) -> Result<(), Errno> {
    /// `struct fsxattr` of the kernel's interface.
    #[repr(C)]
    struct FileAttributes {
        flags: u32,
        extent_size: u32,
        others: [u32; 5],
    }
    const _: () = assert!(size_of::<FileAttributes>() == 28, "as the kernel has it");
    /// `FS_IOC_FSSETXATTR`
    const SET: libc::c_ulong = 0x401c_5820;
    /// `FS_XFLAG_EXTSIZE`
    const EXTENT_SIZE: u32 = 0x800;
    let attributes = FileAttributes {
        flags: EXTENT_SIZE,
        extent_size: bytes,
        others: [0; 5],
    };
    // SAFETY: the kernel reads the 28 bytes of a structure that is there for the call.
    let set = || unsafe { libc::ioctl(fd.as_raw_fd(), SET as _, &raw const attributes) as isize };
    retry(set).map(drop)
}

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
#[inline]
fn retry(mut call: impl FnMut() -> isize) -> Result<usize, Errno> {
    loop {
        match count(call()) {
            Err(Errno::EINTR) => {}
            result => return result,
        }
    }
}

/// The same for a call of `rustix`.
pub(crate) fn again<T>(call: impl FnMut() -> rustix::io::Result<T>) -> Result<T, Errno> {
    rustix::io::retry_on_intr(call).map_err(|errno| Errno::from_raw(errno.raw_os_error()))
}

/// An offset as the kernel wants it; `EINVAL` beyond 2^63 - 1.
fn offset(offset_bytes: u64) -> Result<libc::off_t, Errno> {
    libc::off_t::try_from(offset_bytes).map_err(|_| Errno::EINVAL)
}

/// The magic number of the file system that holds the file.
pub(crate) fn filesystem_magic(fd: BorrowedFd<'_>) -> Result<i64, Errno> {
    #[allow(
        clippy::unnecessary_cast,
        reason = "the type differs between architectures"
    )]
    again(|| fs::fstatfs(fd)).map(|facts| facts.f_type as i64)
}

/// Opens a path; `O_CLOEXEC` is added.
pub(crate) fn open(path: &CStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
    again(|| fs::open(path, flags, Mode::from_raw_mode(0o644)))
}

/// Opens a path below a directory, which neither links nor `..` leave (Linux 5.6); `O_CLOEXEC` is added.
pub(crate) fn open_beneath(
    directory: BorrowedFd<'_>,
    path: &CStr,
    flags: OFlags,
) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let flags = flags | OFlags::CLOEXEC | no_terminal(flags);
    again(|| fs::openat2(directory, path, flags, Mode::empty(), resolve))
}

/// Opens one name in a directory, no link; `O_CLOEXEC` is added.
pub(crate) fn open_in(
    directory: BorrowedFd<'_>,
    name: &CStr,
    flags: OFlags,
) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | no_terminal(flags);
    again(|| fs::openat(directory, name, flags, Mode::empty()))
}

/// The kernel refuses `O_NOCTTY` beside `O_PATH`, and has no use for it there.
fn no_terminal(flags: OFlags) -> OFlags {
    match flags.contains(OFlags::PATH) {
        true => OFlags::empty(),
        false => OFlags::NOCTTY,
    }
}

/// Has operations on the descriptor say `EAGAIN` where they would wait, or wait.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>, nonblocking: bool) -> Result<(), Errno> {
    again(|| {
        let flags = fs::fcntl_getfl(fd)?;
        let mut wanted = flags;
        wanted.set(OFlags::NONBLOCK, nonblocking);
        match wanted == flags {
            true => Ok(()),
            false => fs::fcntl_setfl(fd, wanted),
        }
    })
}

/// Calls `call` with the list of `memory`, of which at most [`IOV_MAX`] pieces are looked at.
#[inline]
fn with_iovecs<T>(
    memory: Segments<'_>,
    call: impl FnOnce(*const libc::iovec, libc::c_int) -> T,
) -> T {
    if let Some(piece) = memory.single() {
        let one = iovec_of(piece);
        return call(&raw const one, 1);
    }
    with_list(memory, call)
}

/// A function of its own, so that one piece needs no stack for the list.
#[inline(never)]
fn with_list<T>(
    memory: Segments<'_>,
    call: impl FnOnce(*const libc::iovec, libc::c_int) -> T,
) -> T {
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
    let calls = [libc::SYS_pread64, libc::SYS_preadv, libc::SYS_preadv2];
    // SAFETY: the memory may be written to.
    unsafe { transfer(calls, fd, offset(offset_bytes)?, *into, flags) }
}

/// Writes once; the count may be short. `flags` are those of `pwritev2(2)`, or 0.
pub(crate) fn write(
    fd: BorrowedFd<'_>,
    offset_bytes: u64,
    from: Segments<'_>,
    flags: libc::c_int,
) -> Result<usize, Errno> {
    let calls = [libc::SYS_pwrite64, libc::SYS_pwritev, libc::SYS_pwritev2];
    // SAFETY: the memory may be read.
    unsafe { transfer(calls, fd, offset(offset_bytes)?, from, flags) }
}

/// The first of the calls for one piece without flags, the second for a list, the third with flags; by their
/// numbers: musl has the functions of the third since 1.2.5 only.
///
/// # Safety
/// The memory may be written to if the calls do so.
unsafe fn transfer(
    [plain, vectored, with_flags]: [libc::c_long; 3],
    fd: BorrowedFd<'_>,
    at: libc::off_t,
    memory: Segments<'_>,
    flags: libc::c_int,
) -> Result<usize, Errno> {
    // The kernel takes the offset in two halves; where a half has 64 bits it is all of it.
    const HIGH_HALF: libc::c_long = 0;
    if let (0, Some(piece)) = (flags, memory.single()) {
        let (fd, start) = (fd.as_raw_fd(), piece.start());
        // SAFETY: that is the piece, and the caller's promise.
        return retry(|| unsafe { libc::syscall(plain, fd, start, piece.len(), at) as isize });
    }
    let call = if flags == 0 { vectored } else { with_flags };
    with_iovecs(memory, |list, count| {
        let count = libc::c_long::from(count);
        // SAFETY: the list has that many entries, and the caller's promise.
        retry(|| unsafe {
            libc::syscall(call, fd.as_raw_fd(), list, count, at, HIGH_HALF, flags) as isize
        })
    })
}

/// Whether a call refused its flags rather than what it was asked for.
pub(crate) fn is_refusal(errno: Errno) -> bool {
    errno == Errno::EOPNOTSUPP || errno.raw() == libc::ENOSYS
}

/// Reads what is there from a descriptor without a position, such as an event counter that has just been
/// readable, and does not wait even if it is not any more (where the kernel knows how, Linux 5.8).
pub(crate) fn read_now(fd: BorrowedFd<'_>, memory: &mut [u8]) -> Result<usize, Errno> {
    const NO_POSITION: libc::off_t = -1;
    let calls = [libc::SYS_preadv2; 3];
    let list = SegmentsMut::from(&mut *memory);
    // SAFETY: the memory may be written to.
    match unsafe { transfer(calls, fd, NO_POSITION, *list, libc::RWF_NOWAIT) } {
        Err(errno) if is_refusal(errno) => again(|| rustix::io::read(fd, &mut *memory)),
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
    let mode = FallocateFlags::from_bits_retain(mode as u32);
    again(|| fs::fallocate(fd, mode, offset_bytes, len_bytes))
}

/// Makes `len_bytes` of a file, not 0, share the space of another's (`FICLONERANGE`).
pub(crate) fn clone_range(
    fd: BorrowedFd<'_>,
    offset_bytes: u64,
    source: (BorrowedFd<'_>, u64),
    len_bytes: u64,
) -> Result<(), Errno> {
    /// `struct file_clone_range` of the kernel's interface.
    #[repr(C)]
    struct CloneRange {
        source: i64,
        source_offset: u64,
        len: u64,
        offset: u64,
    }
    const _: () = assert!(size_of::<CloneRange>() == 32, "as the kernel has it");
    /// `FICLONERANGE`; where directions have other numbers the kernel answers `ENOTTY`.
    const CLONE: libc::c_ulong = 0x4020_940d;
    let range = CloneRange {
        source: i64::from(source.0.as_raw_fd()),
        source_offset: source.1,
        len: len_bytes,
        offset: offset_bytes,
    };
    // SAFETY: the request reads one `CloneRange`.
    let clone = || unsafe { libc::ioctl(fd.as_raw_fd(), CLONE as _, &raw const range) as isize };
    match retry(clone) {
        Err(errno) if errno.raw() == libc::ENOTTY => Err(Errno::EOPNOTSUPP),
        result => result.map(drop),
    }
}

/// `fdatasync(2)`.
pub(crate) fn fdatasync(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    again(|| fs::fdatasync(fd))
}

/// `ftruncate(2)`.
pub(crate) fn ftruncate(fd: BorrowedFd<'_>, len_bytes: u64) -> Result<(), Errno> {
    again(|| fs::ftruncate(fd, len_bytes))
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
    let result = retry(|| unsafe {
        libc::ioctl(fd.as_raw_fd(), BLKDISCARD as libc::Ioctl, range.as_ptr()) as isize
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
    let asked = StatxFlags::DIOALIGN;
    let facts = again(|| fs::statx(fd, c"", AtFlags::EMPTY_PATH, asked)).ok()?;
    let answered = facts.stx_mask & asked.bits() != 0;
    let found = DirectAlignment {
        memory: facts.stx_dio_mem_align,
        offset: facts.stx_dio_offset_align,
    };
    (answered && found.memory.is_power_of_two() && found.offset.is_power_of_two()).then_some(found)
}
