//! Requests to a raw image: the file's bytes are the disk's.

use gaur_block::{Errno, File, Source};

use crate::align;
use crate::queue::{Change, Queue, Unmap};

impl<F: File> Queue<F> {
    /// Serves a request for a range inside the image.
    pub(crate) async fn change_raw(
        &self,
        offset: u64,
        len: u64,
        change: Change<'_>,
    ) -> Result<(), Errno> {
        match change {
            Change::Write(source) => self.write_raw(offset, source).await,
            Change::Zero(unmap) => self.zero_raw(offset, len, unmap == Unmap::Allowed).await,
            Change::Discard => self.discard_raw(offset, len).await,
        }
    }

    async fn write_raw(&self, offset: u64, source: Source<'_>) -> Result<(), Errno> {
        let (file, locks) = (self.top_file(), &self.image.locks);
        align::write(file, &self.pool, locks, offset, source).await
    }

    async fn zero_raw(&self, offset: u64, len: u64, may_unmap: bool) -> Result<(), Errno> {
        let (file, locks) = (self.top_file(), &self.image.locks);
        align::write_zeroes(file, &self.pool, locks, offset..offset + len, may_unmap).await
    }

    async fn discard_raw(&self, offset: u64, len: u64) -> Result<(), Errno> {
        if !self.image.options.discard {
            return Ok(());
        }
        match align::discard(self.top_file(), &self.image.locks, offset..offset + len).await {
            // A discard is a hint.
            Err(Errno::EOPNOTSUPP) => Ok(()),
            done => done,
        }
    }
}
