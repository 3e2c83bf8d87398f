//! What can be done to snapshots in one step.

use std::time::{SystemTime, UNIX_EPOCH};

use gaur_block::File;
use gaur_engine::{ImageError, Job, Queue, Snapshot};
use serde::{Deserialize, Serialize};

use crate::control::protocol::NewEntry;

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Operation {
    /// Make one of the disk as it is.
    Create(NewEntry),
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
    /// What they are called on a control socket.
    pub const NAMES: [&str; 4] = ["create", "apply", "delete", "rename"];

    /// Does it.
    pub async fn run<F: File>(self, queue: &Queue<F>, job: &Job) -> Result<Snapshot, ImageError> {
        match self {
            Operation::Create(new) => queue.create_snapshot(&new.snapshot(now()), job).await,
            Operation::Apply { snapshot } => queue.apply_snapshot(&snapshot, job).await,
            Operation::Delete { snapshot } => queue.delete_snapshot(&snapshot, job).await,
            Operation::Rename { snapshot, name } => queue.rename_snapshot(&snapshot, &name).await,
        }
    }
}

/// A clock that shows a time beyond what the format can have is taken for the last it can.
pub fn now() -> (u32, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    let seconds = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
    (seconds, now.subsec_nanos())
}
