//! Bytes of the state go to the file: places are found or taken, whole clusters are written.
//!
//! A write that is under way may wait unpolled for as long as its writer does something else. So it holds
//! no lock of the engine: it writes whole blocks of clusters that nobody else knows. Where clusters are
//! smaller than the file's blocks it has to lock blocks; then the writer waits for it at once.

use std::ops::Range;
use std::sync::Arc;

use gaur_block::{Errno, File, Source};

use super::chunk::{Chunk, Copy};
use super::places::Place;
use super::ranges::Ranges;
use super::save::{Flight, Taken, VmStateSave, top_of};
use crate::align;
use crate::error::ImageError;
use crate::metadata::alloc::Run;
use crate::queue::Queue;

/// Where some bytes of a chunk go: a host offset, and the range in the chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) host_bytes: u64,
    pub(super) range: Range<usize>,
}

/// A chunk, or the new clusters of it, on its way to the file. If this is dropped before the end, its
/// bytes are still to be written.
pub(super) struct Spill<'q, F: File> {
    queue: &'q Queue<F>,
    save: Arc<VmStateSave>,
    chunk: Arc<Chunk>,
    close: bool,
    ranges: Ranges,
    copy: Option<Copy>,
    pieces: Vec<Piece>,
    taken: Option<Taken>,
    _flight: Flight,
}

impl<'q, F: File> Spill<'q, F> {
    /// Begins to write what is new in `chunk`, which is closed afterwards if it is full or `close` says
    /// so. `None` if nothing is to be done or somebody is at it.
    pub(super) async fn begin(
        save: &Arc<VmStateSave>,
        queue: &'q Queue<F>,
        chunk: &Arc<Chunk>,
        close: bool,
    ) -> Result<Option<Spill<'q, F>>, ImageError> {
        let flight = save.flight();
        let Some(copy) = chunk.begin_write(save.cluster_bytes as usize) else {
            return Ok(None);
        };
        let mut spill = Spill {
            queue,
            save: Arc::clone(save),
            chunk: Arc::clone(chunk),
            close,
            ranges: copy.ranges.clone(),
            copy: Some(copy),
            pieces: Vec::new(),
            taken: None,
            _flight: flight,
        };
        let mut taken = Taken::new(save);
        for range in spill.ranges.iter() {
            let pieces = save.place(queue, chunk.index, range, &mut taken).await?;
            spill.pieces.extend(pieces);
        }
        spill.taken = Some(taken);
        Ok(Some(spill))
    }

    /// Whether it must be waited for at once, see the module.
    pub(super) fn must_wait(&self) -> bool {
        let limits = self.queue.top_file().limits();
        let block = limits.request_alignment.max(limits.memory_alignment);
        self.save.cluster_bytes < u64::from(block)
    }

    /// Writes it.
    pub(super) async fn run(mut self) -> Result<(), ImageError> {
        if let Some(copy) = &self.copy {
            for piece in &self.pieces {
                let bytes = copy.bytes(piece.range.clone());
                write_piece(self.queue, piece.host_bytes, bytes).await?;
            }
        }
        if let Some(taken) = self.taken.take() {
            taken.keep();
        }
        self.copy = None;
        self.ranges = Ranges::default();
        let close = self.close;
        self.save
            .retire(&self.chunk, |chunk| chunk.write_done(close));
        Ok(())
    }
}

impl<F: File> Drop for Spill<'_, F> {
    fn drop(&mut self) {
        if self.copy.take().is_some() {
            self.chunk.write_failed(&self.ranges);
        }
    }
}

/// Writes whole clusters of the state.
pub(super) async fn write_piece<F: File>(
    queue: &Queue<F>,
    host_bytes: u64,
    bytes: &[u8],
) -> Result<(), ImageError> {
    if let Some(errno) = queue.image.poisoned() {
        return Err(failed(errno));
    }
    let file = queue.top_file();
    let limits = file.limits();
    let block = u64::from(limits.request_alignment.max(1));
    let whole =
        (host_bytes | bytes.len() as u64).is_multiple_of(block) && suits_memory(file, bytes);
    if !whole {
        let (locks, source) = (&queue.image.locks, Source::Memory(bytes));
        let written = align::write(file, &queue.pool, locks, host_bytes, source).await;
        return written.map_err(failed);
    }
    let mut at = host_bytes;
    for part in bytes.chunks((limits.max_transfer as usize).max(1)) {
        let written = file.write_at(at, Source::Memory(part)).await;
        written.map_err(failed)?;
        at += part.len() as u64;
    }
    Ok(())
}

/// Whether the file takes this memory as it is.
pub(super) fn suits_memory<F: File>(file: &F, bytes: &[u8]) -> bool {
    let alignment = file.limits().memory_alignment.max(1) as usize;
    bytes.as_ptr().addr().is_multiple_of(alignment)
}

pub(super) fn failed(errno: Errno) -> ImageError {
    ImageError::io(errno, "cannot write the state of the machine")
}

impl VmStateSave {
    /// Where the clusters in `range` of chunk `index` go; those that have no place are taken.
    pub(super) async fn place<F: File>(
        self: &Arc<Self>,
        queue: &Queue<F>,
        index: u64,
        range: &Range<usize>,
        taken: &mut Taken,
    ) -> Result<Vec<Piece>, ImageError> {
        let size = self.cluster_bytes;
        let base = index * self.chunk_clusters();
        let clusters = base + range.start as u64 / size..base + range.end as u64 / size;
        let (mut places, gaps) = {
            let shared = self.shared.lock();
            let inside: Vec<_> = shared.places.inside(clusters.clone()).collect();
            (inside, shared.places.gaps(clusters))
        };
        for gap in gaps {
            places.extend(self.take(queue, gap, taken).await?);
        }
        places.sort_unstable_by_key(|place| place.first);
        let mut pieces: Vec<Piece> = Vec::new();
        for place in places {
            let start = ((place.first - base) * size) as usize;
            let end = start + (place.len * size) as usize;
            let host_bytes = place.host * size;
            match pieces.last_mut() {
                Some(last)
                    if last.range.end == start
                        && last.host_bytes + last.range.len() as u64 == host_bytes =>
                {
                    last.range.end = end;
                }
                _ => pieces.push(Piece {
                    host_bytes,
                    range: start..end,
                }),
            }
        }
        Ok(pieces)
    }

    /// Takes host clusters for these of the state. A flight is under way meanwhile.
    pub(super) async fn take<F: File>(
        &self,
        queue: &Queue<F>,
        clusters: Range<u64>,
        taken: &mut Taken,
    ) -> Result<Vec<Place>, ImageError> {
        let mut places = Vec::new();
        let mut first = clusters.start;
        while first < clusters.end {
            let run = self.take_run(queue, clusters.end - first).await?;
            let place = Place {
                first,
                host: run.start,
                len: run.len,
            };
            taken.places.push(place);
            places.push(place);
            first += run.len;
        }
        Ok(places)
    }

    /// Takes up to `want` clusters in a row.
    pub(super) async fn take_run<F: File>(
        &self,
        queue: &Queue<F>,
        want: u64,
    ) -> Result<Run, ImageError> {
        loop {
            let reserved = self.shared.lock().take_reserved(want);
            match reserved {
                Some(run) => return Ok(run),
                None => self.refill(queue, want).await?,
            }
        }
    }

    /// Takes clusters ahead, many of them if there are.
    async fn refill<F: File>(&self, queue: &Queue<F>, want: u64) -> Result<(), ImageError> {
        let active = top_of(queue)?;
        let fail = |errno| ImageError::io(errno, "cannot take space for the state of the machine");
        if let Some(errno) = self.image.poisoned() {
            return Err(fail(errno));
        }
        active.announce().await.map_err(fail)?;
        // As a request: nothing is counted while the whole image is switched.
        let _epoch = queue.enter_open().await;
        let many = self.shared.lock().reserve_next.max(want);
        let mut run = active.take_clusters(many).await;
        if run.is_err() && many > want {
            run = active.take_clusters(want).await;
        }
        let run = run.map_err(fail)?;
        self.shared.lock().add_reserved(run, self.cluster_bytes);
        Ok(())
    }
}
