//! Internal snapshots: list, create, apply, delete, rename.

use std::sync::Arc;

use gaur_block::File;
pub use gaur_format::snapshot::Snapshot;

use crate::active::Active;
use crate::data_file::NO_SNAPSHOTS;
use crate::error::{ErrorKind, ImageError};
use crate::image::Image;
use crate::job::Job;
use crate::layer::LayerReader;
use crate::queue::Queue;

mod apply;
mod create;
mod delete;
mod deltas;
mod failure;
mod list;
mod plan;
pub(crate) mod references;
mod rename;
mod select;
mod switch;
#[cfg(test)]
mod tests;

use failure::Failure;
pub(crate) use list::SnapshotList;
pub use select::find_snapshot;

/// What a snapshot that is about to be made is called, and what time it is. The engine knows no clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewSnapshot {
    /// The name people use: 1 to 65535 bytes, no name or id of another snapshot of the image.
    pub name: String,
    /// Unique id; `None` takes the number after the highest there is.
    pub id: Option<String>,
    /// When it is made, in seconds of Unix time.
    pub date_sec: u32,
    /// Nanoseconds to add to the date.
    pub date_nsec: u32,
    /// Time the guest has run, in nanoseconds.
    pub vm_clock_nsec: u64,
    /// Instructions the guest has executed, where that is recorded.
    pub icount: Option<u64>,
}

/// State of a virtual machine that was written to clusters that nothing refers to yet. Its clusters and
/// the tables' own are counted once each; entries of the tables have no COPIED flag.
#[derive(Debug, Default)]
pub(crate) struct SavedState {
    /// Length of the state in bytes.
    pub(crate) size_bytes: u64,
    /// Host offset of each L2 table, by its L1 index counted from where the state begins; ascending.
    pub(crate) tables: Vec<(u64, u64)>,
}

/// How often a switch is tried again whose refcount table grew meanwhile.
const TRIES_MAX: usize = 4;

impl<F: File> Queue<F> {
    /// The image's snapshots, oldest first.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>, ImageError> {
        if let Some(writer) = &self.image.writer {
            return Ok(writer.snapshots.lock().all().to_vec());
        }
        let header = self.image.top.header();
        let Some(header) = header else {
            return Ok(Vec::new());
        };
        let reader = LayerReader::new(self.top_file()).await?;
        let (snapshots, _) = reader.snapshots(header, &header.geometry()).await?;
        Ok(snapshots)
    }

    /// Keeps the snapshot with this id from being deleted until the guard is dropped; a reader of
    /// its tables holds one. Nothing to do for an image that is not written to.
    pub(crate) fn hold_snapshot(&self, id: &[u8]) -> HeldSnapshot {
        if let Some(writer) = &self.image.writer {
            writer.snapshots.lock().hold(id);
        }
        HeldSnapshot {
            image: Arc::clone(&self.image),
            id: id.to_vec(),
        }
    }

    /// Makes a snapshot of the disk as it is. Requests of all queues go on meanwhile, but for
    /// milliseconds at the end. If it fails nothing has changed.
    pub async fn create_snapshot(
        &self,
        new: &NewSnapshot,
        job: &Job,
    ) -> Result<Snapshot, ImageError> {
        self.create_with_state(new, None, job).await
    }

    /// Makes the disk what it was when the snapshot named `which` (its id, else its name) was made, and
    /// says which that is. In a version 3 image the disk gets the size back that it had. Other requests
    /// wait until it is done. If it fails nothing has changed.
    pub async fn apply_snapshot(&self, which: &str, job: &Job) -> Result<Snapshot, ImageError> {
        let active = self.active_for_snapshots()?;
        active.apply_snapshot(which, job).await
    }

    /// Deletes the snapshot named `which` (its name, else its id) and says what it was. Requests of all
    /// queues go on meanwhile, but for milliseconds at the end. If it fails nothing has changed.
    pub async fn delete_snapshot(&self, which: &str, job: &Job) -> Result<Snapshot, ImageError> {
        let active = self.active_for_snapshots()?;
        active.delete_snapshot(which, job).await
    }

    /// Gives the snapshot named `which` (its id, else its name) another name. If it fails it has the old
    /// one.
    pub async fn rename_snapshot(&self, which: &str, name: &str) -> Result<Snapshot, ImageError> {
        let active = self.active_for_snapshots()?;
        active.rename_snapshot(which, name).await
    }

    /// A snapshot, with the state of a virtual machine if there is one. If this fails, the state's clusters are still the
    /// caller's to give back.
    pub(crate) async fn create_with_state(
        &self,
        new: &NewSnapshot,
        state: Option<&SavedState>,
        job: &Job,
    ) -> Result<Snapshot, ImageError> {
        let active = self.active_for_snapshots()?;
        active.create_snapshot(new, state, job).await
    }

    /// The image, if its snapshots can be changed.
    fn active_for_snapshots(&self) -> Result<Active<'_, F>, ImageError> {
        if self.image.read_only {
            let text = "the image is open read-only";
            return Err(ImageError::new(ErrorKind::ReadOnly, text));
        }
        if let Some(errno) = self.image.poisoned() {
            let text = "an earlier failure left the image unwritable";
            return Err(self.image.explain(errno, text));
        }
        let refused = |text: &str| ImageError::new(ErrorKind::Unsupported, text);
        let Some(active) = self.active() else {
            return Err(refused(
                "a raw image has no internal snapshots; convert it to qcow2",
            ));
        };
        match active.geometry().data_file() {
            true => Err(refused(NO_SNAPSHOTS)),
            false => Ok(active),
        }
    }
}

impl<F: File> Active<'_, F> {
    /// Changes the whole image: tries `switch` until it is not told to begin again, and gives back what that
    /// has freed.
    pub(crate) async fn switch_image<T>(
        &self,
        doing: &str,
        job: &Job,
        switch: impl AsyncFn() -> Result<T, Failure>,
    ) -> Result<T, ImageError> {
        let announced = self.announce().await;
        announced.map_err(|errno| ImageError::io(errno, doing))?;
        let mut tries = 0;
        let switched = loop {
            tries += 1;
            match switch().await {
                Err(Failure::Again) if tries < TRIES_MAX => {}
                other => break other,
            }
        };
        self.release_freed(job).await;
        switched.map_err(|failure| failure.explain(doing))
    }
}

/// A snapshot that has a reader.
#[derive(Debug)]
pub(crate) struct HeldSnapshot {
    image: Arc<Image>,
    id: Vec<u8>,
}

impl Drop for HeldSnapshot {
    fn drop(&mut self) {
        if let Some(writer) = &self.image.writer {
            writer.snapshots.lock().let_go(&self.id);
        }
    }
}
