//! Opening a host file: what may be opened, with which flags, and what it can do.
//!
//! An [`OpenFile`] is one open file description. Everything that queues of different threads share
//! about a file is in it, so each thread makes its own `BlockingFile` or `ReactorFile` from a clone.
//! Only regular files, block devices and exports of NBD servers are opened; the kind is looked at before the file is
//! touched, because opening a fifo waits for its other end and opening some devices does something.

use std::ffi::{CStr, CString};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_block::{Access, Errno, Extent, FileId, FileLimits, OpenError};
use gaur_nbd::Remote;
use parking_lot::Mutex;
use rustix::fs::{self, FileType, OFlags, SeekFrom, Stat};

use crate::lock;
use crate::memory::{Buffer, PAGE};
use crate::nbd::{self, NbdExport};
use crate::remote::{self, Asker, RemoteFile};
use crate::syscall::{self, DirectAlignment, again};
use crate::window::Window;

/// The longest single transfer in bytes: one that a disk works on for a while, and far below what
/// the kernel moves in one call.
const MAX_TRANSFER: u32 = 64 << 20;

/// File systems that live in memory: a transfer never waits, and a ring would only send it on to a
/// worker thread. Magic numbers as in `statfs(2)`.
const IN_MEMORY: &[i64] = &[TMPFS_MAGIC, RAMFS_MAGIC, HUGETLBFS_MAGIC];
const TMPFS_MAGIC: i64 = 0x0102_1994;
const RAMFS_MAGIC: i64 = 0x8584_58f6;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// An open host file and what is known about it. Clones are the same open file: they share the
/// locks, which are released when the last one is dropped.
#[derive(Clone, Debug)]
pub struct OpenFile {
    shared: Arc<Shared>,
    /// The part of it that is used, if that is not all.
    window: Option<Window>,
}

#[derive(Debug)]
struct Shared {
    at: Place,
    kind: Kind,
    id: FileId,
    limits: FileLimits,
    direct: bool,
    locked: bool,
    in_memory: bool,
    /// Unit of a block device in bytes, 1 for a regular file.
    sector_bytes: u32,
    /// Where data was found last. Finding its end takes the kernel the longer the more data there is (tmpfs looks at
    /// every page), and who walks over a file asks again and again. Data that has become a hole since is still
    /// read rightly.
    known_data: Mutex<Range<u64>>,
    skips_flushes: AtomicBool,
    /// What is written is dropped, and all of it reads as zeros.
    is_null: bool,
    /// Of a file that holds what was fetched: where the rest is.
    remote: Option<Arc<dyn RemoteFile>>,
}

/// Where the bytes are.
#[derive(Debug)]
enum Place {
    Here(OwnedFd),
    Nbd(NbdExport),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Regular,
    BlockDevice,
    /// Behind a connection.
    Remote,
}

/// How [`OpenFile::create`] makes a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CreateFile {
    /// Bypass the host's page cache (O_DIRECT).
    pub direct: bool,
    /// Take the locks of a writer.
    pub lock: bool,
    /// A regular file that exists is emptied, after its locks are taken; otherwise it is an error.
    /// A block device is opened as it is.
    pub truncate_existing: bool,
}

impl OpenFile {
    /// Opens the file or block device at the path `name`, or the export that it names.
    ///
    /// # Errors
    /// Whatever `open(2)` says, in words; a directory, fifo, socket or character device; a lock
    /// that another program holds; O_DIRECT where the file system does not have it.
    pub fn open(name: impl AsRef<Path>, access: Access) -> Result<OpenFile, OpenError> {
        if let Some(remote) = nbd::remote_of(name.as_ref()) {
            return OpenFile::open_nbd(remote?, access);
        }
        if let Some(opened) = remote::open(name.as_ref(), Asker::User, access) {
            return opened;
        }
        let path = c_path(name.as_ref())?;
        let facts = again(|| fs::stat(&path)).map_err(|errno| cannot_open(errno, access.write))?;
        kind_of(&facts)?;
        OpenFile::open_with(&path, mode_of(access), access)
    }

    /// Makes a new, empty file at the path `name`, open for writing. A block device or an export is opened as
    /// it is.
    ///
    /// # Errors
    /// As [`OpenFile::open`], and `EEXIST` when the file is there and may not be emptied.
    pub fn create(name: impl AsRef<Path>, options: CreateFile) -> Result<OpenFile, OpenError> {
        let access = Access {
            write: true,
            direct: options.direct,
            lock: options.lock,
            force_share: false,
        };
        if let Some(remote) = nbd::remote_of(name.as_ref()) {
            return OpenFile::open_nbd(remote?, access);
        }
        if let Some(opened) = remote::open(name.as_ref(), Asker::User, access) {
            return opened;
        }
        let path = c_path(name.as_ref())?;
        let mut mode = OFlags::RDWR | OFlags::CREATE;
        match again(|| fs::stat(&path)) {
            Ok(facts) => {
                let kind = kind_of(&facts)?;
                if kind == Kind::Regular && !options.truncate_existing {
                    let errno = Errno::from_raw(libc::EEXIST);
                    return Err(refused(errno, "the file exists already"));
                }
                if kind == Kind::BlockDevice {
                    mode = OFlags::RDWR;
                }
            }
            Err(Errno::ENOENT) => mode |= OFlags::EXCL,
            Err(errno) => return Err(cannot_open(errno, true)),
        }
        let file = OpenFile::open_with(&path, mode, access).map_err(|error| match error.errno {
            Errno::EACCES if mode.contains(OFlags::EXCL) => refused(
                error.errno,
                "permission denied to make a file in its folder",
            ),
            _ => error,
        })?;
        if file.shared.kind == Kind::Regular {
            syscall::ftruncate(file.fd(), 0).map_err(|errno| cannot_open(errno, true))?;
        }
        Ok(file)
    }

    /// Has the file system write over the file's data in place; it is empty.
    ///
    /// # Errors
    /// Where the file system knows no such thing.
    pub fn set_nocow(&self) -> Result<(), Errno> {
        syscall::set_nocow(self.local_fd()?)
    }

    /// Has the file system allocate space in so many bytes at a time; the file is empty.
    ///
    /// # Errors
    /// Where the file system knows no such thing, or not that size.
    pub fn set_extent_size(&self, bytes: u32) -> Result<(), Errno> {
        syscall::set_extent_size(self.local_fd()?, bytes)
    }

    pub(crate) fn open_nbd(remote: Remote, access: Access) -> Result<OpenFile, OpenError> {
        let export = NbdExport::open(remote, access)?;
        let shared = Shared {
            kind: Kind::Remote,
            id: export.id(),
            limits: export.limits(),
            // There is no page cache on this side.
            direct: true,
            locked: false,
            in_memory: false,
            sector_bytes: export.limits().request_alignment,
            at: Place::Nbd(export),
            known_data: Mutex::default(),
            skips_flushes: AtomicBool::new(false),
            is_null: false,
            remote: None,
        };
        Ok(OpenFile::of(shared))
    }

    /// A file whose bytes are elsewhere; `held` is a regular file of its length, which holds what is here.
    ///
    /// # Errors
    /// When `held` is something else.
    pub fn remote(held: OwnedFd, remote: Arc<dyn RemoteFile>) -> Result<OpenFile, OpenError> {
        let access = Access {
            write: false,
            direct: false,
            lock: false,
            force_share: true,
        };
        let failed = |errno| cannot_open(errno, false);
        let facts = again(|| fs::fstat(&held)).map_err(failed)?;
        let kind = kind_of(&facts)?;
        let mut shared = Shared::examine(held, kind, &facts, access).map_err(failed)?;
        shared.limits.resizable = false;
        shared.remote = Some(remote);
        Ok(OpenFile::of(shared))
    }

    fn of(shared: Shared) -> OpenFile {
        OpenFile {
            shared: Arc::new(shared),
            window: None,
        }
    }

    /// So many zeros, which take no space. What is written to them is dropped.
    ///
    /// # Errors
    /// What `memfd_create(2)` says.
    pub fn zeros(len_bytes: u64, access: Access) -> Result<OpenFile, OpenError> {
        let failed = |errno: rustix::io::Errno| {
            let errno = Errno::from_raw(errno.raw_os_error());
            refused(errno, format!("cannot make zeros: {errno}"))
        };
        let fd = fs::memfd_create("zeros", fs::MemfdFlags::CLOEXEC).map_err(failed)?;
        fs::ftruncate(&fd, len_bytes).map_err(failed)?;
        // Nobody else has the file, and it is in no cache but its own.
        let access = Access {
            direct: false,
            lock: false,
            ..access
        };
        let mut file = OpenFile::from_fd(fd, access)?;
        if let Some(shared) = Arc::get_mut(&mut file.shared) {
            shared.is_null = true;
            shared.limits.resizable = false;
        }
        Ok(file)
    }

    /// Whether it drops what is written to it.
    pub(crate) fn is_null(&self) -> bool {
        self.shared.is_null
    }

    fn open_with(path: &CStr, mode: OFlags, access: Access) -> Result<OpenFile, OpenError> {
        // Should the path have become a fifo since it was looked at, this open does not wait.
        let fd = syscall::open(path, mode | direct_flag(access) | OFlags::NONBLOCK)
            .map_err(|errno| open_failed(errno, access))?;
        OpenFile::from_fd(fd, access)
    }

    /// A file that was opened with O_NONBLOCK, whatever it is.
    pub(crate) fn from_fd(fd: OwnedFd, access: Access) -> Result<OpenFile, OpenError> {
        let facts = again(|| fs::fstat(&fd)).map_err(|errno| cannot_open(errno, access.write))?;
        let kind = kind_of(&facts)?;
        // A ring answers EAGAIN instead of waiting for a descriptor that says O_NONBLOCK.
        syscall::set_nonblocking(fd.as_fd(), false)
            .map_err(|errno| cannot_open(errno, access.write))?;
        if access.lock {
            lock::acquire(fd.as_fd(), access)?;
        }
        let shared = Shared::examine(fd, kind, &facts, access)
            .map_err(|errno| cannot_open(errno, access.write))?;
        Ok(OpenFile::of(shared))
    }

    /// The same open file, of which only a part is used from here on, as if it were all.
    ///
    /// # Errors
    /// When the part does not fit the file.
    pub fn in_window(mut self, window: Window) -> Result<OpenFile, OpenError> {
        let failed = |errno| cannot_open(errno, !self.shared.limits.read_only);
        let len = self.whole_len().map_err(failed)?;
        window.check(len, self.shared.limits)?;
        self.window = Some(window);
        Ok(self)
    }

    /// The part of the file that is used, if that is not all.
    pub fn window(&self) -> Option<Window> {
        self.window
    }

    /// Limits of this file; constant while it is open.
    pub fn limits(&self) -> FileLimits {
        let limits = self.shared.limits;
        self.window.map_or(limits, |window| window.limits(limits))
    }

    /// Which file this is.
    pub fn id(&self) -> FileId {
        self.shared.id
    }

    /// Whether it is a block device rather than a regular file.
    pub fn is_block_device(&self) -> bool {
        self.shared.kind == Kind::BlockDevice
    }

    /// Whether it is an export of an NBD server.
    pub fn is_nbd(&self) -> bool {
        self.nbd().is_some()
    }

    /// Whether its bytes come from another machine, or may.
    pub fn is_remote(&self) -> bool {
        self.is_nbd() || self.shared.remote.is_some()
    }

    /// Whether its bytes are a guest's disk, and no image whatever they look like.
    pub fn is_disk(&self) -> bool {
        self.far_side().is_some_and(RemoteFile::is_disk)
    }

    /// What went wrong last between here and where the bytes are, if they are elsewhere, in words.
    pub fn trouble(&self) -> Option<String> {
        match self.far_side() {
            Some(remote) => remote.trouble(),
            None => self.nbd()?.trouble(),
        }
    }

    /// Where the bytes are that this file does not hold, if it holds those of another.
    pub(crate) fn far_side(&self) -> Option<&dyn RemoteFile> {
        self.shared.remote.as_deref()
    }

    pub(crate) fn nbd(&self) -> Option<&NbdExport> {
        match &self.shared.at {
            Place::Nbd(export) => Some(export),
            Place::Here(_) => None,
        }
    }

    /// The descriptor, if the bytes are on this machine.
    ///
    /// # Errors
    /// [`Errno::EOPNOTSUPP`] for an export.
    pub fn local_fd(&self) -> Result<BorrowedFd<'_>, Errno> {
        match &self.shared.at {
            Place::Here(fd) => Ok(fd.as_fd()),
            Place::Nbd(_) => Err(Errno::EOPNOTSUPP),
        }
    }

    /// The descriptor of a file on this machine.
    ///
    /// # Panics
    /// When it is elsewhere: operations on those do not come here.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.local_fd()
            .expect("an operation on a file of this machine")
    }

    /// Whether it was opened with O_DIRECT.
    pub fn is_direct(&self) -> bool {
        self.shared.direct
    }

    /// Bytes of disk space that the file takes (`st_blocks`); 0 for a block device.
    ///
    /// # Errors
    /// [`Errno::EOPNOTSUPP`] for a file that is elsewhere.
    pub fn allocated_bytes(&self) -> Result<u64, Errno> {
        if self.far_side().is_some() {
            return Err(Errno::EOPNOTSUPP);
        }
        let fd = self.local_fd()?;
        let facts = again(|| fs::fstat(fd))?;
        Ok(u64::try_from(facts.st_blocks)
            .unwrap_or(0)
            .saturating_mul(512))
    }

    /// Whether its bytes are memory, so that a transfer never waits for a disk.
    pub(crate) fn in_memory(&self) -> bool {
        self.shared.in_memory
    }

    /// Unit of zeroing and discarding in bytes: a block device's sector, 1 for a regular file,
    /// where the file system does the edges.
    pub(crate) fn sector_bytes(&self) -> u32 {
        self.shared.sector_bytes
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> Result<u64, Errno> {
        let len = self.whole_len()?;
        Ok(self.window.map_or(len, |window| window.len(len)))
    }

    /// That of the file, whatever part of it is used.
    fn whole_len(&self) -> Result<u64, Errno> {
        match self.shared.kind {
            Kind::Regular => {
                let facts = again(|| fs::fstat(self.fd()))?;
                u64::try_from(facts.st_size).map_err(|_| Errno::EIO)
            }
            Kind::Remote => self.nbd().map(NbdExport::len).ok_or(Errno::EIO),
            Kind::BlockDevice => self.seek(SeekFrom::End(0)),
        }
    }

    /// It moves the position that all users of the open file share, which nothing reads.
    fn seek(&self, to: SeekFrom) -> Result<u64, Errno> {
        again(|| fs::seek(self.fd(), to))
    }

    /// Makes `len` bytes from `at` on, not 0, share the space of those of another file, if the file system can.
    ///
    /// # Errors
    /// [`Errno::EINVAL`] when offset or length are not its blocks'; [`Errno::EOPNOTSUPP`], [`Errno::EXDEV`] and others
    /// when it cannot at all. The bytes are then unchanged.
    pub fn clone_range(&self, at: u64, source: (&OpenFile, u64), len: u64) -> Result<(), Errno> {
        let regular = |file: &OpenFile| file.shared.kind == Kind::Regular && !file.is_remote();
        if !regular(self) || !regular(source.0) || len == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let from = (source.0.local_fd()?, source.0.place(source.1, len)?);
        syscall::clone_range(self.local_fd()?, self.place(at, len)?, from, len)
    }

    /// From now on flushes do nothing: what was written is not durable until the kernel makes it so.
    pub fn skip_flushes(&self) {
        self.shared.skips_flushes.store(true, Ordering::Relaxed);
    }

    pub(crate) fn skips_flushes(&self) -> bool {
        self.shared.skips_flushes.load(Ordering::Relaxed)
    }

    /// Notes that what was data may be none any more.
    pub(crate) fn forget_data(&self) {
        *self.shared.known_data.lock() = 0..0;
    }

    /// The run of data or hole at `offset_bytes` of the whole file.
    pub(crate) fn extent_at(&self, offset_bytes: u64) -> Result<Extent, Errno> {
        let len_bytes = self.whole_len()?;
        let rest = len_bytes.checked_sub(offset_bytes).filter(|rest| *rest > 0);
        let rest = rest.ok_or(Errno::EINVAL)?;
        if let Some(remote) = self.far_side() {
            let known = remote.extent_at(offset_bytes);
            return Ok(known.unwrap_or(Extent {
                len: rest,
                data: true,
            }));
        }
        let known = self.shared.known_data.lock().clone();
        if known.contains(&offset_bytes) && known.end <= len_bytes {
            return Ok(Extent {
                len: known.end - offset_bytes,
                data: true,
            });
        }
        let run = |end: u64, data| {
            let len = end.min(len_bytes).saturating_sub(offset_bytes);
            // A file that changes under our feet: what can be said of one byte is always true.
            Extent {
                len: len.max(1),
                data: data || len == 0,
            }
        };
        match self.seek(SeekFrom::Data(offset_bytes)) {
            Ok(start) if start > offset_bytes => Ok(run(start, false)),
            Ok(_) => match self.seek(SeekFrom::Hole(offset_bytes)) {
                Ok(end) => {
                    let found = run(end, true);
                    *self.shared.known_data.lock() = offset_bytes..offset_bytes + found.len;
                    Ok(found)
                }
                Err(_) => Ok(Extent {
                    len: rest,
                    data: true,
                }),
            },
            Err(errno) if errno.raw() == libc::ENXIO => Ok(run(len_bytes, false)),
            // A block device, or a file system that does not know.
            Err(_) => Ok(Extent {
                len: rest,
                data: true,
            }),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let (Place::Here(fd), true) = (&self.at, self.locked) {
            lock::release(fd.as_fd());
        }
    }
}

impl Shared {
    fn examine(fd: OwnedFd, kind: Kind, facts: &Stat, access: Access) -> Result<Shared, Errno> {
        let sector_bytes = match kind {
            Kind::BlockDevice => again(|| fs::ioctl_blksszget(&fd))?,
            _ => 1,
        };
        let alignment = match access.direct {
            true => direct_alignment(fd.as_fd(), sector_bytes),
            false => DirectAlignment {
                memory: 1,
                offset: 1,
            },
        };
        let in_memory = kind == Kind::Regular
            && syscall::filesystem_magic(fd.as_fd()).is_ok_and(|magic| IN_MEMORY.contains(&magic));
        let id = match kind {
            Kind::BlockDevice => FileId {
                device: facts.st_rdev,
                inode: 0,
            },
            _ => FileId {
                device: facts.st_dev,
                inode: facts.st_ino,
            },
        };
        let limits = FileLimits {
            request_alignment: alignment.offset,
            memory_alignment: alignment.memory,
            max_transfer: MAX_TRANSFER,
            resizable: kind == Kind::Regular,
            discard_zeroes: kind == Kind::Regular && access.write,
            read_only: !access.write,
        };
        Ok(Shared {
            at: Place::Here(fd),
            kind,
            id,
            limits,
            direct: access.direct,
            locked: access.lock,
            in_memory,
            sector_bytes,
            known_data: Mutex::default(),
            skips_flushes: AtomicBool::new(false),
            is_null: false,
            remote: None,
        })
    }
}

/// Whether a file is opened to be read, or written too.
fn mode_of(access: Access) -> OFlags {
    match access.write {
        true => OFlags::RDWR,
        false => OFlags::RDONLY,
    }
}

fn direct_flag(access: Access) -> OFlags {
    match access.direct {
        true => OFlags::DIRECT,
        false => OFlags::empty(),
    }
}

/// The flags to open a file with, whose kind is not sure yet.
pub(crate) fn flags_of(access: Access) -> OFlags {
    mode_of(access) | direct_flag(access) | OFlags::NONBLOCK
}

/// What O_DIRECT asks for: what the kernel says, or a block device's sector, or the smallest unit
/// that a read accepts.
fn direct_alignment(fd: BorrowedFd<'_>, sector_bytes: u32) -> DirectAlignment {
    if let Some(found) = syscall::direct_alignment(fd) {
        return found;
    }
    if sector_bytes > 1 {
        return DirectAlignment {
            memory: sector_bytes,
            offset: sector_bytes,
        };
    }
    let mut memory = Buffer::from_system(PAGE);
    let accepted = |unit: usize, memory: &mut [u8]| {
        let aligned = memory.get_mut(..unit);
        aligned.is_some_and(|aligned| syscall::read(fd, unit as u64, aligned.into(), 0).is_ok())
    };
    let unit = [512, 1024, 2048]
        .into_iter()
        .find(|unit| accepted(*unit, &mut memory));
    let unit = unit.unwrap_or(PAGE) as u32;
    DirectAlignment {
        memory: PAGE as u32,
        offset: unit,
    }
}

pub(crate) fn kind_of(facts: &Stat) -> Result<Kind, OpenError> {
    let (errno, what) = match FileType::from_raw_mode(facts.st_mode) {
        FileType::RegularFile => return Ok(Kind::Regular),
        FileType::BlockDevice => return Ok(Kind::BlockDevice),
        FileType::Directory => (Errno::EISDIR, "a directory"),
        FileType::Fifo => (Errno::EINVAL, "a fifo"),
        FileType::Socket => (Errno::EINVAL, "a socket"),
        FileType::CharacterDevice => (Errno::EINVAL, "a character device"),
        _ => (Errno::EINVAL, "of an unknown kind"),
    };
    let reason = format!("is {what}; an image is a regular file or a block device");
    Err(refused(errno, reason))
}

pub(crate) fn c_path(name: &Path) -> Result<CString, OpenError> {
    let path = CString::new(name.as_os_str().as_bytes());
    path.map_err(|_| refused(Errno::EINVAL, "the name contains a NUL byte"))
}

pub(crate) fn refused(errno: Errno, reason: impl Into<String>) -> OpenError {
    let reason = reason.into();
    OpenError { errno, reason }
}

pub(crate) fn open_failed(errno: Errno, access: Access) -> OpenError {
    match errno {
        Errno::EINVAL if access.direct => no_direct(),
        errno => cannot_open(errno, access.write),
    }
}

fn no_direct() -> OpenError {
    let reason = "the file system does not support direct I/O; use a cached mode";
    refused(Errno::EINVAL, reason)
}

fn cannot_open(errno: Errno, write: bool) -> OpenError {
    match errno {
        Errno::EACCES | Errno::EPERM if write => {
            refused(errno, "permission denied for writing; is it read-only?")
        }
        Errno::EROFS => refused(errno, "the file system is read-only"),
        errno => refused(errno, describe(errno)),
    }
}

/// The system's words for an error, in lower case.
pub(crate) fn describe(errno: Errno) -> String {
    if errno.name().is_some() {
        return errno.text().to_owned();
    }
    let text = std::io::Error::from_raw_os_error(errno.raw()).to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    text.to_lowercase()
}
