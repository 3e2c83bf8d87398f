//! An open disk, and how it is made, opened and closed.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_engine::{Bases, ErrorKind, Image, ImageFiles, OpenOptions};
use gaur_reactor::{BlockingFile, BlockingHost, ThreadFile, block_on};

use crate::async_queue::{AsyncConfig, AsyncQueue};
use crate::blocking::BlockingQueue;
use crate::error::{Error, Result};
use crate::queue::Queue;

/// An open disk image with its backing chain. It has no requests; those go through queues, of which each
/// thread has its own. Clones are the same open disk.
#[derive(Clone)]
pub struct Disk {
    shared: Arc<Shared>,
}

/// The backing chains that disks may share.
pub type SharedBases = Bases<BlockingFile>;

/// What all queues of a disk share. It is closed when the last of them is gone.
pub(crate) struct Shared {
    name: String,
    image: Arc<Image>,
    files: ImageFiles<BlockingFile>,
    closed: AtomicBool,
}

impl Disk {
    /// Opens the image at `path` and the chain of its backing files, with the locks by which QEMU and
    /// Gaur keep two programs from writing one image.
    ///
    /// # Errors
    /// [`ErrorKind::Locked`] when another program has the image open, [`ErrorKind::NotFound`],
    /// [`ErrorKind::Corrupt`] and the others: the image is as it was.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Disk> {
        Disk::open_sharing(path, options, &SharedBases::default())
    }

    /// The same; the backing chain is shared with disks that were opened with the same `bases` and are open still, if it is
    /// the same: one set of open files and one bounded set of caches serve any number of overlays, and another one
    /// costs no more however deep the chain is. See [`Bases`] for what has to be the same.
    ///
    /// A request that some queue has begun may hold what another disk's request waits for, so all of them have to be
    /// driven to their ends.
    ///
    /// # Errors
    /// Those of [`Disk::open`].
    pub fn open_sharing(
        path: impl AsRef<Path>,
        options: &OpenOptions,
        bases: &SharedBases,
    ) -> Result<Disk> {
        let path = path.as_ref();
        let opening = gaur_engine::open_sharing(&BlockingHost, path, options, bases);
        let opened = block_on(opening)?;
        let shared = Shared {
            name: path.display().to_string(),
            image: opened.image,
            files: opened.files,
            closed: AtomicBool::new(false),
        };
        Ok(Disk {
            shared: Arc::new(shared),
        })
    }

    /// A queue of calls that block, for any one thread at a time. It needs no reactor.
    pub fn blocking(&self) -> BlockingQueue {
        BlockingQueue::new(Queue::new(&self.shared))
    }

    /// A queue on the reactor of the calling thread, for any number of requests at once.
    ///
    /// # Panics
    /// When the thread has no [`Reactor`](crate::Reactor).
    pub fn queue(&self) -> Queue {
        Queue::new(&self.shared)
    }

    /// Starts threads that serve requests of any executor.
    ///
    /// # Errors
    /// When the system gives no thread, or a thread no reactor.
    pub fn start(&self, config: &AsyncConfig) -> Result<AsyncQueue> {
        AsyncQueue::start(self, config)
    }

    /// Size of the disk in bytes, as of now.
    pub fn size_bytes(&self) -> u64 {
        self.shared.image.size_bytes()
    }

    /// What the engine knows of the open image: its layers, caches, policies.
    pub fn image(&self) -> &Image {
        &self.shared.image
    }

    /// Makes everything durable, gives unused space back and lets other programs have the image. Call it
    /// once all queues and clones are gone. A disk that is merely dropped is closed with the last of
    /// them, and its errors are lost; that of a program that is killed may have leaked clusters.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] when the disk is still in use, and then it is closed when it is not any
    /// more; else what the last writes have met.
    pub fn close(self) -> Result<()> {
        match Arc::into_inner(self.shared) {
            Some(shared) => shared.close(),
            None => {
                let text = "the disk is still in use, by a queue or a clone";
                Err(Error::new(ErrorKind::InvalidInput, text))
            }
        }
    }
}

impl Disk {
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Shared {
    pub(crate) fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// A queue of the engine for the calling thread.
    pub(crate) fn queue<F: ThreadFile>(&self) -> gaur_engine::Queue<F> {
        let own = self.files.own.iter();
        self.image.queue(ImageFiles {
            own: own.map(|file| F::of(file.open_file().clone())).collect(),
            below: F::of_shared(&self.files.below),
        })
    }

    fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let closed = block_on(self.queue::<BlockingFile>().close());
        closed.map_err(|error| Error::from(error).context(&self.name))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // What is left undone is a leak at worst, which the next to open the image is told of.
        let _ = self.close();
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Disk").field(&self.shared.image).finish()
    }
}
