//! Blocking access to the guest's view of an image.

use gaur_block::{Device, Errno, Payload, Request, Source, Target};
use gaur_engine::{CompressedCluster, Image, ImageError, Job, MapExtent, Queue};
use gaur_reactor::{BlockingFile, OpenFile, block_on};

use crate::failure::Failure;

/// An open image for one thread.
pub struct Guest(Queue<BlockingFile>);

impl Guest {
    /// Around a queue of the image.
    pub fn new(queue: Queue<BlockingFile>) -> Guest {
        Guest(queue)
    }

    /// The image.
    pub fn image(&self) -> &Image {
        self.0.image()
    }

    /// The failure to do `what` with the image called `name`, with what went wrong where its bytes are.
    pub fn failed(&self, name: &str, what: &str, errno: Errno) -> Failure {
        let files = self.0.files().map(BlockingFile::open_file);
        let trouble = { files }.find_map(OpenFile::trouble);
        Failure::request(self.image(), name, what, errno).because(trouble)
    }

    /// Fills `buffer` from guest offset `offset_bytes`.
    pub fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), Errno> {
        let payload = Payload::Read(Target::memory(buffer));
        block_on(self.0.submit(Request::Read { offset_bytes }, payload))
    }

    /// Stores `bytes` at guest offset `offset_bytes`.
    pub fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), Errno> {
        let request = Request::Write {
            offset_bytes,
            fua: false,
        };
        let payload = Payload::Write(Source::memory(bytes));
        block_on(self.0.submit(request, payload))
    }

    /// Stores the cluster `plain` at guest offset `offset_bytes` as `packed`, which was made of it.
    pub fn write_compressed(
        &self,
        offset_bytes: u64,
        plain: &[u8],
        packed: &CompressedCluster,
    ) -> Result<(), Errno> {
        block_on(self.0.write_compressed(offset_bytes, plain, packed))
    }

    /// Makes a range read as zeros; its space may be given back.
    pub fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), Errno> {
        let request = Request::WriteZeroes {
            offset_bytes,
            len_bytes,
            fua: false,
            may_unmap: true,
        };
        block_on(self.0.submit(request, Payload::None))
    }

    /// What is at guest offset `offset_bytes`, at most `len_bytes` of it.
    pub fn map(&self, offset_bytes: u64, len_bytes: u64) -> Result<MapExtent, Errno> {
        block_on(self.0.map(offset_bytes, len_bytes))
    }

    /// Makes everything written so far durable.
    pub fn flush(&self) -> Result<(), Errno> {
        block_on(self.0.submit(Request::Flush, Payload::None))
    }

    /// Changes the size the guest sees, unless the job is cancelled.
    pub fn resize(&self, size_bytes: u64, shrink: bool, job: &Job) -> Result<(), ImageError> {
        block_on(self.0.resize(size_bytes, shrink, job))
    }

    /// Ends the work on an image; no other queue of it is in use any more.
    pub fn close(self) -> Result<(), ImageError> {
        block_on(self.0.close())
    }
}
