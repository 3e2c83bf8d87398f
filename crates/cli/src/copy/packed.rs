//! Copying into compressed clusters.
//!
//! A piece is whole clusters of the target, of which each is read through all sources that it touches. The
//! workers compress beside each other. All write through one queue, so that what is written lies without gaps: each
//! queue has counted space ahead.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use gaur_engine::{CompressedCluster, Compressor};

use super::{Compression, Copy, CopyState, CopyTask, PIECE_BYTES, Position, TaskKind, hold};
use crate::failure::Failure;
use crate::guest::Guest;

/// What a worker has of its own.
struct Worker {
    sources: Vec<Guest>,
    compressor: Compressor,
    plain: Vec<u8>,
    packed: Vec<CompressedCluster>,
}

impl Copy {
    /// Copies pieces until there are no more.
    pub(super) fn work_packed(
        &self,
        state: &CopyState,
        target: &Mutex<Guest>,
        compression: Compression,
    ) -> Result<(), Failure> {
        let compressor = Compressor::new(hold(target).image(), compression.level)
            .map_err(|error| Failure::image(self.target.name(), &error))?;
        let compressor = match self.sparse_bytes {
            0 => compressor.storing_zeros(),
            _ => compressor,
        };
        let mut worker = Worker {
            sources: self.sources.iter().map(|source| source.guest()).collect(),
            compressor,
            plain: vec![0; PIECE_BYTES as usize],
            packed: Vec::new(),
        };
        while let Some(piece) = self.next_packed(state, &worker)? {
            if piece.kind == TaskKind::Data {
                self.pace(state, piece.len);
                let plain = &mut worker.plain[..piece.len as usize];
                self.read_across(&worker.sources, piece.target_offset, plain)?;
                worker.compress(piece.len as usize);
            }
            if !self.in_order {
                self.write_packed(&hold(target), &worker, &piece)?;
            } else if state.wait_turn(piece.number) {
                self.write_packed(&hold(target), &worker, &piece)?;
                state.end_turn();
            }
            state.done_bytes.fetch_add(piece.len, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Cuts the next piece off; `None` at the end, and after a failure.
    fn next_packed(&self, state: &CopyState, worker: &Worker) -> Result<Option<CopyTask>, Failure> {
        let cluster = worker.compressor.cluster_bytes() as u64;
        let total = self.total_bytes();
        let mut at = hold(&state.position);
        while at.target_offset < total && !state.has_failed() {
            let start = at.target_offset;
            let (kind, len) = self.run_at(&mut at, &worker.sources, start)?;
            // Clusters that are zeros, or not to be copied, throughout.
            let mut end = (start + len).min(total);
            if kind != Some(TaskKind::Data) && end < total {
                end -= end % cluster;
            }
            if kind != Some(TaskKind::Data) && end > start {
                at.target_offset = end;
                if kind.is_some() {
                    return Ok(Some(at.piece(TaskKind::Zero, start)));
                }
                state.done_bytes.fetch_add(end - start, Ordering::Relaxed);
                continue;
            }
            at.target_offset = self.data_end(&mut at, worker, start)?;
            return Ok(Some(at.piece(TaskKind::Data, start)));
        }
        Ok(None)
    }

    /// Where the clusters end that have data, from the one at `start` on, within a piece.
    fn data_end(&self, at: &mut Position, worker: &Worker, start: u64) -> Result<u64, Failure> {
        let cluster = worker.compressor.cluster_bytes() as u64;
        let limit = (start - start % PIECE_BYTES + PIECE_BYTES).min(self.total_bytes());
        let mut end = (start + cluster).min(limit);
        while end < limit {
            let (kind, len) = self.run_at(at, &worker.sources, end)?;
            if kind != Some(TaskKind::Data) && len >= cluster {
                break;
            }
            end = (end + len).next_multiple_of(cluster).min(limit);
        }
        Ok(end)
    }

    /// What is to be done at an offset of the target, and for how many bytes.
    fn run_at(
        &self,
        position: &mut Position,
        sources: &[Guest],
        offset: u64,
    ) -> Result<(Option<TaskKind>, u64), Failure> {
        let (index, at) = self.source_at(offset);
        let source = &self.sources[index];
        let left = source.size_bytes() - at;
        let extent = self.map(position, sources, index, at, left)?;
        Ok(self.cut(&extent, offset))
    }

    /// The source that has the byte at an offset of the target, which one of them has, and its offset there.
    fn source_at(&self, offset: u64) -> (usize, u64) {
        let mut at = offset;
        for (index, source) in self.sources.iter().enumerate() {
            if at < source.size_bytes() {
                return (index, at);
            }
            at -= source.size_bytes();
        }
        unreachable!("the offset is below the length of all sources")
    }

    fn read_across(&self, sources: &[Guest], offset: u64, bytes: &mut [u8]) -> Result<(), Failure> {
        let (mut offset, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let (index, at) = self.source_at(offset);
            let source = &self.sources[index];
            let len = (source.size_bytes() - at).min(rest.len() as u64);
            let (part, after) = rest.split_at_mut(len as usize);
            self.read(&sources[index], index, at, part)?;
            (offset, rest) = (offset + len, after);
        }
        Ok(())
    }

    fn write_packed(
        &self,
        target: &Guest,
        worker: &Worker,
        piece: &CopyTask,
    ) -> Result<(), Failure> {
        let start = piece.target_offset;
        let failed = |what, offset, errno| self.target.failed(what, offset, errno);
        if piece.kind == TaskKind::Zero {
            return target
                .write_zeroes(start, piece.len)
                .map_err(|errno| failed("write zeros", start, errno));
        }
        let plain = &worker.plain[..piece.len as usize];
        let clusters = plain.chunks(worker.compressor.cluster_bytes());
        for ((plain, packed), number) in clusters.zip(&worker.packed).zip(0..) {
            let offset = start + number * worker.compressor.cluster_bytes() as u64;
            let covered = self.backing_bytes.is_some_and(|backing| offset < backing);
            if self.target_is_zero && !covered && packed.stored_bytes() == 0 {
                continue;
            }
            let is_part = plain.len() < worker.compressor.cluster_bytes();
            let end = offset + plain.len() as u64;
            // The rest of the last cluster is the target's where that is longer.
            let written = match is_part && end < self.target.size_bytes() {
                true => target.write(offset, plain),
                false => target.write_compressed(offset, plain, packed),
            };
            written.map_err(|errno| failed("write", offset, errno))?;
        }
        Ok(())
    }
}

impl Worker {
    /// Compresses the first `len` bytes of what was read.
    fn compress(&mut self, len: usize) {
        let clusters = self.plain[..len].chunks(self.compressor.cluster_bytes());
        let count = clusters.len();
        if self.packed.len() < count {
            self.packed.resize_with(count, CompressedCluster::default);
        }
        for (plain, packed) in clusters.zip(&mut self.packed) {
            self.compressor.compress(plain, packed);
        }
    }
}

impl Position {
    /// The piece from `start` up to here, which has the next turn.
    fn piece(&mut self, kind: TaskKind, start: u64) -> CopyTask {
        let number = self.number;
        self.number += 1;
        CopyTask {
            number,
            source: 0,
            source_offset: start,
            target_offset: start,
            len: self.target_offset - start,
            kind,
            place: None,
        }
    }
}
