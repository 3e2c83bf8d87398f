//! The active image: a writable view of an open qcow2 image, through one queue.
//!
//! [`Queue`] checks a request and hands it here; every flow that changes mappings, counts or the header
//! is a method of [`Active`], in the file of that flow. Made for a request, or for a whole operation.

use gaur_block::{Errno, File, Source, Target};
use gaur_format::geometry::Geometry;

use crate::align;
use crate::image::{Image, Qcow2, Writer};
use crate::queue::{Change, Queue};
use crate::range::GuestRange;
use crate::read::MappedLayer;

/// The top layer of an image that is open for writing, and the queue that changes it.
pub(crate) struct Active<'q, F: File> {
    pub(crate) queue: &'q Queue<F>,
    pub(crate) image: &'q Image,
    pub(crate) qcow2: &'q Qcow2,
    pub(crate) writer: &'q Writer,
}

impl<F: File> Clone for Active<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: File> Copy for Active<'_, F> {}

impl<'q, F: File> Active<'q, F> {
    /// `None` for a raw image, and for one that is not written to.
    pub(crate) fn of(queue: &'q Queue<F>) -> Option<Active<'q, F>> {
        let image = queue.image();
        Some(Active {
            queue,
            image,
            qcow2: image.top.qcow2.as_ref()?,
            writer: image.writer.as_ref()?,
        })
    }

    /// Serves a request for a range inside the image.
    pub(crate) async fn change(&self, range: GuestRange, change: Change<'_>) -> Result<(), Errno> {
        match change {
            Change::Zero(unmap) if self.has_raw_data() => self.zero_raw_data(range, unmap).await,
            Change::Discard if self.has_raw_data() => self.discard_raw_data(range).await,
            Change::Write(source) => self.write(range.start, source).await,
            // The format has no compressed clusters in an encrypted image.
            Change::Packed { plain, .. } if self.is_encrypted() => {
                self.write(range.start, plain).await
            }
            Change::Packed { packed, plain } => self.write_packed(range.start, packed, plain).await,
            Change::Zero(unmap) => self.zero(range, unmap).await,
            Change::Discard => self.discard(range).await,
        }
    }

    /// Whether guest data is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.qcow2.cipher.is_some()
    }

    pub(crate) fn geometry(&self) -> &'q Geometry {
        &self.qcow2.geometry
    }

    /// The top layer as it is read.
    pub(crate) fn layer(&self) -> MappedLayer<'q, F> {
        MappedLayer {
            queue: self.queue,
            depth: 0,
            qcow2: self.qcow2,
            file: self.queue.top_file(),
        }
    }

    /// Reads bytes of the image file.
    pub(crate) async fn read_file(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        let (file, pool) = (self.queue.top_file(), &self.queue.pool);
        align::read(file, pool, offset, Target::memory(bytes)).await
    }

    /// Writes bytes of the image file.
    pub(crate) async fn write_file(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let (file, pool) = (self.queue.top_file(), &self.queue.pool);
        align::write(file, pool, &self.image.locks, offset, Source::memory(bytes)).await
    }
}
