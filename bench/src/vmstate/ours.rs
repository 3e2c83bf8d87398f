//! The engine's own writer and reader of machine state.

use gaur_block::File;
use gaur_engine::{Job, NewSnapshot, Queue, VmStateReader, VmStateSave};

use super::Guest;
use crate::engine::Failure;

const NAME: &str = "bench";

pub(super) async fn save<F: File>(
    queue: &Queue<F>,
    guest: &Guest,
    bytes: u64,
) -> Result<(), Failure> {
    let save = VmStateSave::begin(queue.image())?;
    let mut writer = save.writer(queue);
    for sent in guest.pages() {
        writer.write(&sent.header).await?;
        writer.write(sent.body).await?;
        if writer.position() >= bytes {
            break;
        }
    }
    writer.flush().await?;
    drop(writer);
    let new = NewSnapshot {
        name: NAME.to_owned(),
        ..NewSnapshot::default()
    };
    save.finish(queue, &new, &Job::default()).await?;
    Ok(())
}

pub(super) async fn load<F: File>(queue: &Queue<F>, bytes: u64) -> Result<(), Failure> {
    let mut reader = VmStateReader::open(queue, NAME).await?;
    let mut header = [0; 8];
    let mut page = [0; 4096];
    let mut done = 0;
    // In the pieces in which a machine is loaded; whether they make sense is not asked here.
    while done < bytes {
        done += reader.read(&mut header).await? as u64;
        let count = reader.read(&mut page).await? as u64;
        if count == 0 {
            break;
        }
        done += count;
    }
    Ok(())
}
