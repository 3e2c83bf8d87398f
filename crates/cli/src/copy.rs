//! Multi-threaded copy of guest data from images to an image, for `gaur convert`.
//!
//! The workers take turns to walk the maps of the sources and cut a piece off; then each reads, looks for
//! zeros and writes. Every thread has its own queues. Unless told otherwise, the pieces are written
//! in guest order (a piece waits for its turn after it was read), which leaves the target laid out
//! the way it will be read. Nothing is shared but the position, the turn and the first error.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gaur_block::Errno;
use gaur_engine::{Job, MapExtent};

use crate::compare::is_zero;
use crate::failure::Failure;
use crate::file_holes::FileHoles;
use crate::guest::Guest;
use crate::interrupt;
use crate::notice::say;
use crate::rate::Rate;
use crate::shared_image::SharedImage;

mod cloned;
mod packed;

use cloned::{Cloning, Place};

/// Most bytes of one piece, and the size of the largest cluster.
const PIECE_BYTES: u64 = 2 << 20;

/// The same where bytes go through a socket.
const REMOTE_PIECE_BYTES: u64 = 1 << 20;

/// How far from where it cannot be told the next look is.
const UNKNOWN_BYTES: u64 = 64 << 10;

/// What is given up at once when a source cannot be read.
const SECTOR_BYTES: usize = 512;

/// Most bytes zeroed by one request, so that progress can be told.
const ZEROES_BYTES: u64 = 1 << 30;

/// Interval of progress updates.
const TICK: Duration = Duration::from_millis(50);

/// What is to be copied, and how.
pub struct Copy {
    /// Their contents follow each other in the target.
    pub sources: Vec<SharedImage>,
    /// At least as large as the sources together.
    pub target: SharedImage,
    /// Target bytes from 0 on that a backing file provides where the source's top layer has nothing.
    pub backing_bytes: Option<u64>,
    /// The target reads as zeros where nothing was written.
    pub target_is_zero: bool,
    /// Runs of zeros of at least this many bytes are not written as data; 0 writes everything.
    pub sparse_bytes: u64,
    /// Number of workers, at least 1.
    pub workers: usize,
    /// Pieces are written in the order of the guest's offsets.
    pub in_order: bool,
    /// The file system may share the space of the sources with a raw target.
    pub clones: bool,
    /// What cannot be read is taken for zeros.
    pub salvage: bool,
    /// How fast data is moved.
    pub rate: Option<Rate>,
    /// The target's clusters are compressed.
    pub compression: Option<Compression>,
}

/// How the target's clusters are compressed; its header says with what.
#[derive(Clone, Copy, Debug)]
pub struct Compression {
    /// `None` for the usual one.
    pub level: Option<u32>,
}

/// What a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskKind {
    Data,
    Zero,
}

/// A run of the target for one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopyTask {
    /// Its turn, counted from 0 without gaps.
    number: u64,
    source: usize,
    source_offset: u64,
    target_offset: u64,
    len: u64,
    kind: TaskKind,
    /// Where its bytes are in a file, if they may be cloned from there.
    place: Option<Place>,
}

/// Where the next piece begins.
#[derive(Default)]
struct Position {
    number: u64,
    source: usize,
    source_offset: u64,
    target_offset: u64,
    /// Of each source.
    holes: Vec<FileHoles>,
}

/// What the threads share.
#[derive(Default)]
struct CopyState {
    position: Mutex<Position>,
    done_bytes: AtomicU64,
    failed: AtomicBool,
    error: Mutex<Option<Failure>>,
    turn: Mutex<u64>,
    turned: Condvar,
    cloning: Cloning,
}

impl Position {
    /// What a source has at an offset, holes of its files among it.
    fn map(
        &mut self,
        guest: &Guest,
        source: usize,
        offset: u64,
        len: u64,
    ) -> Result<MapExtent, Errno> {
        let mut extent = guest.map(offset, len)?;
        if let Some(holes) = self.holes.get_mut(source) {
            holes.refine(guest.image(), &mut extent)?;
        }
        Ok(extent)
    }
}

/// A lock whose holder panicked holds nothing that could be half changed here.
fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CopyState {
    fn fail(&self, failure: Failure) {
        hold(&self.error).get_or_insert(failure);
        self.failed.store(true, Ordering::Release);
        // Under the lock, so that no waiter misses it between looking and sleeping.
        let _turn = hold(&self.turn);
        self.turned.notify_all();
    }

    fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Waits for the turn of `number`. False when the copy has failed meanwhile.
    fn wait_turn(&self, number: u64) -> bool {
        let mut turn = hold(&self.turn);
        while *turn != number && !self.has_failed() {
            turn = self
                .turned
                .wait(turn)
                .unwrap_or_else(PoisonError::into_inner);
        }
        !self.has_failed()
    }

    fn end_turn(&self) {
        *hold(&self.turn) += 1;
        self.turned.notify_all();
    }
}

impl Copy {
    /// Bytes of all sources.
    pub fn total_bytes(&self) -> u64 {
        self.sources.iter().map(SharedImage::size_bytes).sum()
    }

    /// Copies everything, unless the job is cancelled, and tells `progress` how many bytes of the total
    /// are done. What was written is not flushed yet.
    pub fn run(&self, job: &Job, progress: &mut dyn FnMut(u64)) -> Result<(), Failure> {
        let state = &CopyState::default();
        for source in &self.sources {
            let holes = FileHoles::new(source.files());
            let holes = holes.map_err(|errno| source.failed("read the allocation", 0, errno))?;
            hold(&state.position).holes.push(holes);
        }
        let target = &Mutex::new(self.target.guest());
        // Closed when all workers are gone.
        let (end_send, end) = sync_channel::<()>(0);
        std::thread::scope(|scope| {
            for _ in 0..self.workers.max(1) {
                let worker_end = end_send.clone();
                scope.spawn(move || {
                    let _end = worker_end;
                    let worked = match self.compression {
                        Some(compression) => self.work_packed(state, target, compression),
                        None => self.work(state),
                    };
                    if let Err(failure) = worked {
                        state.fail(failure);
                    }
                });
            }
            drop(end_send);
            while end.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                progress(state.done_bytes.load(Ordering::Relaxed));
                if let Err(interrupted) = interrupt::check(job) {
                    state.fail(interrupted);
                }
            }
        });
        match hold(&state.error).take() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    /// Most bytes of one piece. Pieces end at multiples of it in the target, so that two threads never write to one cluster.
    fn piece_bytes(&self) -> u64 {
        let mut images = self.sources.iter().chain([&self.target]);
        if !images.any(SharedImage::is_remote) {
            return PIECE_BYTES;
        }
        let header = self.target.image().layers().top().header();
        let cluster_bytes = header.map_or(0, |header| header.geometry().cluster_size());
        REMOTE_PIECE_BYTES.max(cluster_bytes)
    }

    /// Cuts the next piece off the sources; `None` at their end, and after a failure.
    fn next_piece(
        &self,
        state: &CopyState,
        sources: &[Guest],
    ) -> Result<Option<CopyTask>, Failure> {
        let mut at = hold(&state.position);
        while let Some(source) = self.sources.get(at.source)
            && !state.has_failed()
        {
            let offset = at.source_offset;
            let left = source.size_bytes() - offset;
            if left == 0 {
                at.source += 1;
                at.source_offset = 0;
                continue;
            }
            let index = at.source;
            let extent = self.map(&mut at, sources, index, offset, left)?;
            let (kind, len) = self.cut(&extent, at.target_offset);
            let piece = kind.map(|kind| CopyTask {
                number: at.number,
                source: at.source,
                source_offset: offset,
                target_offset: at.target_offset,
                len,
                kind,
                place: self.place(index, &extent),
            });
            at.source_offset += len;
            at.target_offset += len;
            if piece.is_some() {
                at.number += 1;
                return Ok(piece);
            }
            state.done_bytes.fetch_add(len, Ordering::Relaxed);
        }
        Ok(None)
    }

    /// What a source has at an offset. With `salvage` it is data where that cannot be told.
    fn map(
        &self,
        position: &mut Position,
        sources: &[Guest],
        index: usize,
        offset: u64,
        left: u64,
    ) -> Result<MapExtent, Failure> {
        match position.map(&sources[index], index, offset, left) {
            Err(_) if self.salvage => Ok(MapExtent {
                len_bytes: left.min(UNKNOWN_BYTES - offset % UNKNOWN_BYTES),
                present: true,
                data: true,
                ..MapExtent::default()
            }),
            found => found
                .map_err(|errno| self.sources[index].failed("read the allocation", offset, errno)),
        }
    }

    /// What to do at `target_offset` (nothing is `None`), and for how many bytes.
    fn cut(&self, extent: &MapExtent, target_offset: u64) -> (Option<TaskKind>, u64) {
        let mut len = extent.len_bytes;
        let piece_bytes = self.piece_bytes();
        let to_border = piece_bytes - target_offset % piece_bytes;
        if let Some(backing_bytes) = self.backing_bytes
            && target_offset < backing_bytes
        {
            len = len.min(backing_bytes - target_offset);
            if extent.depth > 0 {
                return (None, len);
            }
            // Without the extent in the top layer it would be seen through to the backing file.
            return match extent.zero || !extent.present {
                true => (Some(TaskKind::Zero), len.min(ZEROES_BYTES)),
                false => (Some(TaskKind::Data), len.min(to_border)),
            };
        }
        let zero = extent.zero || !extent.present;
        if zero && self.sparse_bytes > 0 {
            return match self.target_is_zero {
                true => (None, len),
                false => (Some(TaskKind::Zero), len.min(ZEROES_BYTES)),
            };
        }
        (Some(TaskKind::Data), len.min(to_border))
    }

    /// Copies pieces until there are no more.
    fn work(&self, state: &CopyState) -> Result<(), Failure> {
        let sources: Vec<Guest> = self.sources.iter().map(SharedImage::guest).collect();
        let target = self.target.guest();
        let mut buffer = vec![0; PIECE_BYTES as usize];
        while let Some(piece) = self.next_piece(state, &sources)? {
            self.copy_piece(state, &piece, &sources, &target, &mut buffer)?;
            state.done_bytes.fetch_add(piece.len, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Waits until so many bytes may be moved.
    fn pace(&self, state: &CopyState, len_bytes: u64) {
        if let Some(rate) = &self.rate {
            rate.wait(len_bytes, || state.has_failed());
        }
    }

    /// Reads from a source. With `salvage` what fails is read again sector by sector, and what still fails is zeros.
    fn read(
        &self,
        guest: &Guest,
        index: usize,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), Failure> {
        let source = &self.sources[index];
        let failed = match guest.read(offset, bytes) {
            Err(errno) => errno,
            Ok(()) => return Ok(()),
        };
        if !self.salvage {
            return Err(source.failed("read", offset, failed));
        }
        let mut lost: Option<Range<u64>> = None;
        let tell = |lost: &mut Option<Range<u64>>| {
            if let Some(lost) = lost.take() {
                let name = source.name();
                say(format!(
                    "{name}: cannot read {} bytes at {}; they are zeros in the target",
                    lost.end - lost.start,
                    lost.start
                ));
            }
        };
        let mut at = offset;
        for sector in bytes.chunks_mut(SECTOR_BYTES) {
            let end = at + sector.len() as u64;
            match guest.read(at, sector) {
                Ok(()) => tell(&mut lost),
                Err(_) => {
                    sector.fill(0);
                    lost.get_or_insert(at..at).end = end;
                }
            }
            at = end;
        }
        tell(&mut lost);
        Ok(())
    }

    fn copy_piece(
        &self,
        state: &CopyState,
        piece: &CopyTask,
        sources: &[Guest],
        target: &Guest,
        buffer: &mut [u8],
    ) -> Result<(), Failure> {
        let cloned = piece.kind == TaskKind::Data && self.clone_piece(&state.cloning, piece);
        if piece.kind == TaskKind::Data && !cloned {
            let offset = piece.source_offset;
            let bytes = &mut buffer[..piece.len as usize];
            self.pace(state, piece.len);
            self.read(&sources[piece.source], piece.source, offset, bytes)?;
        }
        let write = || match cloned {
            true => Ok(()),
            false => self.write(target, piece, buffer),
        };
        if !self.in_order {
            return write();
        }
        if state.wait_turn(piece.number) {
            write()?;
            state.end_turn();
        }
        Ok(())
    }

    fn write(&self, target: &Guest, piece: &CopyTask, buffer: &[u8]) -> Result<(), Failure> {
        let zero = |offset, len| {
            target
                .write_zeroes(offset, len)
                .map_err(|errno| self.target.failed("write zeros", offset, errno))
        };
        if piece.kind == TaskKind::Zero {
            return zero(piece.target_offset, piece.len);
        }
        let bytes = buffer.get(..piece.len as usize).unwrap_or_default();
        let covered = self
            .backing_bytes
            .is_some_and(|backing| piece.target_offset < backing);
        for run in runs(bytes, piece.target_offset, self.sparse_bytes as usize) {
            let offset = piece.target_offset + run.start as u64;
            if run.data {
                target
                    .write(offset, &bytes[run.start..run.end])
                    .map_err(|errno| self.target.failed("write", offset, errno))?;
            } else if covered || !self.target_is_zero {
                zero(offset, (run.end - run.start) as u64)?;
            }
        }
        Ok(())
    }
}

/// A part of a piece that is data or zeros throughout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DataRun {
    start: usize,
    end: usize,
    data: bool,
}

/// Cuts `bytes`, which belong at `offset`, at multiples of `sparse` into runs of data and zeros.
/// With `sparse` 0 everything is data.
fn runs(bytes: &[u8], offset: u64, sparse: usize) -> Vec<DataRun> {
    let mut runs: Vec<DataRun> = Vec::new();
    let mut start = 0;
    while start < bytes.len() {
        let (end, data) = if sparse == 0 {
            (bytes.len(), true)
        } else {
            let position = ((offset + start as u64) % sparse as u64) as usize;
            let end = (start + sparse - position).min(bytes.len());
            (end, !is_zero(&bytes[start..end]))
        };
        match runs.last_mut() {
            Some(last) if last.data == data => last.end = end,
            _ => runs.push(DataRun { start, end, data }),
        }
        start = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_cut_out_at_multiples_of_the_sparse_size() {
        let mut bytes = vec![0; 16384];
        bytes[5000] = 1;
        let run = |start, end, data| DataRun { start, end, data };
        assert_eq!(
            runs(&bytes, 0, 4096),
            [
                run(0, 4096, false),
                run(4096, 8192, true),
                run(8192, 16384, false)
            ]
        );
        // The borders lie in the target, not in the buffer.
        assert_eq!(
            runs(&bytes, 1024, 4096),
            [
                run(0, 3072, false),
                run(3072, 7168, true),
                run(7168, 16384, false)
            ]
        );
        assert_eq!(runs(&bytes, 1024, 0), [run(0, 16384, true)]);
        assert_eq!(runs(&[], 0, 4096), []);
    }

    #[test]
    fn runs_cover_every_byte_once() {
        let mut bytes = vec![0; 10_000];
        for at in [0, 511, 512, 4095, 9_999] {
            bytes[at] = 1;
        }
        for sparse in [0, 512, 4096, 65536] {
            let mut end = 0;
            for run in runs(&bytes, 300, sparse) {
                assert_eq!(run.start, end);
                assert!(run.end > run.start);
                assert!(run.data || is_zero(&bytes[run.start..run.end]));
                end = run.end;
            }
            assert_eq!(end, bytes.len());
        }
    }
}
