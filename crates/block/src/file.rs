//! The host side: what the engine asks of whatever holds its bytes.

use core::fmt;
use core::future::Future;
use core::ops::DerefMut;
use std::path::Path;

use crate::{Errno, Source, Target, Within};

/// What a [`File`] can do, and how its requests must be shaped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileLimits {
    /// Offsets and lengths of `read_at` and `write_at` are multiples of this
    /// (a power of two in bytes; 1 for a cached file, 512 or 4096 with O_DIRECT).
    pub request_alignment: u32,
    /// Addresses of memory handed over are multiples of this (a power of two in bytes, 1 or more). The
    /// pieces of memory in several are multiples of this, and of `request_alignment`, long.
    pub memory_alignment: u32,
    /// The longest single transfer, in bytes; a multiple of `request_alignment`.
    pub max_transfer: u32,
    /// `set_len` works, and space gained by it reads as zeros (a regular file). When false the
    /// length is fixed and unused space holds anything (a block device).
    pub resizable: bool,
    /// `discard` gives space back, and the range reads as zeros afterwards.
    pub discard_zeroes: bool,
    /// Writes are refused with [`Errno::EROFS`].
    pub read_only: bool,
}

/// Names a file apart from its path, to find a backing chain that bites its own tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    /// Device number of the file system, or of the block device itself.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

/// A run of bytes of a file that is all data or all hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Whether the run may hold something other than zeros. A host that cannot tell says `true`.
    pub data: bool,
}

/// The host side of the waist: one value per queue, used by one thread.
///
/// Transfers are whole: short transfers and `EINTR` end inside the implementation. Bytes past the
/// end of the file read as zeros. A future may be dropped before it is done (the host waits for the
/// kernel to let go of the memory), but must not be leaked.
#[expect(clippy::len_without_is_empty, reason = "a file is not a collection")]
pub trait File {
    /// Memory suited to this file's requests; see [`File::buffer`].
    type Buffer: DerefMut<Target = [u8]> + 'static;

    /// Limits of this file; constant while it is open.
    fn limits(&self) -> FileLimits;

    /// Which file this is; `None` when the host cannot say.
    fn id(&self) -> Option<FileId>;

    /// Whether its bytes are known to be a guest's disk: then it is raw, whatever they look like.
    fn is_disk(&self) -> bool {
        false
    }

    /// Memory of `len_bytes` zeros, aligned to [`FileLimits::memory_alignment`]. It may allocate:
    /// take buffers at start and keep them.
    fn buffer(&self, len_bytes: usize) -> Self::Buffer;

    /// Length of the file in bytes.
    fn len(&self) -> impl Future<Output = Result<u64, Errno>>;

    /// Fills `target` from `offset_bytes` on, as one request however many pieces it has.
    fn read_at(
        &self,
        offset_bytes: u64,
        target: Target<'_>,
    ) -> impl Future<Output = Result<(), Errno>>;

    /// Stores `source` at `offset_bytes`, as one request however many pieces it has. It may extend the file, but the engine avoids that.
    fn write_at(
        &self,
        offset_bytes: u64,
        source: Source<'_>,
    ) -> impl Future<Output = Result<(), Errno>>;

    /// Makes a range read as zeros. With `may_unmap` the space may be given back. Any range is
    /// allowed; [`Errno::EOPNOTSUPP`] means that the caller writes zeros itself.
    fn write_zeroes_at(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        may_unmap: bool,
    ) -> impl Future<Output = Result<(), Errno>>;

    /// Takes the host's space for a range below the end of the file and changes no byte of it: what
    /// is a hole reads as zeros still, and a later write there finds its space taken, in one piece
    /// where the host can. A host that would have to write answers [`Errno::EOPNOTSUPP`].
    fn allocate_at(
        &self,
        _offset_bytes: u64,
        _len_bytes: u64,
    ) -> impl Future<Output = Result<(), Errno>> {
        core::future::ready(Err(Errno::EOPNOTSUPP))
    }

    /// Gives the space of a range back, a hint. When [`FileLimits::discard_zeroes`] holds and this
    /// returns `Ok`, the range reads as zeros.
    fn discard_at(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> impl Future<Output = Result<(), Errno>>;

    /// Every write, `write_zeroes_at`, `discard_at` and `set_len` completed before this call was
    /// made, through this value or any other open on the same file, is durable when it returns
    /// `Ok`; after an error nothing may be assumed about any of them.
    fn flush(&self) -> impl Future<Output = Result<(), Errno>>;

    /// Changes the length of the file; new space reads as zeros.
    /// [`Errno::EOPNOTSUPP`] when not [`FileLimits::resizable`].
    fn set_len(&self, len_bytes: u64) -> impl Future<Output = Result<(), Errno>>;

    /// The run of data or hole that starts at `offset_bytes` (below the length of the file).
    fn extent_at(&self, offset_bytes: u64) -> impl Future<Output = Result<Extent, Errno>>;
}

/// How a file is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Open for writing, and keep other programs from writing.
    pub write: bool,
    /// Bypass the host's page cache (O_DIRECT).
    pub direct: bool,
    /// Take the locks by which QEMU keeps two programs from writing one image.
    pub lock: bool,
    /// Do not mind if another program is writing (`--force-share`); only without `write`.
    pub force_share: bool,
}

/// Why a file could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenError {
    /// The system's error number.
    pub errno: Errno,
    /// What went wrong, in lower case and without the name of the file: `"is a directory"`,
    /// `"write lock is held by another process"`.
    pub reason: String,
}

impl fmt::Display for OpenError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.reason)
    }
}

impl core::error::Error for OpenError {}

/// Opens files by name: the file system of a host.
pub trait Host {
    /// What it opens.
    type File: File;

    /// Opens the file called `name`, which an image may have named (`within` tells), if it lies `within`;
    /// else the error is [`Within::refused`]. A path is bytes: it need not be text.
    fn open_within(
        &self,
        name: &Path,
        within: Within<'_>,
        access: Access,
    ) -> impl Future<Output = Result<Self::File, OpenError>>;

    /// Opens the file called `name` by the user.
    fn open(
        &self,
        name: &Path,
        access: Access,
    ) -> impl Future<Output = Result<Self::File, OpenError>> {
        self.open_within(name, Within::ByUser, access)
    }
}
