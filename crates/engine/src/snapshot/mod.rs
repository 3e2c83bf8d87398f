//! Internal snapshots: list, create, apply, delete, rename.

use gaur_block::File;
pub use gaur_format::snapshot::Snapshot;

use crate::error::{ErrorKind, ImageError};
use crate::queue::Queue;

mod job;
mod select;

pub use job::Job;
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

impl<F: File> Queue<F> {
    /// The image's snapshots, oldest first.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>, ImageError> {
        Err(ImageError::new(ErrorKind::Unsupported, "later"))
    }

    /// Makes a snapshot of the disk as it is. Requests of all queues go on meanwhile, but for
    /// milliseconds at the end.
    pub async fn create_snapshot(
        &self,
        new: &NewSnapshot,
        job: &Job,
    ) -> Result<Snapshot, ImageError> {
        self.create_with_state(new, None, job).await
    }

    /// The same with the state of a virtual machine. If this fails, the state's clusters are still
    /// the caller's to give back.
    pub(crate) async fn create_with_state(
        &self,
        _new: &NewSnapshot,
        _state: Option<&SavedState>,
        _job: &Job,
    ) -> Result<Snapshot, ImageError> {
        Err(ImageError::new(ErrorKind::Unsupported, "later"))
    }

    /// Makes the disk what it was when the snapshot named `which` (its id, else its name) was made.
    /// Other requests wait until it is done.
    pub async fn apply_snapshot(&self, _which: &str, _job: &Job) -> Result<Snapshot, ImageError> {
        Err(ImageError::new(ErrorKind::Unsupported, "later"))
    }

    /// Deletes the snapshot named `which` (its name, else its id). Requests of all queues go on
    /// meanwhile, but for milliseconds at the end.
    pub async fn delete_snapshot(&self, _which: &str, _job: &Job) -> Result<Snapshot, ImageError> {
        Err(ImageError::new(ErrorKind::Unsupported, "later"))
    }

    /// Gives the snapshot named `which` (its id, else its name) another name.
    pub async fn rename_snapshot(&self, _which: &str, _name: &str) -> Result<Snapshot, ImageError> {
        Err(ImageError::new(ErrorKind::Unsupported, "later"))
    }

    /// Keeps the snapshot with this id from being deleted until the guard is dropped; whoever reads
    /// its tables holds one. Nothing to do for an image that is not written to.
    pub(crate) fn hold_snapshot(&self, _id: &[u8]) -> HeldSnapshot<'_> {
        HeldSnapshot {
            _image: &self.image,
        }
    }
}

/// A snapshot that somebody reads.
#[derive(Debug)]
pub(crate) struct HeldSnapshot<'a> {
    _image: &'a crate::image::Image,
}
