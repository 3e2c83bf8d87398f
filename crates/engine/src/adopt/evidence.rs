//! Validation of a log of commits against the image, before anything is changed.
//!
//! A host cluster that was given to the guest and not written back lies in the file, holds no metadata and
//! belongs to that guest cluster alone. Most have no count or only that of a reservation. Of those with a
//! count the tables say who refers to them: each L2 table is read once, and only if there are any.

use std::collections::{BTreeMap, BTreeSet};

use gaur_block::File;
use gaur_format::geometry::Geometry;
use gaur_format::l1;
use gaur_format::l2::L2Entry;

use super::unshared;
use crate::active::Active;
use crate::commit_log::Commit;
use crate::error::{ErrorKind, ImageError};
use crate::metadata::alloc::AllocError;
use crate::metadata::maps::Located;
use crate::range::ClusterRange;
use crate::snapshot::references::{Reference, reference};
use crate::write::{Need, reference_of};

/// Bytes of an L1 table read at once.
const PIECE_BYTES: u64 = 1 << 20;

fn refusal(text: String) -> ImageError {
    let text = format!("the log of a process that was killed does not fit the image: {text}");
    ImageError::new(ErrorKind::Corrupt, text)
}

/// The last entry of every cluster.
pub(super) fn last_entries(
    geometry: &Geometry,
    commits: &[Commit],
    size_bytes: u64,
) -> Result<BTreeMap<u64, L2Entry>, ImageError> {
    let clusters = geometry.clusters_for(size_bytes);
    let mut last = BTreeMap::new();
    for commit in commits {
        let wrong = || refusal(format!("its entry for cluster {} is wrong", commit.cluster));
        let entry = L2Entry::decode(commit.entry, commit.bitmap, geometry).map_err(|_| wrong())?;
        if matches!(entry, L2Entry::Compressed(_)) {
            // No commit has such an entry.
            return Err(wrong());
        }
        let own = commit.cluster << geometry.cluster_bits();
        let elsewhere = |entry: L2Entry| matches!(entry, L2Entry::Cluster { host: Some(host), .. } if host.0 != own);
        if geometry.data_file() && elsewhere(entry) {
            return Err(wrong());
        }
        // What a shrunken image has lost stays lost.
        if commit.cluster < clusters {
            last.insert(commit.cluster, entry);
        }
    }
    Ok(last)
}

/// Who refers to host clusters that the log names and that have a count.
struct Suspects {
    geometry: Geometry,
    /// The guest cluster that the log gives each to.
    guests: BTreeMap<u64, u64>,
    /// Those that the active image maps there already, and those that a snapshot does.
    active: BTreeSet<u64>,
    snapshot: BTreeSet<u64>,
}

impl<F: File> Active<'_, F> {
    /// Refuses a log that names a host cluster which belongs to another structure or guest cluster.
    pub(super) async fn check_evidence(
        &self,
        last: &BTreeMap<u64, L2Entry>,
    ) -> Result<(), ImageError> {
        let mut suspects = self.suspects(last).await?;
        if suspects.guests.is_empty() {
            return Ok(());
        }
        if let Some(lost) = &self.writer.lost_bitmaps {
            for free in &lost.frees {
                suspects.see_other(*free, "a bitmap")?;
            }
        }
        let tables = self.tables_of_all(&suspects).await?;
        let size = self.geometry().cluster_size();
        let mut bytes = self.queue.pool.take(self.queue.top_file(), size as usize);
        for ((index, table), is_active) in tables {
            self.read_evidence(table, &mut bytes).await?;
            suspects.see_table(index, &bytes, is_active)?;
        }
        suspects.judge()
    }

    /// Refuses a log of guest clusters that another program has mapped since: each has the entry that the log
    /// found there, or one of those that it was given.
    pub(super) async fn check_entries(
        &self,
        last: &BTreeMap<u64, L2Entry>,
        commits: &[Commit],
    ) -> Result<(), ImageError> {
        let mut known: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
        for commit in commits {
            let entries = known.entry(commit.cluster);
            let entries = entries.or_insert_with(|| vec![commit.before]);
            entries.push((commit.entry, commit.bitmap));
        }
        for cluster in last.keys() {
            let found = unshared(self.entry_of(*cluster).await?);
            let is_found = |&(entry, bitmap): &(u64, u64)| {
                let entry = L2Entry::decode(entry, bitmap, self.geometry());
                entry.is_ok_and(|entry| unshared(entry) == found)
            };
            if !known
                .get(cluster)
                .is_some_and(|all| all.iter().any(is_found))
            {
                let text = format!("somebody else has written to cluster {cluster} since");
                return Err(refusal(text));
            }
        }
        Ok(())
    }

    async fn entry_of(&self, cluster: u64) -> Result<L2Entry, ImageError> {
        let fail = |errno| ImageError::io(errno, "cannot read an l2 table");
        loop {
            let located = self
                .qcow2
                .maps
                .locate(cluster << self.geometry().cluster_bits());
            match located.map_err(|what| ImageError::corrupt(what, "an l2 table is damaged"))? {
                Located::Entry { entry, .. } => return Ok(entry),
                Located::NoTable => return Ok(L2Entry::UNALLOCATED),
                Located::Miss(slice) => {
                    let need = Need::Slice(slice);
                    self.resolve(need).await.map_err(fail)?;
                }
            }
        }
    }

    /// The host clusters of a log that have a count; an error if one of them cannot be the guest's.
    async fn suspects(&self, last: &BTreeMap<u64, L2Entry>) -> Result<Suspects, ImageError> {
        let geometry = *self.geometry();
        let mut seen = BTreeSet::new();
        let mut guests = BTreeMap::new();
        for (guest, entry) in last {
            let Some(reference) = reference_of(*entry, &geometry) else {
                continue;
            };
            let host = reference.start;
            let text = |what: &str| refusal(format!("host cluster {host} {what}"));
            if self.qcow2.maps.metadata.contains(host) {
                return Err(text("holds metadata"));
            }
            if !seen.insert(host) {
                return Err(text("is named twice"));
            }
            let count = loop {
                let count = self.writer.alloc.lock().count_of(host);
                match count {
                    Ok(count) => break count,
                    Err(AllocError::Need(need)) => {
                        let done = self.resolve_alloc(need).await;
                        done.map_err(|errno| ImageError::io(errno, "cannot read refcounts"))?;
                    }
                    Err(_) => return Err(text("lies beyond the end of the file")),
                }
            };
            if count > 0 {
                guests.insert(host, *guest);
            }
        }
        Ok(Suspects {
            geometry,
            guests,
            active: BTreeSet::new(),
            snapshot: BTreeSet::new(),
        })
    }

    /// Every L2 table of the active image and its snapshots, by L1 index and host offset, and whether it is
    /// the active image's.
    async fn tables_of_all(
        &self,
        suspects: &Suspects,
    ) -> Result<BTreeMap<(u64, u64), bool>, ImageError> {
        let mut tables = BTreeMap::new();
        for (index, raw) in (0..).zip(self.qcow2.maps.l1.entries()) {
            if let Some(table) = suspects.table(raw)? {
                tables.insert((index, table), true);
            }
        }
        let snapshots = self.writer.snapshots.lock().all().to_vec();
        for snapshot in &snapshots {
            let len = u64::from(snapshot.l1_size) * 8;
            for done in (0..len).step_by(PIECE_BYTES as usize) {
                let mut bytes = vec![0; (len - done).min(PIECE_BYTES) as usize];
                self.read_evidence(snapshot.l1_table_offset.0 + done, &mut bytes)
                    .await?;
                for (index, raw) in (done / 8..).zip(bytes.as_chunks().0) {
                    if let Some(table) = suspects.table(u64::from_be_bytes(*raw))? {
                        tables.entry((index, table)).or_insert(false);
                    }
                }
            }
        }
        Ok(tables)
    }

    /// Nothing was changed yet, so what the file says counts.
    async fn read_evidence(&self, offset: u64, bytes: &mut [u8]) -> Result<(), ImageError> {
        let read = self.read_file(offset, bytes).await;
        read.map_err(|errno| ImageError::io(errno, format!("cannot read the table at {offset}")))
    }
}

impl Suspects {
    /// The table that an L1 entry leads to.
    fn table(&self, raw: u64) -> Result<Option<u64>, ImageError> {
        let table = l1::decode(raw, &self.geometry);
        let table = table.map_err(|what| ImageError::corrupt(what, "an l1 table is damaged"))?;
        let Some(table) = table.map(|table| table.offset.0) else {
            return Ok(None);
        };
        self.see_other(
            ClusterRange::new(table / self.geometry.cluster_size(), 1),
            "an l2 table",
        )?;
        Ok(Some(table))
    }

    /// A structure that cannot share them refers to these clusters.
    fn see_other(&self, clusters: ClusterRange, whose: &str) -> Result<(), ImageError> {
        match self.guests.range(clusters.numbers()).next() {
            Some((host, _)) => Err(refusal(format!("host cluster {host} belongs to {whose}"))),
            None => Ok(()),
        }
    }

    fn see_table(&mut self, index: u64, bytes: &[u8], is_active: bool) -> Result<(), ImageError> {
        let entry_bytes = self.geometry.l2_entry_size() as usize;
        let first = index * self.geometry.l2_entries();
        for (guest, entry) in (first..).zip(bytes.chunks_exact(entry_bytes)) {
            let raw = entry
                .first_chunk()
                .map_or(0, |raw| u64::from_be_bytes(*raw));
            let host = match reference(raw, &self.geometry) {
                Ok(Reference::Nothing) => continue,
                Ok(Reference::Cluster(host)) => host,
                Ok(Reference::Compressed(clusters)) => {
                    self.see_other(clusters, "compressed data")?;
                    continue;
                }
                Err(what) => return Err(ImageError::corrupt(what, "an l2 table is damaged")),
            };
            match self.guests.get(&host) {
                None => {}
                Some(named) if *named == guest => {
                    let seen = if is_active {
                        &mut self.active
                    } else {
                        &mut self.snapshot
                    };
                    seen.insert(host);
                }
                Some(_) => {
                    let text = format!("host cluster {host} belongs to guest cluster {guest}");
                    return Err(refusal(text));
                }
            }
        }
        Ok(())
    }

    /// What a snapshot has as well, the active image had when the snapshot was made.
    fn judge(&self) -> Result<(), ImageError> {
        match self.snapshot.difference(&self.active).next() {
            Some(host) => Err(refusal(format!(
                "host cluster {host} belongs to a snapshot alone"
            ))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
