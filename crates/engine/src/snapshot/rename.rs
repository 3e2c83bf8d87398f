//! Renaming a snapshot: a new table of snapshots, and one write of the header.

use gaur_block::{File, Source};
use gaur_format::header::field;
use gaur_format::snapshot::Snapshot;

use super::failure::Failure;
use super::list;
use super::select::find_snapshot;
use crate::align;
use crate::error::ImageError;
use crate::image::{Qcow2, Writer};
use crate::job::Job;
use crate::metadata::alloc::Free;
use crate::queue::Queue;

impl<F: File> Queue<F> {
    /// Gives the snapshot named `which` (its id, else its name) another name. If it fails it has the old
    /// one.
    pub async fn rename_snapshot(&self, which: &str, name: &str) -> Result<Snapshot, ImageError> {
        const DOING: &str = "cannot rename the snapshot";
        let (qcow2, writer) = self.snapshot_parts()?;
        let _held = writer.resizing.lock().await;
        let mut all = writer.snapshots.lock().all().to_vec();
        let mut renamed = find_snapshot(&all, which)?.clone();
        list::check_name(&all, name, Some(&renamed.id))?;
        renamed.name = name.as_bytes().to_vec();
        for entry in all.iter_mut().filter(|entry| entry.id == renamed.id) {
            entry.name = renamed.name.clone();
        }
        let replaced = self.replace_list(qcow2, writer, all).await;
        replaced.map_err(|failure| failure.explain(DOING))?;
        Ok(renamed)
    }

    /// Puts another table of snapshots in place of the present one.
    async fn replace_list(
        &self,
        qcow2: &Qcow2,
        writer: &Writer,
        all: Vec<Snapshot>,
    ) -> Result<(), Failure> {
        let size = qcow2.geometry.cluster_size();
        let mut bytes = list::encode(&all, &qcow2.geometry)?;
        let table_bytes = bytes.len() as u64;
        self.announce(writer).await?;
        let clusters = qcow2.geometry.clusters_for(table_bytes);
        let job = Job::default();
        let taken = self.take_area(qcow2, writer, clusters, &job).await?;
        let start = taken.free.start;
        bytes.resize((clusters * size) as usize, 0);
        let (file, locks) = (self.top_file(), &self.image.locks);
        let source = Source::memory(&bytes);
        align::write(file, &self.pool, locks, start * size, source).await?;
        // The table and its count are durable before the header leads to it.
        self.flush_all().await?;
        let mut fields = [0; 12];
        fields[..4].copy_from_slice(&(all.len() as u32).to_be_bytes());
        fields[4..].copy_from_slice(&(start * size).to_be_bytes());
        {
            let _structure = writer.structure.lock().await;
            self.switch_header(field::NB_SNAPSHOTS, &fields).await?;
        }
        taken.keep();
        qcow2.maps.metadata.insert(start, clusters);
        let mut known = writer.snapshots.lock();
        let old = Free {
            start: known.offset / size,
            len: known.table_bytes.div_ceil(size),
        };
        qcow2.maps.metadata.remove(old.start, old.len);
        known.replace(all, start * size, table_bytes);
        writer.alloc.lock().releasable.push(old);
        Ok(())
    }
}
