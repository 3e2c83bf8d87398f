//! One thread's way into an image: file handles, memory, and the requests of an export.
//!
//! Branching happens here and loops below: a request is checked against the size, the mode and the
//! poison, and then handed to the flow that serves it.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use gaur_block::{Device, DeviceLimits, Errno, File, Payload, Request, Source, Status};

use crate::active::Active;
use crate::base::ImageFiles;
use crate::compress::Decompressor;
use crate::image::{Image, Qcow2};
use crate::metadata::alloc::Run;
use crate::metadata::epochs::{EpochGuard, EpochHandle};
use crate::pool::Pool;
use crate::range::GuestRange;
use crate::sync::atomic::Ordering;
use crate::write::PackedTail;
use crate::writeback::Staging;

/// A queue of an image, for one thread. Requests may be in flight at once; they are ordered only as
/// far as the caller waits for one before it submits the next.
pub struct Queue<F: File> {
    pub(crate) image: Arc<Image>,
    pub(crate) files: ImageFiles<F>,
    pub(crate) pool: Pool<F>,
    pub(crate) id: usize,
    /// How its requests are counted; `None` if the image is not written to.
    pub(crate) epoch_handle: Option<EpochHandle>,
    /// Clusters it may use without asking the allocator.
    pub(crate) local: Cell<Run>,
    /// Where its next compressed cluster goes.
    pub(crate) packed: RefCell<PackedTail>,
    /// Lists of passes that are over.
    pub(crate) staging: RefCell<Vec<Staging<F>>>,
    pub(crate) decompressor: Decompressor,
    /// Guest offset behind the cluster that was decompressed last.
    pub(crate) decompressed_end: Cell<u64>,
    /// Bytes of copies under way that reads have begun.
    pub(crate) copying_bytes: Cell<u64>,
}

/// What a request changes.
pub(crate) enum Change<'a> {
    Write(Source<'a>),
    /// A cluster.
    Packed {
        packed: &'a [u8],
        plain: Source<'a>,
    },
    Zero(Unmap),
    Discard,
}

/// Whether zeros may take space away from the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmap {
    Allowed,
    Forbidden,
}

/// Longest payload of one request in bytes.
const TRANSFER_BYTES_MAX: u32 = 32 << 20;

impl<F: File> Queue<F> {
    pub(crate) fn new(image: Arc<Image>, files: ImageFiles<F>, id: usize) -> Queue<F> {
        let epoch_handle = image.writer.as_ref().map(|writer| writer.epochs.join());
        Queue {
            image,
            files,
            pool: Pool::new(),
            id,
            epoch_handle,
            local: Cell::new(Run::EMPTY),
            packed: RefCell::default(),
            staging: RefCell::default(),
            decompressor: Decompressor::default(),
            decompressed_end: Cell::new(0),
            copying_bytes: Cell::new(0),
        }
    }

    /// Its files, those of the top layer first.
    pub fn files(&self) -> impl Iterator<Item = &F> {
        self.files.iter()
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
        &self.files.own[0]
    }

    /// The handle on the file that guest data are written to.
    pub(crate) fn data_file(&self) -> &F {
        match self.image.data_file() {
            None => self.top_file(),
            // `Image::queue` asserts one file per data file.
            Some(data) => &self.files.own[data.index],
        }
    }

    /// The writable view of the image; `None` for a raw one, and one that is open read-only.
    pub(crate) fn active(&self) -> Option<Active<'_, F>> {
        Active::of(self)
    }

    pub(crate) fn enter(&self) -> Option<EpochGuard<'_>> {
        let writer = self.image.writer.as_ref()?;
        Some(writer.epochs.enter(self.epoch_handle.as_ref()?))
    }

    /// The same for a request of a guest, which waits while the whole image is being switched.
    pub(crate) async fn enter_open(&self) -> Option<EpochGuard<'_>> {
        let gate = &self.image.writer.as_ref()?.epochs.gate;
        loop {
            let inside = self.enter()?;
            // The task that closes the gate looks for requests inside afterwards.
            if !gate.is_closed() {
                return Some(inside);
            }
            drop(inside);
            gate.wait().await;
        }
    }

    /// Checks that a range lies inside the image.
    pub(crate) fn check_range(
        &self,
        range: Option<GuestRange>,
        beyond: Errno,
    ) -> Result<GuestRange, Errno> {
        let inside = range.filter(|range| range.end() <= self.image.size_bytes());
        inside.ok_or(beyond)
    }

    pub(crate) fn check_writable(&self) -> Result<(), Errno> {
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
            (Request::Read { offset_bytes }, Payload::Read(target))
                if self.image.options.copy_on_read =>
            {
                // On the heap, so that other requests do not carry its state.
                Box::pin(self.serve_copying_read(offset_bytes, target)).await
            }
            (Request::Read { offset_bytes }, Payload::Read(target)) => {
                let _epoch = self.enter_open().await;
                let range = GuestRange::checked(offset_bytes, target.len() as u64);
                let range = self.check_range(range, Errno::EINVAL)?;
                self.read(range.start, target).await
            }
            (Request::Write { offset_bytes, fua }, Payload::Write(source)) => {
                let range = GuestRange::checked(offset_bytes, source.len() as u64);
                let change = self.image.detect_zeroes(source);
                self.serve_change(range, change).await?;
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
                let range = GuestRange::checked(offset_bytes, len_bytes);
                let change = Change::Zero(match may_unmap {
                    true => Unmap::Allowed,
                    false => Unmap::Forbidden,
                });
                self.serve_change(range, change).await?;
                self.flush_if(fua).await
            }
            (
                Request::Discard {
                    offset_bytes,
                    len_bytes,
                },
                Payload::None,
            ) => {
                let range = GuestRange::checked(offset_bytes, len_bytes);
                self.serve_change(range, Change::Discard).await
            }
            (Request::Flush, Payload::None) => self.serve_flush().await,
            _ => Err(Errno::EINVAL),
        }
    }

    /// Ends a request: notes how, and says in the header what it found.
    pub(crate) async fn end(
        &self,
        request: Request,
        payload_bytes: u64,
        result: Result<(), Errno>,
    ) -> Result<(), Errno> {
        self.image.note(request, payload_bytes, result);
        if self.image.take_corrupt()
            && let Some(active) = self.active()
        {
            active.mark_corrupt().await;
        }
        result
    }

    /// Changes a range of the image, and writes metadata back if that is due.
    pub(crate) async fn serve_change(
        &self,
        range: Option<GuestRange>,
        change: Change<'_>,
    ) -> Result<(), Errno> {
        let active = self.active();
        {
            let _epoch = self.enter_open().await;
            // A request that waited for a switch must not go on where it failed.
            self.check_writable()?;
            let beyond = match change {
                Change::Discard => Errno::EINVAL,
                _ => Errno::ENOSPC,
            };
            let range = self.check_range(range, beyond)?;
            match active {
                Some(active) => {
                    active.announce_change().await?;
                    active.mark_change(range).await?;
                    active.change(range, change).await?;
                }
                None => match &self.image.top.container {
                    // On the heap, so that requests to plain images do not carry its state.
                    Some(container) => {
                        Box::pin(self.change_container(container, range, change)).await?;
                    }
                    None => self.change_raw(range, change).await?,
                },
            }
        }
        if let Some(active) = active {
            active.relieve().await;
        }
        Ok(())
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
        let geometry = self.image.top.qcow2.as_ref();
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
        let payload_bytes = payload.len() as u64;
        let result = self.serve(request, payload).await;
        self.end(request, payload_bytes, result).await
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Status, Errno> {
        let range = GuestRange::checked(offset_bytes, len_bytes);
        self.check_range(range, Errno::EINVAL)?;
        self.map(offset_bytes, len_bytes).await.map(Status::from)
    }

    async fn allocation_depth(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<(u64, u32), Errno> {
        let range = GuestRange::checked(offset_bytes, len_bytes);
        self.check_range(range, Errno::EINVAL)?;
        let extent = self.map(offset_bytes, len_bytes).await?;
        let depth = if extent.present { extent.depth + 1 } else { 0 };
        Ok((extent.len_bytes, depth))
    }

    /// A mark in an L2 entry is enough, which version 2 has not, and a data file that is raw cannot do with.
    fn zeroes_fast(&self) -> bool {
        let header = self.image.top.header();
        header.is_some_and(|header| header.version >= gaur_format::Version::V3)
            && self.image.top.data_file.is_none()
    }
}

impl<F: File> Drop for Queue<F> {
    /// What the queue had reserved and not used is free again.
    fn drop(&mut self) {
        if let Some(active) = self.active() {
            active.give_back_packed();
            active.give_back_local();
            active.writer.alloc.lock().unreserve(self.id);
            if let Some(epoch_handle) = &self.epoch_handle {
                active.writer.epochs.leave(epoch_handle);
            }
        }
    }
}
