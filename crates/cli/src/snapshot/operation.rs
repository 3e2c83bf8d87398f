//! Snapshot operations: create, apply, delete and rename, in this process or by a server.

use std::io::Write;
use std::sync::Arc;

use gaur_block::File;
use gaur_engine::{ImageError, Job, NewSnapshot, Queue, Snapshot};

use super::local::{self, Watch};
use super::target::{ChangeArgs, Target};
use crate::control::client::Client;
use crate::control::protocol::Command;
use crate::failure::Failure;
use crate::progress::Progress;

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Make one of the disk as it is.
    Create(NewSnapshot),
    /// Make the disk what it was.
    Apply { snapshot: String },
    /// Delete it.
    Delete { snapshot: String },
    /// Call it something else.
    Rename { snapshot: String, name: String },
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

    /// Does it to the target, and waits for the end.
    pub fn perform(
        self,
        target: &Target,
        args: &ChangeArgs,
        out: &mut dyn Write,
    ) -> Result<u8, Failure> {
        let mut progress = Progress::growing(args.progress, args.quiet, false);
        out.flush()?;
        match target {
            Target::Server(server) => {
                let client = Client::connect(server)?;
                client.call(Command::from(self), &mut progress)?;
            }
            Target::Image(spec) => {
                let image = args.open(spec)?;
                let job = Arc::new(Job::default());
                let watch = Watch {
                    progress,
                    meter: || job.progress_bytes(),
                    cancel: {
                        let job = Arc::clone(&job);
                        move || job.cancel()
                    },
                };
                let done = local::drive(&image, args.host, watch, async |queue| {
                    let done = self.run(queue, &job).await;
                    done.map_err(|error| Failure::image(spec.path(), &error))
                });
                let closed = image.close();
                done.and(closed)?;
            }
        }
        Ok(0)
    }
}
