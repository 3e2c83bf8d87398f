//! Files on a reactor: through its ring where that is faster, by plain system calls where not.
//!
//! With a ring a file takes a place in the ring's table, and memory of the ring's pool goes by its
//! number, so that the kernel looks neither up. Files that live in memory never wait for a disk, and
//! a ring would hand them to a worker thread (tmpfs, Linux 6.18); their transfers are done at once by
//! this thread. So are small transfers of other files' page cache, see `crate::page_cache`.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use gaur_block::{Access, Errno, File, Host, OpenError, Registered, Segments, SegmentsMut, Within};
use io_uring::{opcode, squeue, types};

use crate::blocking::BlockingFile;
use crate::context;
use crate::iovecs::Iovecs;
use crate::nbd::{OwnLink, Via};
use crate::op::Op;
use crate::open::OpenFile;
use crate::page_cache::{CachedReads, CachedWrites};
use crate::reactor::Core;
use crate::ring::Ring;
use crate::syscall;
use crate::whole::{Raw, file_by_raw, part_of};

/// Opens files for the reactor of the calling thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReactorHost;

impl Host for ReactorHost {
    type File = ReactorFile;

    async fn open_within(
        &self,
        name: &Path,
        within: Within<'_>,
        access: Access,
    ) -> Result<ReactorFile, OpenError> {
        OpenFile::open_within(name, within, access).map(ReactorFile::new)
    }
}

/// How a thread uses files that are open: each makes handles of its own.
pub trait ThreadFile: File + Sized {
    /// The calling thread's handle of a file.
    fn of(file: OpenFile) -> Self;

    /// The calling thread's handles of files that many images share. It has one of each, however often it asks.
    fn of_shared(files: &Arc<[BlockingFile]>) -> Arc<[Self]>;
}

impl ThreadFile for BlockingFile {
    fn of(file: OpenFile) -> BlockingFile {
        BlockingFile::new(file)
    }

    fn of_shared(files: &Arc<[BlockingFile]>) -> Arc<[BlockingFile]> {
        Arc::clone(files)
    }
}

/// On a thread with a reactor; panics on others.
impl ThreadFile for ReactorFile {
    fn of(file: OpenFile) -> ReactorFile {
        ReactorFile::new(file)
    }

    fn of_shared(files: &Arc<[BlockingFile]>) -> Arc<[ReactorFile]> {
        if files.is_empty() {
            return Arc::from([]);
        }
        let core = context::current();
        if let Some(known) = core.shared_files().of(files) {
            return known;
        }
        let made = files
            .iter()
            .map(|file| ReactorFile::new(file.open_file().clone()));
        let made: Arc<[ReactorFile]> = made.collect();
        core.shared_files().add(files, &made);
        made
    }
}

/// The sets of shared files of which a thread has handles, by where the set is in memory: that stays taken while the
/// entry is there.
#[derive(Default)]
pub(crate) struct SharedFiles(BTreeMap<*const BlockingFile, SharedSet>);

struct SharedSet {
    _set: Weak<[BlockingFile]>,
    handles: Weak<[ReactorFile]>,
}

impl SharedFiles {
    fn of(&self, files: &Arc<[BlockingFile]>) -> Option<Arc<[ReactorFile]>> {
        self.0.get(&files.as_ptr())?.handles.upgrade()
    }

    fn add(&mut self, files: &Arc<[BlockingFile]>, handles: &Arc<[ReactorFile]>) {
        self.0.retain(|_, set| set.handles.strong_count() > 0);
        let set = SharedSet {
            _set: Arc::downgrade(files),
            handles: Arc::downgrade(handles),
        };
        self.0.insert(files.as_ptr(), set);
    }
}

/// A file on the reactor of the thread that made it.
pub struct ReactorFile {
    core: Rc<Core>,
    inline: BlockingFile,
    /// Place in the ring's table of files.
    slot: Option<u32>,
    /// `None` for O_DIRECT.
    cached: Option<(CachedReads, CachedWrites)>,
    /// The thread's own connection to the export that the file is.
    own_link: Option<OwnLink>,
}

impl ReactorFile {
    /// For an open file, which other threads may use too.
    ///
    /// # Panics
    /// When the thread has no reactor.
    pub fn new(file: OpenFile) -> ReactorFile {
        let core = context::current();
        let slot = match file.is_nbd() {
            true => None,
            false => core
                .ring()
                .and_then(|ring| ring.register_file(file.fd().as_raw_fd())),
        };
        let cached = (!file.is_direct()).then(|| (CachedReads::new(), CachedWrites::new()));
        ReactorFile {
            own_link: file.nbd().and_then(OwnLink::start),
            core,
            inline: BlockingFile::new(file),
            slot,
            cached,
        }
    }

    /// The open file, to make another thread's file from.
    pub fn open_file(&self) -> &OpenFile {
        self.inline.open_file()
    }

    /// The ring, unless this file's operations are done by the thread itself.
    fn ring(&self) -> Option<&Ring> {
        if self.open_file().in_memory() {
            None
        } else {
            self.core.ring()
        }
    }

    /// Reads from the page cache now, unless that is left to the ring.
    fn read_cached(&self, offset: u64, into: SegmentsMut<'_>) -> Option<Result<usize, Errno>> {
        let (reads, _) = self.cached.as_ref()?;
        let crowded = self.core.joins_crowd();
        let fd = self.open_file().fd();
        reads.attempt(into.len(), crowded, |flags| {
            syscall::read(fd, offset, into, flags)
        })
    }

    /// Writes to the page cache now, unless that is left to the ring.
    fn write_cached(&self, offset: u64, from: Segments<'_>) -> Option<Result<usize, Errno>> {
        let (_, writes) = self.cached.as_ref()?;
        let crowded = self.core.joins_crowd();
        let fd = self.open_file().fd();
        writes.attempt(from.len(), crowded, |flags| {
            syscall::write(fd, offset, from, flags)
        })
    }

    /// How an operation of `ring` names this memory.
    fn memory_of(&self, ring: &Ring, memory: Segments<'_>) -> Memory<'_> {
        let Some(piece) = memory.single() else {
            return Memory::List(self.core.iovecs().list(memory));
        };
        let (start, len) = (piece.start(), length(piece.len()));
        match ring.buffer_of(start, piece.len()) {
            Some(index) => Memory::Fixed(start, len, index),
            None => Memory::Plain(start, len),
        }
    }

    /// Names this file in the entries for [`ReactorFile::run`].
    fn descriptor(&self) -> types::Fd {
        let plain = self.open_file().fd().as_raw_fd();
        types::Fd(self.slot.map_or(plain, |slot| slot as RawFd))
    }

    /// Runs an operation on `ring` until it ends other than by interruption.
    ///
    /// # Safety
    /// What the entry points to stays valid while the future exists.
    async unsafe fn run(&self, ring: &Ring, entry: squeue::Entry) -> Result<u32, Errno> {
        let mut flags = match self.slot {
            Some(_) => squeue::Flags::FIXED_FILE,
            None => squeue::Flags::empty(),
        };
        loop {
            // SAFETY: the caller's promise.
            match unsafe { Op::new(ring, entry.clone().flags(flags)) }.await {
                Err(Errno::EINTR) => {}
                // It would have to wait: from now on on a worker thread, which may.
                Err(Errno::EAGAIN) => flags |= squeue::Flags::ASYNC,
                result => return result,
            }
        }
    }
}

/// Memory as an operation of the ring names it.
enum Memory<'a> {
    /// Inside the registered buffer of that number.
    Fixed(*mut u8, u32, u16),
    Plain(*mut u8, u32),
    List(Iovecs<'a>),
}

/// A length as the ring wants it; callers keep below `syscall::RW_MAX`.
fn length(len: usize) -> u32 {
    u32::try_from(len).expect("one operation moves less than 2 GiB")
}

impl Raw for ReactorFile {
    fn file(&self) -> &OpenFile {
        self.open_file()
    }

    fn nbd(&self) -> Option<Via<'_>> {
        let export = self.open_file().nbd()?;
        Some(export.via(self.own_link.as_ref()))
    }

    async fn wait<F: Future>(&self, future: F) -> F::Output {
        future.await
    }

    async fn read(&self, offset_bytes: u64, into: SegmentsMut<'_>) -> Result<usize, Errno> {
        let Some(ring) = self.ring() else {
            self.core.take_turn(into.len()).await;
            return self.inline.read(offset_bytes, into).await;
        };
        if let Some(result) = self.read_cached(offset_bytes, into) {
            self.core.take_turn(into.len()).await;
            return result;
        }
        let memory = self.memory_of(ring, *into);
        let fd = self.descriptor();
        let entry = match &memory {
            Memory::Fixed(start, len, index) => opcode::ReadFixed::new(fd, *start, *len, *index)
                .offset(offset_bytes)
                .build(),
            Memory::Plain(start, len) => opcode::Read::new(fd, *start, *len)
                .offset(offset_bytes)
                .build(),
            Memory::List(list) => opcode::Readv::new(fd, list.as_ptr(), list.len() as u32)
                .offset(offset_bytes)
                .build(),
        };
        // SAFETY: the memory may be written to while this future exists, and so long the list lives.
        Ok(unsafe { self.run(ring, entry) }.await? as usize)
    }

    async fn read_registered(&self, offset_bytes: u64, to: Registered) -> Result<usize, Errno> {
        let ring = self.core.ring().ok_or(Errno::EOPNOTSUPP)?;
        let start = registered_start(ring, to)? as *mut u8;
        let len = length(to.len);
        let entry = opcode::ReadFixed::new(self.descriptor(), start, len, to.index);
        // SAFETY: the address is one that the kernel checks against the registered buffer.
        let count = unsafe { self.run(ring, entry.offset(offset_bytes).build()) };
        Ok(count.await? as usize)
    }

    async fn zero_registered(&self, to: Registered) -> Result<(), Errno> {
        let ring = self.core.ring().ok_or(Errno::EOPNOTSUPP)?;
        let zeros = self.core.zeros()?;
        let mut done = 0;
        while done < to.len {
            let rest = part_of(to, done);
            let start = registered_start(ring, rest)? as *mut u8;
            let fd = types::Fd(zeros.as_raw_fd());
            let entry = opcode::ReadFixed::new(fd, start, length(rest.len), to.index).build();
            // SAFETY: the address is one that the kernel checks against the registered buffer.
            match unsafe { Op::run(ring, entry) }.await? {
                0 => return Err(Errno::EIO),
                count => done += count as usize,
            }
        }
        Ok(())
    }

    async fn write(&self, offset_bytes: u64, from: Segments<'_>) -> Result<usize, Errno> {
        let Some(ring) = self.ring() else {
            self.core.take_turn(from.len()).await;
            return self.inline.write(offset_bytes, from).await;
        };
        if let Some(result) = self.write_cached(offset_bytes, from) {
            self.core.take_turn(from.len()).await;
            return result;
        }
        let memory = self.memory_of(ring, from);
        let fd = self.descriptor();
        let entry = match &memory {
            Memory::Fixed(start, len, index) => opcode::WriteFixed::new(fd, *start, *len, *index)
                .offset(offset_bytes)
                .build(),
            Memory::Plain(start, len) => opcode::Write::new(fd, *start, *len)
                .offset(offset_bytes)
                .build(),
            Memory::List(list) => opcode::Writev::new(fd, list.as_ptr(), list.len() as u32)
                .offset(offset_bytes)
                .build(),
        };
        // SAFETY: the memory may be read while this future exists, and so long the list lives.
        Ok(unsafe { self.run(ring, entry) }.await? as usize)
    }

    async fn write_registered(&self, offset_bytes: u64, from: Registered) -> Result<usize, Errno> {
        let ring = self.core.ring().ok_or(Errno::EOPNOTSUPP)?;
        let start = registered_start(ring, from)? as *const u8;
        let len = length(from.len);
        let entry = opcode::WriteFixed::new(self.descriptor(), start, len, from.index);
        // SAFETY: the address is one that the kernel checks against the registered buffer.
        let count = unsafe { self.run(ring, entry.offset(offset_bytes).build()) };
        Ok(count.await? as usize)
    }

    async fn fallocate(&self, mode: libc::c_int, offset: u64, len: u64) -> Result<(), Errno> {
        let Some(ring) = self.ring() else {
            return self.inline.fallocate(mode, offset, len).await;
        };
        let entry = opcode::Fallocate::new(self.descriptor(), len);
        // SAFETY: the entry points to nothing.
        let result = unsafe { self.run(ring, entry.offset(offset).mode(mode).build()) };
        result.await.map(drop)
    }

    async fn fdatasync(&self) -> Result<(), Errno> {
        let Some(ring) = self.ring() else {
            return self.inline.fdatasync().await;
        };
        let entry = opcode::Fsync::new(self.descriptor()).flags(types::FsyncFlags::DATASYNC);
        // SAFETY: the entry points to nothing.
        unsafe { self.run(ring, entry.build()) }.await.map(drop)
    }

    async fn ftruncate(&self, len_bytes: u64) -> Result<(), Errno> {
        let Some(ring) = self.ring().filter(|ring| ring.has_ftruncate()) else {
            return self.inline.ftruncate(len_bytes).await;
        };
        let entry = opcode::Ftruncate::new(self.descriptor(), len_bytes);
        // SAFETY: the entry points to nothing.
        unsafe { self.run(ring, entry.build()) }.await.map(drop)
    }
}

/// The kernel's name for the first byte of part of a registered buffer.
fn registered_start(ring: &Ring, part: Registered) -> Result<u64, Errno> {
    let (base, len_bytes) = ring.buffer_base(part.index);
    let end = part
        .offset
        .checked_add(part.len as u64)
        .ok_or(Errno::EINVAL)?;
    if len_bytes.is_some_and(|len_bytes| end > len_bytes) {
        return Err(Errno::EINVAL);
    }
    base.checked_add(part.offset).ok_or(Errno::EINVAL)
}

impl Drop for ReactorFile {
    fn drop(&mut self) {
        if let (Some(slot), Some(ring)) = (self.slot, self.core.ring()) {
            ring.unregister_file(slot);
        }
    }
}

impl std::fmt::Debug for ReactorFile {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "ReactorFile({:?})", self.open_file())
    }
}

file_by_raw!(ReactorFile, |file, len_bytes| file.core.buffer(len_bytes));
