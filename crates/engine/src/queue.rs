//! One thread's way into an image: file handles, memory, and the requests of an export.
//!
//! Branching happens here and loops below: a request is checked against the size, the mode and the
//! poison, and then handed to the flow that serves it.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use gaur_block::{Device, DeviceLimits, Errno, File, Payload, Request, Source, Status};

use crate::compress::Decompressor;
use crate::image::{Image, Qcow2, Writer};
use crate::metadata::alloc::Run;
use crate::metadata::grace::{Inside, Member};
use crate::pool::Pool;
use crate::read::Decompressed;
use crate::sync::atomic::Ordering;
use crate::tables::LocalRun;
use crate::writeback::Staging;

/// A queue of an image, for one thread. Requests may be in flight at once; they are ordered only as
/// far as the caller waits for one before it submits the next.
pub struct Queue<F: File> {
    pub(crate) image: Arc<Image>,
    pub(crate) files: Vec<F>,
    pub(crate) pool: Pool<F>,
    pub(crate) id: usize,
    /// How its requests are counted; `None` if the image is not written to.
    pub(crate) member: Option<Member>,
    /// Clusters it may use without asking the allocator.
    pub(crate) local: LocalRun,
    /// Lists of passes that are over.
    pub(crate) staging: RefCell<Vec<Staging<F>>>,
    pub(crate) decompressor: Decompressor,
    pub(crate) decompressed: RefCell<Vec<Decompressed<F>>>,
}

/// Longest payload of one request in bytes.
const TRANSFER_BYTES_MAX: u32 = 32 << 20;

impl<F: File> Queue<F> {
    pub(crate) fn new(image: Arc<Image>, files: Vec<F>, id: usize) -> Queue<F> {
        let member = image.writer.as_ref().map(|writer| writer.grace.join());
        Queue {
            image,
            files,
            pool: Pool::new(),
            id,
            member,
            local: LocalRun(Cell::new(Run::EMPTY)),
            staging: RefCell::default(),
            decompressor: Decompressor::default(),
            decompressed: RefCell::default(),
        }
    }

    /// A function that gives the memory back for which no request had a use since it was called last,
    /// to be called on this thread; `false` when the queue is gone.
    pub fn trimmer(&self) -> impl Fn() -> bool + 'static
    where
        F: 'static,
    {
        self.pool.trimmer()
    }

    /// The image this queue serves.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// The handle on the file that is written to.
    pub(crate) fn top_file(&self) -> &F {
        // `Image::queue` asserts one file per layer, and there is always a top layer.
        &self.files[0]
    }

    /// The mapping of the top layer, and what is needed to change it; `None` for a raw image.
    pub(crate) fn top(&self) -> Option<(&Qcow2, &Writer)> {
        let qcow2 = self.image.layers.first()?.qcow2.as_ref()?;
        Some((qcow2, self.image.writer.as_ref()?))
    }

    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        let writer = self.image.writer.as_ref()?;
        Some(writer.grace.enter(self.member.as_ref()?))
    }

    /// The same for a request of a guest, which waits while the whole image is being switched.
    pub(crate) async fn enter_open(&self) -> Option<Inside<'_>> {
        let writer = self.image.writer.as_ref()?;
        let member = self.member.as_ref()?;
        loop {
            let inside = writer.grace.enter(member);
            // Whoever closes the gate looks for those inside afterwards.
            if !writer.grace.gate.is_closed() {
                return Some(inside);
            }
            drop(inside);
            writer.grace.gate.wait().await;
        }
    }

    fn check_range(&self, offset: u64, len: u64, beyond: Errno) -> Result<(), Errno> {
        match offset.checked_add(len) {
            Some(end) if end <= self.image.size_bytes() => Ok(()),
            _ => Err(beyond),
        }
    }

    fn check_writable(&self) -> Result<(), Errno> {
        if self.image.read_only {
            return Err(Errno::EROFS);
        }
        match self.image.poisoned() {
            Some(errno) => Err(errno),
            None => Ok(()),
        }
    }

    async fn serve(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        match (request, payload) {
            (Request::Read { offset_bytes }, Payload::Read(target)) => {
                let _inside = self.enter_open().await;
                self.check_range(offset_bytes, target.len() as u64, Errno::EINVAL)?;
                self.read(offset_bytes, target).await
            }
            (Request::Write { offset_bytes, fua }, Payload::Write(source)) => {
                self.serve_write(offset_bytes, source).await?;
                self.flush_if(fua).await
            }
            (
                Request::WriteZeroes {
                    offset_bytes,
                    len_bytes,
                    fua,
                    may_unmap,
                },
                Payload::None,
            ) => {
                self.serve_zeroes(offset_bytes, len_bytes, may_unmap)
                    .await?;
                self.flush_if(fua).await
            }
            (
                Request::Discard {
                    offset_bytes,
                    len_bytes,
                },
                Payload::None,
            ) => self.serve_discard(offset_bytes, len_bytes).await,
            (Request::Flush, Payload::None) => self.serve_flush().await,
            _ => Err(Errno::EINVAL),
        }
    }

    async fn serve_write(&self, offset: u64, source: Source<'_>) -> Result<(), Errno> {
        {
            let _inside = self.enter_open().await;
            // Whoever waited for a switch must not go on where it failed.
            self.check_writable()?;
            self.check_range(offset, source.len() as u64, Errno::ENOSPC)?;
            match self.top() {
                Some((qcow2, writer)) => {
                    self.announce(writer).await?;
                    self.write(qcow2, writer, offset, source).await?;
                }
                None => self.write_raw(offset, source).await?,
            }
        }
        self.relieve().await
    }

    async fn serve_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Result<(), Errno> {
        {
            let _inside = self.enter_open().await;
            // Whoever waited for a switch must not go on where it failed.
            self.check_writable()?;
            self.check_range(offset, len, Errno::ENOSPC)?;
            match self.top() {
                Some((qcow2, writer)) => {
                    self.announce(writer).await?;
                    self.zero(qcow2, writer, offset, len, may_unmap).await?;
                }
                None => self.zero_raw(offset, len, may_unmap).await?,
            }
        }
        self.relieve().await
    }

    async fn serve_discard(&self, offset: u64, len: u64) -> Result<(), Errno> {
        {
            let _inside = self.enter_open().await;
            // Whoever waited for a switch must not go on where it failed.
            self.check_writable()?;
            self.check_range(offset, len, Errno::EINVAL)?;
            match self.top() {
                Some((qcow2, writer)) => {
                    self.announce(writer).await?;
                    self.discard(qcow2, writer, offset, len).await?;
                }
                None => self.discard_raw(offset, len).await?,
            }
        }
        self.relieve().await
    }

    async fn serve_flush(&self) -> Result<(), Errno> {
        if self.image.read_only {
            return Ok(());
        }
        self.check_writable()?;
        self.flush_all().await
    }

    async fn flush_if(&self, fua: bool) -> Result<(), Errno> {
        if fua { self.flush_all().await } else { Ok(()) }
    }
}

impl<F: File> Device for Queue<F> {
    fn size_bytes(&self) -> u64 {
        self.image.size_bytes.load(Ordering::Acquire)
    }

    fn limits(&self) -> DeviceLimits {
        let geometry = self
            .image
            .layers
            .first()
            .and_then(|layer| layer.qcow2.as_ref());
        let (preferred, discard) = match geometry {
            Some(Qcow2 { geometry, .. }) => {
                let writer = self.image.writer.as_ref();
                let discard = writer.map_or(geometry.cluster_size(), |writer| {
                    writer.discard_unit(geometry)
                });
                (geometry.subcluster_size().max(4096) as u32, discard as u32)
            }
            None => (4096, 4096),
        };
        DeviceLimits {
            preferred_block: preferred,
            discard_block: discard,
            max_transfer: TRANSFER_BYTES_MAX,
            read_only: self.image.read_only,
        }
    }

    async fn submit(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        let result = self.serve(request, payload).await;
        if self.image.take_corrupt() {
            self.mark_corrupt().await;
        }
        result
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Status, Errno> {
        self.check_range(offset_bytes, len_bytes, Errno::EINVAL)?;
        let extent = self.map(offset_bytes, len_bytes).await?;
        Ok(Status {
            len_bytes: extent.len_bytes,
            // As QEMU: what has no bytes in a file is a hole.
            allocated: extent.data,
            zero: extent.zero,
        })
    }
}

impl<F: File> Drop for Queue<F> {
    /// What the queue had reserved and not used is free again.
    fn drop(&mut self) {
        if let Some(writer) = &self.image.writer {
            self.give_back_local(writer);
            writer.alloc.lock().unreserve(self.id);
            if let Some(member) = &self.member {
                writer.grace.leave(member);
            }
        }
    }
}
