//! Renaming a snapshot: a new table of snapshots, and one write of the header.

use gaur_block::File;
use gaur_format::header::field;
use gaur_format::snapshot::Snapshot;

use super::failure::Failure;
use super::list;
use super::select::find_snapshot;
use crate::active::Active;
use crate::error::ImageError;
use crate::job::Job;

impl<F: File> Active<'_, F> {
    /// See [`crate::Queue::rename_snapshot`].
    pub(super) async fn rename_snapshot(
        &self,
        which: &str,
        name: &str,
    ) -> Result<Snapshot, ImageError> {
        const DOING: &str = "cannot rename the snapshot";
        let _held = self.writer.resizing.lock().await;
        let mut all = self.writer.snapshots.lock().all().to_vec();
        let mut renamed = find_snapshot(&all, which)?.clone();
        list::check_name(&all, name, Some(&renamed.id))?;
        renamed.name = name.as_bytes().to_vec();
        for entry in all.iter_mut().filter(|entry| entry.id == renamed.id) {
            entry.name = renamed.name.clone();
        }
        let replaced = self.replace_list(all).await;
        replaced.map_err(|failure| failure.explain(DOING))?;
        Ok(renamed)
    }

    /// Puts another table of snapshots in place of the present one.
    async fn replace_list(&self, all: Vec<Snapshot>) -> Result<(), Failure> {
        let geometry = self.geometry();
        let mut bytes = list::encode(&all, geometry)?;
        let table_bytes = bytes.len() as u64;
        self.announce().await?;
        let clusters = geometry.clusters_for(table_bytes);
        let taken = self.take_area(clusters, &Job::default()).await?;
        let (clusters, place) = (taken.clusters, taken.clusters.bytes(geometry));
        bytes.resize(place.len as usize, 0);
        self.write_file(place.start, &bytes).await?;
        // The table and its count are durable before the header leads to it.
        self.flush_all().await?;
        let mut fields = [0; 12];
        fields[..4].copy_from_slice(&(all.len() as u32).to_be_bytes());
        fields[4..].copy_from_slice(&place.start.to_be_bytes());
        {
            let _structure = self.writer.structure.lock().await;
            self.switch_header(field::NB_SNAPSHOTS, &fields).await?;
        }
        taken.keep();
        let metadata = &self.qcow2.maps.metadata;
        metadata.insert(clusters);
        let mut known = self.writer.snapshots.lock();
        let old = known.place.clusters(geometry);
        metadata.remove(old);
        known.replace(all, place.first(table_bytes));
        self.writer.alloc.lock().releasable.push(old);
        Ok(())
    }
}
