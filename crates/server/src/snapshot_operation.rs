//! What can be done to snapshots in one step.

use gaur_block::File;
use gaur_engine::{ImageError, Job, NewSnapshot, Queue, Snapshot};

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Make one of the disk as it is.
    Create(NewSnapshot),
    /// Make the disk what it was.
    Apply {
        /// Its id or name.
        snapshot: String,
    },
    /// Delete it.
    Delete {
        /// Its id or name.
        snapshot: String,
    },
    /// Call it something else.
    Rename {
        /// Its id or name.
        snapshot: String,
        /// The new name.
        name: String,
    },
}

impl Operation {
    /// Does it.
    pub async fn run<F: File>(&self, queue: &Queue<F>, job: &Job) -> Result<Snapshot, ImageError> {
        match self {
            Operation::Create(new) => queue.create_snapshot(new, job).await,
            Operation::Apply { snapshot } => queue.apply_snapshot(snapshot, job).await,
            Operation::Delete { snapshot } => queue.delete_snapshot(snapshot, job).await,
            Operation::Rename { snapshot, name } => queue.rename_snapshot(snapshot, name).await,
        }
    }
}
