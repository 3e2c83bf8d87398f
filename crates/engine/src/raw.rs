//! Requests to a raw image: the file's bytes are the disk's.

use gaur_block::{Errno, File, Source};

use crate::align;
use crate::queue::{Change, Queue, Unmap};
use crate::range::GuestRange;

impl<F: File> Queue<F> {
    /// Serves a request for a range inside the image.
    pub(crate) async fn change_raw(
        &self,
        range: GuestRange,
        change: Change<'_>,
    ) -> Result<(), Errno> {
        match change {
            Change::Write(source) | Change::Packed { plain: source, .. } => {
                self.write_raw(range.start, source).await
            }
            Change::Zero(unmap) => self.zero_raw(range, unmap).await,
            Change::Discard => self.discard_raw(range).await,
        }
    }

    async fn write_raw(&self, offset: u64, source: Source<'_>) -> Result<(), Errno> {
        let (file, locks) = (self.top_file(), &self.image.locks);
        align::write(file, &self.pool, locks, offset, source).await
    }

    async fn zero_raw(&self, range: GuestRange, unmap: Unmap) -> Result<(), Errno> {
        let (file, locks) = (self.top_file(), &self.image.locks);
        let may_unmap = unmap == Unmap::Allowed;
        let range = range.start..range.end();
        align::write_zeroes(file, &self.pool, locks, range, may_unmap).await
    }

    async fn discard_raw(&self, range: GuestRange) -> Result<(), Errno> {
        if !self.image.options.discard {
            return Ok(());
        }
        let range = range.start..range.end();
        match align::discard(self.top_file(), &self.image.locks, range).await {
            // A discard is a hint.
            Err(Errno::EOPNOTSUPP) => Ok(()),
            done => done,
        }
    }
}
