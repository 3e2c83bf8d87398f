//! Snapshots of an image that becomes one of version 2: their tables have to do without marks of zeros.
//!
//! ```text
//! write   where there is a backing file: clusters of zeros, and refcounts that count them (refcounts.rs), FLUSH, switch, FLUSH
//! write   entries that are marked: they refer to a cluster of zeros, or to nothing where that reads as zeros
//! FLUSH
//! repair  counts of what they referred to go down
//! ```
//!
//! An entry reads the same before and after, so any of them may be there after a crash.

use std::collections::BTreeMap;

use gaur_block::File;
use gaur_format::check::RepairMode;
use gaur_format::header::Header;
use gaur_format::{Geometry, l1};

use super::{Editor, marks, step};
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::repair::repair;

/// Clusters of zeros that many entries share.
struct ZeroClusters {
    counts: Vec<u64>,
    /// Where the next entries go.
    next: usize,
    left: u64,
    most: u64,
}

impl ZeroClusters {
    fn new(geometry: &Geometry) -> ZeroClusters {
        ZeroClusters {
            counts: Vec::new(),
            next: 0,
            left: 0,
            most: geometry.refcount_max(),
        }
    }

    /// The cluster for an entry that counts as `uses` references.
    fn take(&mut self, uses: u64) -> usize {
        if uses > self.left {
            self.next = self.counts.len();
            self.counts.push(0);
            self.left = self.most;
        }
        self.left = self.left.saturating_sub(uses);
        if let Some(count) = self.counts.get_mut(self.next) {
            *count += uses;
        }
        self.next
    }
}

impl<F: File> Editor<'_, F> {
    /// Refuses snapshots that readers of version 2 would misread.
    pub(super) async fn check_snapshots(&self, header: &Header) -> Result<(), ImageError> {
        let (snapshots, _) = self.reader.snapshots(header, &header.geometry()).await?;
        for snapshot in &snapshots {
            let size = snapshot.disk_size.unwrap_or(header.size_bytes);
            let what = match () {
                () if u32::try_from(snapshot.vm_state_size).is_err() => {
                    "a machine's state of 4 GiB or more"
                }
                () if size != header.size_bytes => "a disk of another size",
                () => continue,
            };
            let text = format!(
                "snapshot {:?} has {what}, so the image cannot become one of version 2",
                String::from_utf8_lossy(&snapshot.name)
            );
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        let encrypted = header.encryption().is_some();
        let through = header.backing_file().is_some();
        if encrypted && through && self.zero_clusters(header).await?.counts.is_empty() {
            return Ok(());
        }
        match encrypted && through {
            true => {
                let text = "a snapshot of this encrypted overlay has clusters that are marked as zeros, so the image \
                            cannot become one of version 2";
                Err(ImageError::new(ErrorKind::Unsupported, text))
            }
            false => Ok(()),
        }
    }

    /// Takes the marks out of the tables of all snapshots.
    pub(super) async fn unmark_snapshots(&self, job: &Job) -> Result<(), ImageError> {
        let header = self.header().await?;
        let geometry = header.geometry();
        let mut zeros = None;
        if header.backing_file().is_some() {
            let wanted = self.zero_clusters(&header).await?.counts;
            if wanted.is_empty() {
                return Ok(());
            }
            let order = header.refcount_order;
            zeros = Some(self.rebuild_refcounts(order, &wanted, job).await?);
        }
        let mut taken = ZeroClusters::new(&geometry);
        let mut changed = false;
        for (at, uses) in self.snapshot_tables(&header).await? {
            let mut table = self.reader.padded(at, geometry.cluster_size()).await?;
            let mut marked = false;
            for index in marks(&table.clone(), &geometry) {
                let entry = zeros.map_or(0, |first| {
                    (first + taken.take(uses) as u64) * geometry.cluster_size()
                });
                let slot = index as usize * 8;
                if let Some(slot) = table.get_mut(slot..slot + 8) {
                    slot.copy_from_slice(&entry.to_be_bytes());
                    marked = true;
                }
            }
            if marked {
                self.write(at, &table).await?;
                changed = true;
            }
            step(job, geometry.cluster_size())?;
        }
        if changed {
            self.flush().await?;
            repair(self.file, RepairMode::Leaks, false, job).await?;
        }
        Ok(())
    }

    /// How often each cluster of zeros would be referred to, were there no marks.
    async fn zero_clusters(&self, header: &Header) -> Result<ZeroClusters, ImageError> {
        let geometry = header.geometry();
        let mut zeros = ZeroClusters::new(&geometry);
        for (at, uses) in self.snapshot_tables(header).await? {
            let table = self.reader.padded(at, geometry.cluster_size()).await?;
            for _ in marks(&table, &geometry) {
                zeros.take(uses);
            }
        }
        Ok(zeros)
    }

    /// The L2 tables of all snapshots, and how many L1 entries refer to each.
    async fn snapshot_tables(&self, header: &Header) -> Result<BTreeMap<u64, u64>, ImageError> {
        let geometry = header.geometry();
        let (snapshots, _) = self.reader.snapshots(header, &geometry).await?;
        let mut tables = BTreeMap::new();
        for (number, snapshot) in snapshots.iter().enumerate() {
            let what = format!("l1 table of snapshot {number}");
            let len = u64::from(snapshot.l1_size) * 8;
            let bytes = self.reader.bytes(&what, snapshot.l1_table_offset.0, len);
            for raw in bytes.await?.as_chunks().0 {
                let found = l1::decode(u64::from_be_bytes(*raw), &geometry);
                let found = found.map_err(|corruption| {
                    ImageError::corrupt(corruption, format!("{what} is damaged"))
                })?;
                if let Some(found) = found {
                    *tables.entry(found.offset.0).or_insert(0) += 1;
                }
            }
        }
        Ok(tables)
    }
}
