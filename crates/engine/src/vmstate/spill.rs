//! A chunk goes to the file: places for its clusters are found or taken, whole clusters are written.
//!
//! A write that is under way may wait unpolled for as long as its writer does something else. So it holds
//! no lock of the engine: places are taken before, and it writes whole blocks of clusters that only the
//! save knows, one write a chunk at a time. Where clusters are smaller than the file's blocks it has to
//! lock blocks; then the writer waits for it at once.

use std::ops::Range;
use std::sync::Arc;

use gaur_block::{Errno, File, Source, Target};

use super::chunk::Chunk;
use super::save::{VmStateSave, top_of};
use super::state_map::MappedRun;
use crate::align;
use crate::error::ImageError;
use crate::metadata::alloc::Run;
use crate::queue::Queue;

/// Where some bytes of a chunk go: a host offset, and the range in the chunk.
struct Piece {
    host_bytes: u64,
    range: Range<usize>,
}

/// A chunk on its way to the file. If this is dropped before the end, its bytes are still to be written.
pub(super) struct Spill {
    pub(super) save: Arc<VmStateSave>,
    pub(super) index: u64,
    /// Until it is written.
    pub(super) chunk: Option<Chunk>,
    pieces: Vec<Piece>,
}

impl Spill {
    pub(super) fn new(save: &Arc<VmStateSave>, index: u64, chunk: Chunk) -> Spill {
        Spill {
            save: Arc::clone(save),
            index,
            chunk: Some(chunk),
            pieces: Vec::new(),
        }
    }

    /// Finds places for chunk `index`. `None` if nothing is to be written, or it is being written: what is
    /// new then stays in memory.
    pub(super) async fn begin<F: File>(
        save: &Arc<VmStateSave>,
        queue: &Queue<F>,
        index: u64,
    ) -> Result<Option<Spill>, ImageError> {
        let Some(mut spill) = save.begin_write(index) else {
            return Ok(None);
        };
        if let Some(chunk) = &mut spill.chunk {
            spill.pieces = save.place(queue, index, chunk).await?;
        }
        Ok(Some(spill))
    }

    /// Writes it.
    pub(super) async fn run<F: File>(mut self, queue: &Queue<F>) -> Result<(), ImageError> {
        if let Some(chunk) = &mut self.chunk {
            for piece in &self.pieces {
                for gap in chunk.dirty.gaps(&piece.range) {
                    let host = piece.host_bytes + (gap.start - piece.range.start) as u64;
                    let target = Target::memory(&mut chunk.memory[gap]);
                    let top = queue.mapped(0).map_err(|errno| failed(queue, errno))?;
                    let read = top.read_data(host, host, target).await;
                    let text = "cannot read back the state of the machine";
                    read.map_err(|errno| queue.image.explain(errno, text))?;
                }
                let bytes = &chunk.memory[piece.range.clone()];
                let written = write_clusters(queue, piece.host_bytes, bytes).await;
                written.map_err(|errno| failed(queue, errno))?;
            }
        }
        self.save.written(self.chunk.take());
        Ok(())
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.save.end_write(self.index, self.chunk.take());
    }
}

/// Whether a write must be waited for at once, see the module.
pub(super) fn must_wait<F: File>(save: &VmStateSave, queue: &Queue<F>) -> bool {
    let limits = queue.top_file().limits();
    save.cluster_bytes < u64::from(limits.request_alignment.max(limits.memory_alignment))
}

/// Writes whole clusters of the state.
async fn write_clusters<F: File>(
    queue: &Queue<F>,
    host_bytes: u64,
    bytes: &[u8],
) -> Result<(), Errno> {
    if let Some(errno) = queue.image.poisoned() {
        return Err(errno);
    }
    let file = queue.top_file();
    let mut encrypted = None;
    if let Some(cipher) = &queue.mapped(0)?.qcow2.cipher {
        let copy = encrypted.insert(queue.pool.take(file, bytes.len()));
        copy.copy_from_slice(bytes);
        cipher.of_file().encrypt(host_bytes, copy);
    }
    let bytes = encrypted.as_deref().unwrap_or(bytes);
    let limits = file.limits();
    let block = u64::from(limits.request_alignment.max(1));
    let memory = limits.memory_alignment.max(1) as usize;
    let whole = (host_bytes | bytes.len() as u64).is_multiple_of(block)
        && bytes.as_ptr().addr().is_multiple_of(memory);
    if !whole {
        let (locks, source) = (&queue.image.locks, Source::memory(bytes));
        return align::write(file, &queue.pool, locks, host_bytes, source).await;
    }
    let mut at = host_bytes;
    for part in bytes.chunks((limits.max_transfer as usize).max(1)) {
        file.write_at(at, Source::memory(part)).await?;
        at += part.len() as u64;
    }
    Ok(())
}

pub(super) fn failed<F: File>(queue: &Queue<F>, errno: Errno) -> ImageError {
    let text = "cannot write the state of the machine";
    queue.image.explain(errno, text)
}

impl VmStateSave {
    /// Where the clusters of a chunk go that have new bytes. Those that have no place are taken, and the
    /// chunk gets zeros for what was not written in them.
    async fn place<F: File>(
        &self,
        queue: &Queue<F>,
        index: u64,
        chunk: &mut Chunk,
    ) -> Result<Vec<Piece>, ImageError> {
        let size = self.cluster_bytes;
        let base = index * self.chunk_clusters();
        let bytes = |place: &MappedRun| {
            let start = ((place.first - base) * size) as usize;
            start..start + (place.len * size) as usize
        };
        let mut pieces = Vec::new();
        for range in chunk.dirty.rounded_out(size as usize).iter() {
            let clusters = base + range.start as u64 / size..base + range.end as u64 / size;
            let gaps = self.shared.lock().map.gaps(clusters.clone());
            for mut gap in gaps {
                while !gap.is_empty() {
                    let run = self.take_run(queue, gap.end - gap.start).await?;
                    let place = MappedRun {
                        first: gap.start,
                        host: run.start,
                        len: run.len,
                    };
                    // From now on its bytes are what the chunk has.
                    chunk.zero_gaps(bytes(&place));
                    self.shared.lock().map.insert(place);
                    gap.start += run.len;
                }
            }
            let shared = self.shared.lock();
            pieces.extend(shared.map.inside(clusters).map(|place| Piece {
                host_bytes: place.host * size,
                range: bytes(&place),
            }));
        }
        Ok(pieces)
    }

    /// Takes up to `want` clusters in a row.
    pub(super) async fn take_run<F: File>(
        &self,
        queue: &Queue<F>,
        want: u64,
    ) -> Result<Run, ImageError> {
        let active = top_of(queue)?;
        let text = "cannot take space for the state of the machine";
        let fail = |errno| queue.image.explain(errno, text);
        if let Some(errno) = self.image.poisoned() {
            return Err(fail(errno));
        }
        active.announce().await.map_err(fail)?;
        // As a request: nothing is counted while the whole image is switched.
        let _inside = queue.enter_open().await;
        active.take_clusters(want).await.map_err(fail)
    }
}
