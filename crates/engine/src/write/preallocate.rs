//! Preallocation: a range gets its place before anything is written there, and reads as zeros.
//!
//! Crash rule: as for a write. The zeros are there before the mapping is.

use std::ops::Range;

use gaur_block::{Errno, File};
use gaur_format::plan::Preallocation;

use super::{NewMapping, Plan, Step};
use crate::active::Active;
use crate::align;
use crate::job::Job;
use crate::range::GuestRange;

/// Longest range that is mapped between two looks at whether it is still wanted.
const PIECE_BYTES: u64 = 8 << 20;

impl<F: File> Active<'_, F> {
    /// Maps a range that holds no data, and to which no request writes meanwhile.
    pub(crate) async fn preallocate(
        &self,
        range: GuestRange,
        how: Preallocation,
        job: &Job,
    ) -> Result<(), Errno> {
        job.expect(range.len);
        let mut rest = range;
        while !rest.is_empty() {
            let part = rest.first(PIECE_BYTES);
            {
                let _epoch = self.queue.enter();
                // Zeros of an encrypted file are not the guest's.
                match how == Preallocation::Full || self.is_encrypted() {
                    true => self.write_zero_bytes(part).await?,
                    false => self.map_zeros(part, how).await?,
                }
            }
            self.relieve().await;
            job.step(part.len)?;
            rest = rest.after(part.len);
        }
        Ok(())
    }

    async fn map_zeros(&self, range: GuestRange, how: Preallocation) -> Result<(), Errno> {
        let mut rest = range;
        while !rest.is_empty() {
            let len = match self.plan(rest)? {
                Plan::Step(Step::Need(need)) => {
                    self.resolve(need).await?;
                    continue;
                }
                Plan::Step(Step::InPlace(host)) | Plan::Noted(host, _) => host.len,
                Plan::New(mapping) => self.map_new_zeros(mapping, range.end(), how).await?,
            };
            rest = rest.after(len);
        }
        Ok(())
    }

    /// Commits a mapping of space that reads as zeros, in a data file up to guest offset `end`; how long it is.
    async fn map_new_zeros(
        &self,
        mut mapping: NewMapping<'_, F>,
        end: u64,
        how: Preallocation,
    ) -> Result<u64, Errno> {
        let reserve = how == Preallocation::Falloc;
        if reserve || !mapping.run.zeroed {
            let region = mapping.region;
            let end = match self.geometry().data_file() {
                true => region.end().min(end),
                false => region.end(),
            };
            let len = end.saturating_sub(region.start);
            let host: Range<u64> = mapping.host..mapping.host + len;
            let (file, pool) = (self.queue.data_file(), &self.queue.pool);
            let locks = self.image.data_locks();
            mapping.started = true;
            align::write_zeroes(file, pool, locks, host, !reserve).await?;
        }
        mapping.commit();
        Ok(mapping.written.len)
    }
}
