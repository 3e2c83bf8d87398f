//! The blocking host: the thread that asks does the work, by `pread(2)` and its like.
//!
//! Its futures are ready when they are first polled, so any executor drives them; [`block_on`] is
//! the smallest. The command line's offline verbs run on it, tests do, and a server does where
//! io_uring is not allowed.

use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use gaur_block::{Access, Errno, Host, OpenError, Segments, SegmentsMut, Within};

use crate::context;
use crate::memory::Buffer;
use crate::nbd::Via;
use crate::open::OpenFile;
use crate::syscall;
use crate::whole::{Raw, file_by_raw};

/// Opens files for blocking transfers.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockingHost;

impl Host for BlockingHost {
    type File = BlockingFile;

    async fn open_within(
        &self,
        name: &Path,
        within: Within<'_>,
        access: Access,
    ) -> Result<BlockingFile, OpenError> {
        OpenFile::open_within(name, within, access).map(BlockingFile::new)
    }
}

/// A file whose operations block the calling thread. Any number of threads may use clones.
#[derive(Clone, Debug)]
pub struct BlockingFile {
    file: OpenFile,
}

impl BlockingFile {
    /// For an open file, which may be in use elsewhere too.
    pub fn new(file: OpenFile) -> BlockingFile {
        BlockingFile { file }
    }

    /// The open file, to make another thread's file from.
    pub fn open_file(&self) -> &OpenFile {
        &self.file
    }

    /// Whether the file is an NBD export whose name chose a metadata context.
    pub fn has_nbd_context(&self) -> bool {
        self.file.nbd().is_some_and(|export| export.has_context())
    }

    /// The run of blocks at an offset of an NBD export as the metadata context says that its name chose
    /// ([`Remote::context`]): its length in bytes, and the flags of the context. `EOPNOTSUPP` when its name chose none.
    ///
    /// [`Remote::context`]: crate::nbd::Remote::context
    pub fn nbd_context_at(&self, offset_bytes: u64) -> Result<(u64, u32), Errno> {
        let export = self.file.nbd().filter(|export| export.has_context());
        let export = export.ok_or(Errno::EOPNOTSUPP)?;
        block_on(export.via(None).context_at(offset_bytes))
    }
}

file_by_raw!(BlockingFile, |_, len_bytes| Buffer::from_system(len_bytes));

impl Raw for BlockingFile {
    fn file(&self) -> &OpenFile {
        &self.file
    }

    fn nbd(&self) -> Option<Via<'_>> {
        self.file.nbd().map(|export| export.via(None))
    }

    async fn wait<F: Future>(&self, future: F) -> F::Output {
        park_until_ready(future)
    }

    async fn read(&self, offset_bytes: u64, into: SegmentsMut<'_>) -> Result<usize, Errno> {
        syscall::read(self.file.fd(), offset_bytes, into, 0)
    }

    async fn write(&self, offset_bytes: u64, from: Segments<'_>) -> Result<usize, Errno> {
        syscall::write(self.file.fd(), offset_bytes, from, 0)
    }

    async fn fallocate(&self, mode: libc::c_int, offset: u64, len: u64) -> Result<(), Errno> {
        syscall::fallocate(self.file.fd(), mode, offset, len)
    }

    async fn fdatasync(&self) -> Result<(), Errno> {
        syscall::fdatasync(self.file.fd())
    }

    async fn ftruncate(&self, len_bytes: u64) -> Result<(), Errno> {
        syscall::ftruncate(self.file.fd(), len_bytes)
    }
}

struct Unpark {
    thread: Thread,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.thread.unpark();
    }
}

/// Drives a future on this thread, which sleeps while the future waits for another thread.
///
/// # Panics
/// When the future has to wait and the thread has a reactor: the thread would not run its reactor.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    if let Poll::Ready(output) = future
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()))
    {
        return output;
    }
    assert!(
        !context::has_reactor(),
        "a thread with a reactor waits by Reactor::block_on"
    );
    park_until_ready(future)
}

/// Drives a future that other threads bring on.
fn park_until_ready<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark {
        thread: thread::current(),
    }));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        thread::park();
    }
}
