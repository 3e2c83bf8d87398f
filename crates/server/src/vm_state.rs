//! Copies VM state from a pipe into a snapshot, and from a snapshot into a pipe.

use std::sync::Arc;

use gaur_block::File;
use gaur_engine::{
    ErrorKind, ImageError, Job, NewSnapshot, Queue, Snapshot, VmStateReader, VmStateSave,
    find_snapshot,
};

use crate::failure::Failure;
use crate::state_pipe::{Broken, Receiver, Sender};

/// Refuses what could only fail in the end, before a long state is read. `name` is the image's.
pub async fn check_new<F: File>(
    queue: &Queue<F>,
    name: &str,
    new: &NewSnapshot,
) -> Result<(), Failure> {
    let image = |error: ImageError| Failure::image(name, &error);
    if queue.image().is_read_only() {
        let failure = Failure::about(name, "is open for reading only");
        return Err(failure.kind(ErrorKind::ReadOnly));
    }
    let taken = |one: &Snapshot| {
        let is = |text: &str| one.name == text.as_bytes() || one.id == text.as_bytes();
        is(&new.name) || new.id.as_deref().is_some_and(|id| one.id == id.as_bytes())
    };
    if queue.snapshots().await.map_err(image)?.iter().any(taken) {
        let message = format!("a snapshot called {:?} is there already", new.name);
        return Err(Failure::about(name, message).kind(ErrorKind::InvalidInput));
    }
    Ok(())
}

/// The snapshot with this id, else name, if it has a state.
pub async fn find<F: File>(queue: &Queue<F>, name: &str, which: &str) -> Result<Snapshot, Failure> {
    let image = |error: ImageError| Failure::image(name, &error);
    let snapshots = queue.snapshots().await.map_err(image)?;
    let found = find_snapshot(&snapshots, which).map_err(image)?;
    if found.vm_state_size == 0 {
        let message = format!("snapshot {which:?} has no machine state, only the disk");
        return Err(Failure::about(name, message).kind(ErrorKind::NotFound));
    }
    Ok(found.clone())
}

/// Makes a snapshot with the state that comes out of `receiver`. When that breaks, nothing is made.
pub async fn save<F: File>(
    queue: &Queue<F>,
    name: &str,
    new: &NewSnapshot,
    receiver: Receiver,
    job: &Job,
) -> Result<Snapshot, Failure> {
    let image = |error: ImageError| Failure::image(name, &error);
    let state = VmStateSave::begin(queue.image()).map_err(image)?;
    let saved = match write_all(&state, queue, &receiver).await {
        // What was to come through a pipe did not, most likely.
        Ok(()) if state.size_bytes() == 0 => {
            let failure = Failure::about(name, "the state is empty, so no snapshot is made");
            let failure = failure.kind(ErrorKind::InvalidInput);
            Err(failure.hint("'gaur snapshot create' makes one of the disk alone"))
        }
        Ok(()) => state.finish(queue, new, job).await.map_err(image),
        Err(SaveError::Broken) => Err(Failure::cancelled(name)),
        Err(SaveError::Image(error)) => Err(image(error)),
    };
    if saved.is_err() {
        state.abort(queue).await;
    }
    saved
}

/// Why a state did not get into the image.
enum SaveError {
    Image(ImageError),
    /// The rest of it does not come.
    Broken,
}

async fn write_all<F: File>(
    state: &Arc<VmStateSave>,
    queue: &Queue<F>,
    receiver: &Receiver,
) -> Result<(), SaveError> {
    let mut writer = state.writer(queue);
    while let Some(piece) = receiver.next().await.map_err(|Broken| SaveError::Broken)? {
        writer.write(&piece).await.map_err(SaveError::Image)?;
        receiver.give_back(piece);
    }
    writer.flush().await.map_err(SaveError::Image)
}

/// Sends the state of the snapshot with this id, else name, into `sender`.
pub async fn extract<F: File>(
    queue: &Queue<F>,
    name: &str,
    which: &str,
    sender: Sender,
) -> Result<(), Failure> {
    let image = |error: ImageError| Failure::image(name, &error);
    let mut reader = VmStateReader::open(queue, which).await.map_err(image)?;
    loop {
        let piece = sender.piece().await;
        let mut piece = piece.map_err(|Broken| Failure::cancelled(name))?;
        let len = reader.read(&mut piece).await.map_err(image)?;
        if len == 0 {
            sender.finish();
            return Ok(());
        }
        piece.truncate(len);
        sender.send(piece);
    }
}
