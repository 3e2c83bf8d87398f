//! Storing in the top image what the layers below it show: the write of a copy-on-read, and of a stream.
//!
//! It changes nothing that the guest sees. So it maps only what the top does not map yet, which is decided under the
//! lock of the claims: a guest's write that ran since the layers below were read has the last word. From there on it is
//! a write like any other, with its crash rules.

use gaur_block::{Errno, File, Source};

use super::{NewMapping, Obstacle, Planner};
use crate::active::Active;
use crate::compressor::is_zero;
use crate::metadata::maps::{Kind, Lookup};
use crate::range::GuestRange;
use crate::write::Need;

/// What becomes of the next bytes of a copy.
enum CopyPlan<'q, F: File> {
    /// The top maps so many bytes already.
    Mapped(u64),
    /// Do this first, then plan again.
    Need(Need),
    /// Write them into the mapping.
    New(NewMapping<'q, F>),
}

/// What a copy does where another request is about to change the mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WhenBusy {
    /// It leaves it to that request.
    GiveUp,
    Wait,
}

impl<'q, F: File> Active<'q, F> {
    /// Stores `bytes`, which the layers below show in a range of whole units, wherever the top maps nothing. How many
    /// bytes were stored.
    pub(crate) async fn store_copy(
        &self,
        range: GuestRange,
        bytes: &[u8],
        busy: WhenBusy,
    ) -> Result<u64, Errno> {
        let unit = self.geometry().subcluster_size() as usize;
        let zeros = |unit: &[u8]| self.can_mark_zeros() && is_zero(unit);
        let (mut at, mut rest, mut stored) = (range.start, bytes, 0);
        while let Some(first) = rest.chunks(unit).next() {
            let marked = zeros(first);
            let alike = rest.chunks(unit).take_while(|unit| zeros(unit) == marked);
            let (run, after) = rest.split_at(alike.map(<[u8]>::len).sum());
            let part = GuestRange::new(at, run.len() as u64);
            stored += match marked {
                true => self.mark_copied(part, busy).await?,
                false => self.store_data(part, run, busy).await?,
            };
            (at, rest) = (part.end(), after);
        }
        Ok(stored)
    }

    async fn store_data(
        &self,
        range: GuestRange,
        bytes: &[u8],
        busy: WhenBusy,
    ) -> Result<u64, Errno> {
        self.announce().await?;
        let (mut rest, mut stored) = (range, 0);
        while !rest.is_empty() {
            match self.plan_copy(rest)? {
                CopyPlan::Mapped(len) => rest = rest.after(len),
                CopyPlan::Need(Need::Busy(..)) if busy == WhenBusy::GiveUp => break,
                CopyPlan::Need(need) => self.resolve(need).await?,
                CopyPlan::New(mapping) => {
                    let written = mapping.written;
                    let from = (written.start - range.start) as usize;
                    let data = bytes.get(from..from + written.len as usize);
                    let data = Source::memory(data.ok_or(Errno::EIO)?);
                    self.write_mapping(mapping, data).await?;
                    stored += written.len;
                    rest = rest.after(written.len);
                }
            }
        }
        Ok(stored)
    }

    /// Plans under the lock of the claims, where the mapping cannot change.
    fn plan_copy(&self, range: GuestRange) -> Result<CopyPlan<'q, F>, Errno> {
        let (maps, claims, at) = (&self.qcow2.maps, &self.writer.claims, range.start);
        let ticket = claims.ticket(at);
        let mut list = claims.lock(at);
        let lookup = maps.extent(claims.within_slice(range));
        let free = match lookup.map_err(|fault| self.image.corrupt(0, fault))? {
            Lookup::Miss(slice) => return Ok(CopyPlan::Need(Need::Slice(slice))),
            Lookup::Extent(found) if self.may_copy(found.kind) => range.first(found.len),
            Lookup::Extent(found) => return Ok(CopyPlan::Mapped(found.len)),
        };
        let planner = Planner {
            active: *self,
            range: free,
        };
        Ok(match planner.plan(maps, &mut list) {
            Ok(mapping) => CopyPlan::New(mapping),
            Err(Obstacle::Busy) => CopyPlan::Need(Need::Busy(at, ticket)),
            Err(Obstacle::Need(need)) => CopyPlan::Need(need),
            Err(Obstacle::Failed(errno)) => return Err(errno),
        })
    }

    /// Whether the layers below show through.
    fn may_copy(&self, kind: Kind) -> bool {
        #[cfg(feature = "broken-order")]
        if self.image.breaks(crate::options::BrokenRule::Copy) {
            return !matches!(kind, Kind::Compressed { .. });
        }
        matches!(kind, Kind::Unallocated { .. })
    }
}
