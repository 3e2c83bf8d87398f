//! Commands about exports. They open images, wait for clients and devices, and so block: each is done
//! by a thread of its own, which the session waits for.

use std::sync::Arc;

use gaur_engine::Job;
use serde_json::{Value, json};

use super::protocol::{Removing, Resizing};
use crate::exporter::{AddExport, CommandUse, Export, Exporter};
use crate::failure::Failure;

/// Adds an export.
pub async fn add(
    exporter: &Arc<Exporter>,
    name: Option<String>,
    add: AddExport,
) -> Result<Value, Failure> {
    let exporter = Arc::clone(exporter);
    off_thread(move || {
        // What commands have made is not gone because some other client leaves.
        exporter.keep_nbd();
        let export = exporter.add(add.named(name)?)?;
        Ok(json!(exporter.facts(&export)))
    })
    .await
}

/// Ends an export.
pub async fn remove(
    exporter: &Arc<Exporter>,
    name: Option<String>,
    removing: Removing,
) -> Result<Value, Failure> {
    let (exporter, name) = (Arc::clone(exporter), named(name)?);
    off_thread(move || {
        let facts = exporter.facts(&*exporter.find(&name)?);
        exporter.keep_nbd();
        exporter.remove(&name, removing.drain_limit())?;
        Ok(json!(facts))
    })
    .await
}

/// Changes the size of an export's image.
pub async fn resize(
    exporter: &Arc<Exporter>,
    used: (Arc<Export>, CommandUse),
    resizing: Resizing,
    job: &Arc<Job>,
) -> Result<Value, Failure> {
    let (exporter, job) = (Arc::clone(exporter), Arc::clone(job));
    off_thread(move || {
        let size = resizing.size()?;
        let export = exporter.resize(used, (size, resizing.shrink), &job)?;
        Ok(json!(exporter.facts(&export)))
    })
    .await
}

/// What changes an export names it, even if it is the only one: the next moment it may not be.
pub fn named(name: Option<String>) -> Result<String, Failure> {
    let missing = || Failure::new("\"export\" is missing, the name of the export");
    name.ok_or_else(|| missing().kind(gaur_engine::ErrorKind::InvalidInput))
}

/// Runs `work`, which may block, on a thread of its own.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let (done, outcome) = async_channel::bounded(1);
    let thread = std::thread::Builder::new().name("command".to_owned());
    // A panic drops the sender.
    let thread = thread.spawn(move || done.try_send(work()).is_ok());
    thread.map_err(|error| Failure::io("the thread of a command", &error))?;
    let outcome = outcome.recv().await;
    outcome.unwrap_or_else(|_| Err(Failure::new("the command failed on its way")))
}
