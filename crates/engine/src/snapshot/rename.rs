//! Renaming a snapshot: a new table of snapshots, and one write of the header.

use gaur_block::{File, Source};
use gaur_format::header::field;
use gaur_format::snapshot::Snapshot;

use super::failure::Failure;
use super::list;
use super::select::find_snapshot;
use crate::active::Active;
use crate::align;
use crate::error::ImageError;
use crate::job::Job;
use crate::metadata::alloc::Free;

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
        let size = self.geometry().cluster_size();
        let mut bytes = list::encode(&all, self.geometry())?;
        let table_bytes = bytes.len() as u64;
        self.announce().await?;
        let clusters = self.geometry().clusters_for(table_bytes);
        let job = Job::default();
        let taken = self.take_area(clusters, &job).await?;
        let start = taken.free.start;
        bytes.resize((clusters * size) as usize, 0);
        let (file, locks) = (self.queue.top_file(), &self.image.locks);
        let source = Source::memory(&bytes);
        align::write(file, &self.queue.pool, locks, start * size, source).await?;
        // The table and its count are durable before the header leads to it.
        self.flush_all().await?;
        let mut fields = [0; 12];
        fields[..4].copy_from_slice(&(all.len() as u32).to_be_bytes());
        fields[4..].copy_from_slice(&(start * size).to_be_bytes());
        {
            let _structure = self.writer.structure.lock().await;
            self.switch_header(field::NB_SNAPSHOTS, &fields).await?;
        }
        taken.keep();
        self.qcow2.maps.metadata.insert(start, clusters);
        let mut known = self.writer.snapshots.lock();
        let old = Free {
            start: known.offset / size,
            len: known.table_bytes.div_ceil(size),
        };
        self.qcow2.maps.metadata.remove(old.start, old.len);
        known.replace(all, start * size, table_bytes);
        self.writer.alloc.lock().releasable.push(old);
        Ok(())
    }
}
