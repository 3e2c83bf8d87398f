//! Taking over from a process that was killed: what its log of commits holds becomes the mapping.
//!
//! The data are in the file already. First all host clusters that the log names are counted, so that
//! no allocation takes one of them; then the mappings are committed as those of writes are, and
//! what they replace is given back by the pass that makes them durable. Every step may be repeated,
//! so a second process can take over from one that was killed in here.
//!
//! A log counts only while the header names it, and only if what it says can be true ([`evidence`]).

mod evidence;

use std::collections::BTreeMap;

use gaur_block::{Errno, File};
use gaur_format::addr::GuestOffset;
use gaur_format::l2::L2Entry;

use crate::active::Active;
use crate::commit_log::Commit;
use crate::error::ImageError;
use crate::metadata::maps::Located;
use crate::queue::Queue;
use crate::write::{Need, reference_of};

impl<F: File> Queue<F> {
    /// Takes over what a process that was killed has committed and not written back, oldest first,
    /// and makes it durable, with whatever that process left in the host's cache. To be called before
    /// anything else is done to the image, which was opened with that process' log. Returns how many clusters
    /// it changed, or `None` when the image does not name the log: another program has written to it
    /// since, and nothing was changed. Afterwards the log may be emptied and get another number
    /// ([`Queue::log_renamed`]). `is_whole`: the log had room for all that was committed.
    ///
    /// # Errors
    /// [`Corrupt`](crate::ErrorKind::Corrupt) when the log does not fit the image: then nothing was changed. Those of the
    /// host; then the image refuses writes.
    pub async fn adopt(
        &self,
        commits: &[Commit],
        is_whole: bool,
    ) -> Result<Option<u64>, ImageError> {
        let fail = |errno| {
            self.image
                .explain(errno, "cannot take over from a process that was killed")
        };
        if self.image.is_read_only() {
            return Err(fail(Errno::EROFS));
        }
        let Some(active) = self.active() else {
            self.flush_all().await.map_err(fail)?;
            return Ok(Some(0));
        };
        let number = active.log_number();
        let named = self.image.unclosed().map(|unclosed| unclosed.log_number);
        if number == 0 || named != Some(number) {
            self.flush_all().await.map_err(fail)?;
            return Ok(None);
        }
        let last = evidence::last_entries(active.geometry(), commits, self.image.size_bytes())?;
        active.check_evidence(&last).await?;
        if is_whole {
            active.check_entries(&last, commits).await?;
        }
        let adopted = active.adopt_entries(&last).await;
        adopted.map(Some).map_err(fail)
    }
}

impl<F: File> Active<'_, F> {
    async fn adopt_entries(&self, last: &BTreeMap<u64, L2Entry>) -> Result<u64, Errno> {
        // Also when there is nothing to adopt: the close has to take the number of the log back.
        self.announce().await?;
        for entry in last.values() {
            self.count_adopted(*entry).await?;
            self.relieve().await;
        }
        // Bitmaps take clusters.
        self.announce_change().await?;
        let mut changed = 0;
        for (&cluster, &entry) in last {
            let guest = cluster << self.geometry().cluster_bits();
            changed += u64::from(self.adopt_entry(guest, entry).await?);
            self.relieve().await;
        }
        self.flush_all().await?;
        Ok(changed)
    }

    /// Sees to it that the host cluster of an entry is counted.
    async fn count_adopted(&self, entry: L2Entry) -> Result<(), Errno> {
        let Some(reference) = reference_of(entry, self.geometry()) else {
            return Ok(());
        };
        self.allocate(|| self.writer.alloc.lock().adopt(reference.start))
            .await
    }

    /// Gives a cluster its entry, unless it has it; says whether it did not.
    async fn adopt_entry(&self, guest: u64, new: L2Entry) -> Result<bool, Errno> {
        loop {
            match self.try_adopt(guest, new)? {
                Ok(changed) => return Ok(changed),
                Err(need) => self.resolve(need).await?,
            }
        }
    }

    fn try_adopt(&self, guest: u64, new: L2Entry) -> Result<Result<bool, Need>, Errno> {
        let maps = &self.qcow2.maps;
        let _claims = self.writer.claims.lock(guest);
        let located = maps
            .locate(guest)
            .map_err(|fault| self.image.corrupt(0, fault))?;
        let table = Need::Table(self.geometry().l1_index(GuestOffset(guest)));
        let (old, slice, table_copied) = match located {
            Located::Miss(slice) => return Ok(Err(Need::Slice(slice))),
            Located::NoTable if new == L2Entry::UNALLOCATED => return Ok(Ok(false)),
            Located::NoTable => return Ok(Err(table)),
            Located::Entry {
                entry,
                slice,
                table_copied,
            } => (entry, slice, table_copied),
        };
        // A switch of the whole image may have written it, and shared the cluster with a snapshot.
        if unshared(old) == unshared(new) {
            return Ok(Ok(false));
        }
        if !table_copied {
            return Ok(Err(table));
        }
        if !maps.slices.pin(slice) {
            return Ok(Err(Need::Slice(slice)));
        }
        maps.update(guest, |_| new);
        maps.slices.unpin(slice);
        let after = reference_of(new, self.geometry());
        let gone = reference_of(old, self.geometry()).filter(|free| Some(*free) != after);
        if let Some(free) = gone {
            self.unmapped(&[free]);
        }
        Ok(Ok(true))
    }
}

/// An entry as it is when no snapshot shares its cluster.
fn unshared(entry: L2Entry) -> L2Entry {
    match entry {
        L2Entry::Cluster {
            host: Some(host),
            alloc,
            zero,
            ..
        } => L2Entry::Cluster {
            host: Some(host),
            copied: true,
            alloc,
            zero,
        },
        entry => entry,
    }
}
