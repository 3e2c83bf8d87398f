//! Snapshot operations: create, apply, delete and rename, in this process or by a server.

use std::io::Write;
use std::sync::Arc;

use gaur_engine::Job;
pub use gaur_server::snapshot_operation::Operation;
use serde_json::Value;

use super::target::{ChangeArgs, Target};
use crate::control::client::Client;
use crate::control::protocol::Command;
use crate::drive::{drive, watch};
use crate::failure::Failure;
use crate::progress::Progress;

/// Does it to the target, and waits for the end.
pub fn perform(
    operation: Operation,
    target: &Target,
    args: &ChangeArgs,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    let mut progress = Progress::new(None, args.progress, args.quiet, false);
    out.flush()?;
    match target {
        Target::Server(server) => {
            let client = Client::connect(server)?;
            let _: Value = client.call(Command::Change(operation), &mut progress)?;
        }
        Target::Image(spec) => {
            let image = args.open(spec)?;
            let job = Arc::new(Job::default());
            let done = drive(&image, args.host, progress, watch(&job), async |queue| {
                let done = operation.run(queue, &job).await;
                done.map_err(|error| Failure::image(spec.path(), &error))
            });
            let closed = image.close();
            done.and(closed)?;
        }
    }
    Ok(0)
}
