//! Hole punching inside clusters, for the allocation policy *compact*.
//!
//! Rule O7: a hole is made only where there is no data. Its mapping has been durable since the pass
//! before, and the requests that may have been using it have ended; but its cluster is still there,
//! and the guest may have written to it again. So its guest range is claimed, which keeps writes
//! that would allocate there waiting, and the mapping is looked at once more.

use gaur_block::{Errno, File};
use gaur_format::addr::GuestOffset;
use gaur_format::allocation::empty_blocks;
use gaur_format::l2::L2Entry;

use crate::active::Active;
use crate::align;
use crate::metadata::claims::Claim;
use crate::metadata::holes::Hole;
use crate::metadata::maps::{Located, Maps};
use crate::range::GuestRange;

/// What a second look at a hole shows.
enum Look<'a> {
    /// These subclusters of its cluster have data, and no other request may change that.
    Claimed { alloc: u32, _claim: Claim<'a> },
    /// Another request is writing there.
    Busy,
    /// Its cluster is no longer there.
    Gone,
    /// The L2 slice at this host offset has to be loaded.
    Miss(u64),
}

impl<'q, F: File> Active<'q, F> {
    /// Gives the holes that are ready back to the host. Where a request is writing, they wait for a
    /// later pass.
    pub(crate) async fn punch_holes(&self) {
        let ready = std::mem::take(&mut self.writer.alloc.lock().holes.ready);
        for hole in ready {
            // It is a hint: what the host cannot or will not do stays allocated.
            if let Err(Errno::EAGAIN) = self.punch_hole(hole).await {
                self.writer.alloc.lock().holes.ready.push(hole);
            }
        }
    }

    /// [`Errno::EAGAIN`] while another request is writing there.
    async fn punch_hole(&self, hole: Hole) -> Result<(), Errno> {
        #[cfg(feature = "broken-order")]
        if self.image.breaks(crate::options::BrokenRule::O7) {
            let range = hole.host..hole.host + hole.len;
            let file = self.queue.data_file();
            return align::discard(file, self.image.data_locks(), range).await;
        }
        loop {
            let (alloc, _claim) = match self.look_again(hole) {
                Look::Claimed { alloc, _claim } => (alloc, _claim),
                Look::Busy => return Err(Errno::EAGAIN),
                Look::Gone => return Ok(()),
                Look::Miss(slice) => {
                    self.layer().load_slice(slice).await?;
                    continue;
                }
            };
            let offset = self.geometry().offset_in_cluster(GuestOffset(hole.guest));
            let (mut from, end) = (offset, offset + hole.len);
            while let Some((start, upto)) = empty_blocks(alloc, from, end, self.geometry()) {
                let range = hole.host - offset + start..hole.host - offset + upto;
                let file = self.queue.data_file();
                let range = range.start..self.data_end(range.end).max(range.start);
                align::discard(file, self.image.data_locks(), range).await?;
                let made = &mut self.writer.alloc.lock().holes.made;
                made.holes += 1;
                made.bytes += upto - start;
                from = upto;
            }
            return Ok(());
        }
    }

    fn look_again(&self, hole: Hole) -> Look<'q> {
        let claims = &self.writer.claims;
        let mut list = claims.lock(hole.guest);
        let range = GuestRange::new(hole.guest, hole.len);
        if list.free_prefix(range) != range {
            return Look::Busy;
        }
        match located(&self.qcow2.maps, hole) {
            Err(look) => look,
            Ok(alloc) => Look::Claimed {
                alloc,
                _claim: claims.claim(&mut list, range),
            },
        }
    }
}

/// The subclusters with data of the cluster that the hole was made in, if it is the same still.
fn located(maps: &Maps, hole: Hole) -> Result<u32, Look<'static>> {
    match maps.locate(hole.guest) {
        Ok(Located::Miss(slice)) => Err(Look::Miss(slice)),
        // In a data file the place of a cluster is never another's.
        Ok(Located::NoTable) if maps.geometry.data_file() => Ok(0),
        Ok(Located::Entry {
            entry: L2Entry::Cluster { alloc, .. },
            ..
        }) if maps.geometry.data_file() => Ok(alloc),
        Ok(Located::Entry {
            entry:
                L2Entry::Cluster {
                    host: Some(host),
                    copied: true,
                    alloc,
                    ..
                },
            table_copied: true,
            ..
        }) => {
            let offset = maps.geometry.offset_in_cluster(GuestOffset(hole.guest));
            let same = host.0 + offset == hole.host;
            if same { Ok(alloc) } else { Err(Look::Gone) }
        }
        // A damaged entry is reported by the request that needs it.
        _ => Err(Look::Gone),
    }
}
