//! VM state workload: a task that saves and reads VM state while the guest runs.
//!
//! A state is written in pieces of any length, in order or not, by several writers, with holes between
//! them. Before its end nothing of it is in the image; then the snapshot and all of it are.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use gaur_engine::{ErrorKind, ImageError, Queue, VmStateReader, VmStateSave, VmStateWriter};
use gaur_sim::{Random, SimFile};

use super::Load;
use super::snapshots::{Outcome, times};
use crate::config::SnapshotLoad;
use crate::model::PendingCreate;

/// Longest state that is written without holes, in bytes.
const DENSE_BYTES: u64 = 96 << 10;
/// Longest state of few pieces; a writer keeps more than one chunk of it.
const SPARSE_BYTES: u64 = 3 << 20;

/// A state as it is to be.
struct StateToSave {
    bytes: Vec<u8>,
    /// What is written, in this order; the rest are holes.
    pieces: Vec<Range<usize>>,
}

impl StateToSave {
    fn draw(random: &mut Random) -> StateToSave {
        let sparse = random.chance(100);
        let len = match random.below(8) {
            0 => 0,
            1 => random.between(1, 700),
            _ if sparse => random.between(1, SPARSE_BYTES),
            _ => random.between(1, DENSE_BYTES),
        };
        let holes = sparse || random.chance(300);
        let longest = random.pick(&[9, 600, 4104, 70_000]);
        let mut pieces = Vec::new();
        let mut at = 0;
        while at < len {
            let end = len.min(at + random.between(1, longest));
            if !holes || random.chance(300) {
                pieces.push(at as usize..end as usize);
            }
            at = end;
            if sparse {
                at += random.below(300_000);
            }
        }
        let mut bytes = vec![0; len as usize];
        for piece in &pieces {
            let mut stream = random.fork();
            for eight in bytes[piece.clone()].chunks_mut(8) {
                let number = stream.number().to_le_bytes();
                eight.copy_from_slice(&number[..eight.len()]);
            }
        }
        if random.chance(300) {
            // Not in order.
            for number in 1..pieces.len() {
                pieces.swap(number, random.index(number + 1));
            }
        }
        StateToSave { bytes, pieces }
    }
}

/// The writers of one state.
struct WriterGroup {
    left: Cell<usize>,
    /// One could not write all of its pieces.
    failed: Cell<bool>,
}

/// How often a writer tries to write a piece.
const TRIES_MAX: usize = 3;

impl Load {
    /// Saves a state, or begins to.
    pub(super) async fn save(
        self: &Rc<Self>,
        queues: &[Rc<Queue<SimFile>>],
        random: &mut Random,
        load: &SnapshotLoad,
    ) {
        let resizing = self.growing.get() || self.exclusive.get();
        if self.config.image.shape.version == 2 && resizing {
            return;
        }
        let queue = &queues[random.index(queues.len())];
        let save = match VmStateSave::begin(queue.image()) {
            Ok(save) => save,
            Err(error) => {
                return self.refused("begin of a save", queue, &error, self.may_overflow());
            }
        };
        self.saving.set(self.saving.get() + 1);
        let wanted = Rc::new(StateToSave::draw(random));
        let written = self.write_state(&save, &wanted, queues, random).await;
        match random.below(10) {
            _ if !written => save.abort(queue).await,
            0 => save.abort(queue).await,
            1 => {}
            _ => self.finish_save(&save, &wanted, queue, random, load).await,
        }
        self.saving.set(self.saving.get() - 1);
    }

    /// Writes all pieces, each by one of several writers. False if one could not.
    async fn write_state(
        self: &Rc<Self>,
        save: &Arc<VmStateSave>,
        wanted: &Rc<StateToSave>,
        queues: &[Rc<Queue<SimFile>>],
        random: &mut Random,
    ) -> bool {
        let count = random.pick(&[1, 1, 2, 3]);
        let writers = Rc::new(WriterGroup {
            left: Cell::new(count),
            failed: Cell::new(false),
        });
        let (len, pieces) = (wanted.bytes.len(), wanted.pieces.len());
        self.begin(format_args!(
            "state of {len} bytes in {pieces} pieces by {count}"
        ));
        for number in 0..count {
            let queue = Rc::clone(&queues[random.index(queues.len())]);
            let (load, writers) = (Rc::clone(self), Rc::clone(&writers));
            let (save, wanted, random) = (Arc::clone(save), Rc::clone(wanted), random.fork());
            let name = format!("state writer {number}");
            self.handle.spawn(&name, async move {
                let mine = number..;
                let written = write_pieces(&save, &wanted, &queue, mine, count, random).await;
                if let Err(error) = written {
                    load.refused("write of a state", &queue, &error, false);
                    writers.failed.set(true);
                }
                drop(save);
                writers.left.set(writers.left.get() - 1);
            });
        }
        while writers.left.get() > 0 {
            self.handle.sleep(2_000).await;
        }
        if let Err(error) = save.extend_to(len as u64) {
            self.refused("end of a state", &queues[0], &error, false);
            return false;
        }
        !writers.failed.get()
    }

    /// An error without consequences; wrong on a healthy disk unless there is an `excuse`.
    fn refused(&self, what: &str, queue: &Queue<SimFile>, error: &ImageError, excuse: bool) {
        let poisoned = queue.image().poisoned().is_some();
        if !excuse && !poisoned && !self.may_fail.get() {
            self.fail(format!("{what} fails on a healthy disk: {error:#}"));
        }
    }

    async fn finish_save(
        &self,
        save: &Arc<VmStateSave>,
        wanted: &StateToSave,
        queue: &Queue<SimFile>,
        random: &mut Random,
        load: &SnapshotLoad,
    ) {
        // Once more if it fails: a write may have failed, or the save was cancelled.
        for last in [false, true] {
            let new = self.draw_new(random);
            let begun = self.start(format!("save {}", new.name), random, load.cancel_per_mille);
            let change = self.model.borrow_mut().create(PendingCreate {
                name: new.name.clone(),
                times: times(&new),
                state: wanted.bytes.as_slice().into(),
            });
            let result = save.finish(queue, &new, &begun.job).await;
            let result = result.as_ref();
            match self.finish(queue, &begun, result, self.may_overflow()) {
                Outcome::Done => {
                    self.stats.borrow_mut().states += 1;
                    return self.created(&begun, change, &new, result.ok());
                }
                Outcome::Nothing => self.model.borrow_mut().undo_change(change),
                Outcome::Unknown => return,
            }
            if last || random.chance(500) {
                return save.abort(queue).await;
            }
        }
    }

    /// Reads the state of a snapshot, which cannot be deleted meanwhile.
    pub(super) async fn read_state(&self, queue: &Queue<SimFile>, random: &mut Random) {
        let Some(saved) = self.pick_saved(random) else {
            return;
        };
        let id = saved.seen.id.clone();
        self.model.borrow_mut().hold(&id);
        let tag = self.begin(format_args!("read the state of {id}"));
        let reading = async {
            let mut reader = VmStateReader::open(queue, &id).await?;
            let seed = random.fork();
            let wrong = compare_state(&mut reader, &saved.seen.state, seed).await?;
            if random.chance(200) {
                let job = gaur_engine::Job::default();
                let deleted = queue.delete_snapshot(&id, &job).await;
                let locked = deleted
                    .as_ref()
                    .is_err_and(|error| error.kind() == ErrorKind::Locked);
                if !locked && !self.may_fail.get() {
                    self.fail(format!("delete during a read {} gives {deleted:?}", tag));
                }
            }
            Ok::<_, ImageError>(wrong)
        };
        match reading.await {
            Ok(None) => {}
            Ok(Some(wrong)) => self.fail(format!("read {}: {wrong}", tag)),
            Err(error) => self.refused("read of a state", queue, &error, false),
        }
        self.model.borrow_mut().release(&id);
    }
}

/// Writes every `count`th piece, from the first of `mine` on.
async fn write_pieces(
    save: &Arc<VmStateSave>,
    wanted: &StateToSave,
    queue: &Queue<SimFile>,
    mine: std::ops::RangeFrom<usize>,
    count: usize,
    mut random: Random,
) -> Result<(), ImageError> {
    let mut writer = save.writer(queue);
    for piece in wanted.pieces.iter().skip(mine.start).step_by(count) {
        let bytes = &wanted.bytes[piece.clone()];
        let mut tries = 0;
        // An error may be that of an earlier piece, which is not lost; this one may be.
        while let Err(error) =
            write_piece(&mut writer, piece.start as u64, bytes, &mut random).await
        {
            tries += 1;
            if tries == TRIES_MAX {
                return Err(error);
            }
        }
        if random.chance(10) {
            writer.flush().await.ok();
        }
    }
    let mut tries = 1;
    while tries < TRIES_MAX && writer.flush().await.is_err() {
        tries += 1;
    }
    writer.flush().await
}

async fn write_piece(
    writer: &mut VmStateWriter<'_, SimFile>,
    at: u64,
    bytes: &[u8],
    random: &mut Random,
) -> Result<(), ImageError> {
    if writer.position() == at {
        writer.write(bytes).await
    } else if random.chance(500) {
        writer.set_position(at);
        writer.write(bytes).await
    } else {
        writer.write_at(at, bytes).await
    }
}

/// Reads a state in order, then in places; what is wrong.
pub(crate) async fn compare_state(
    reader: &mut VmStateReader<'_, SimFile>,
    expected: &[u8],
    mut random: Random,
) -> Result<Option<String>, ImageError> {
    let size = reader.size_bytes();
    if size != expected.len() as u64 {
        let len = expected.len();
        return Ok(Some(format!("the state has {size} bytes instead of {len}")));
    }
    let mut state = Vec::new();
    let longest = random.pick(&[8, 5000, 200_000]).max(size / 50 + 1);
    loop {
        let mut part = vec![0xa5; random.between(1, longest) as usize];
        let count = reader.read(&mut part).await?;
        state.extend_from_slice(&part[..count]);
        if count < part.len() {
            break;
        }
    }
    if state != expected {
        let at = state
            .iter()
            .zip(expected)
            .position(|(one, other)| one != other);
        let len = state.len();
        return Ok(Some(format!(
            "{len} bytes of state, first difference at {at:?}"
        )));
    }
    for _ in 0..4 {
        let from = random.below(size + 1);
        let mut part = vec![0xa5; random.between(1, 9000) as usize];
        let count = reader.read_at(from, &mut part).await?;
        let rest = &expected[from as usize..];
        if part[..count] != rest[..part.len().min(rest.len())] {
            return Ok(Some(format!("bytes of the state at {from} are wrong")));
        }
    }
    Ok(None)
}
