//! Reading the state of a machine from a snapshot, which stays as it is and need not be applied.
//!
//! What a snapshot says of itself may be anything: the state has to fit into the snapshot's L1 table, the
//! table into the file, and no length that was read decides how much memory is taken. Bytes beyond
//! the end of the file are zeros, as everywhere.

use std::fmt;
use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt};
use gaur_block::{Errno, File, Target};
use gaur_format::geometry::Geometry;
use gaur_format::{Corruption, l1};

use super::ahead::{Ahead, PIECE_BYTES};
use super::table::{Kind, Slices, run_in};
use super::writer::DEPTH;
use crate::align;
use crate::error::{ErrorKind, ImageError};
use crate::image::Qcow2;
use crate::queue::Queue;
use crate::snapshot::{HeldSnapshot, Snapshot, find_snapshot};
use crate::sync::Mutex;

/// Tables are read in slices of this many bytes at most, and small ones so many at a time.
const SLICE_BYTES: u64 = 64 << 10;

/// The state of a machine in a snapshot, for the thread of one queue.
///
/// While it is there the snapshot cannot be deleted.
pub struct VmStateReader<'q, F: File> {
    state: Arc<State>,
    queue: &'q Queue<F>,
    held: HeldSnapshot,
    position: u64,
    ahead: Ahead<'q, F>,
}

/// What the readers of one snapshot share.
pub(super) struct State {
    snapshot: Snapshot,
    geometry: Geometry,
    /// Guest offset at which the state would be if it were part of the disk.
    start_bytes: u64,
    /// The L1 entries of the state.
    l1: Vec<u64>,
    slices: Mutex<Slices>,
}

impl<'q, F: File> VmStateReader<'q, F> {
    /// Opens the state of the snapshot whose id, else name, is `which`. A snapshot of the disk alone has
    /// a state of 0 bytes.
    pub async fn open(
        queue: &'q Queue<F>,
        which: &str,
    ) -> Result<VmStateReader<'q, F>, ImageError> {
        let layer = queue.image.layers().first();
        let Some(qcow2) = layer.and_then(|layer| layer.qcow2.as_ref()) else {
            let text = "a raw image has no snapshots";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        };
        loop {
            let found = find_snapshot(&queue.snapshots().await?, which)?.clone();
            let held = queue.hold_snapshot(&found.id);
            // It may have been deleted before it was held.
            let again = queue.snapshots().await?;
            if again.contains(&found) {
                return VmStateReader::of(queue, qcow2, found, held).await;
            }
        }
    }

    async fn of(
        queue: &'q Queue<F>,
        qcow2: &Qcow2,
        snapshot: Snapshot,
        held: HeldSnapshot,
    ) -> Result<VmStateReader<'q, F>, ImageError> {
        let geometry = qcow2.geometry;
        let header = queue.image.layers().first().and_then(|top| top.header());
        let today = header.map_or(0, |header| header.size_bytes);
        let first = geometry.l1_entries_for(snapshot.disk_size.unwrap_or(today));
        let entries = geometry.l1_entries_for(snapshot.vm_state_size);
        let fits = first.checked_add(entries);
        if entries > 0 && fits.is_none_or(|end| end > u64::from(snapshot.l1_size)) {
            let text = format!(
                "snapshot {:?} says that its state has {} bytes, but its L1 table has no room for them",
                String::from_utf8_lossy(&snapshot.name),
                snapshot.vm_state_size
            );
            return Err(ImageError::new(ErrorKind::Corrupt, text));
        }
        let offset = snapshot.l1_table_offset.0.saturating_add(first * 8);
        let l1 = read_l1(queue, offset, entries).await?;
        let state = State {
            start_bytes: first.saturating_mul(geometry.guest_bytes_per_l2()),
            snapshot,
            geometry,
            l1,
            slices: Mutex::default(),
        };
        Ok(VmStateReader {
            state: Arc::new(state),
            queue,
            held,
            position: 0,
            ahead: Ahead::default(),
        })
    }

    /// The same state for the thread of another queue; it begins at byte 0.
    ///
    /// # Panics
    /// If the queue is one of another image.
    pub fn on<'p>(&self, queue: &'p Queue<F>) -> VmStateReader<'p, F> {
        assert!(
            Arc::ptr_eq(queue.image(), self.queue.image()),
            "a state is read through queues of its image"
        );
        VmStateReader {
            state: Arc::clone(&self.state),
            queue,
            held: queue.hold_snapshot(&self.state.snapshot.id),
            position: 0,
            ahead: Ahead::default(),
        }
    }

    /// The snapshot it is the state of.
    pub fn snapshot(&self) -> &Snapshot {
        &self.state.snapshot
    }

    /// Length of the state in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.state.snapshot.vm_state_size
    }

    /// Where the next [`VmStateReader::read`] begins.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Lets the next [`VmStateReader::read`] begin at byte `position`.
    pub fn set_position(&mut self, position: u64) {
        self.position = position;
    }

    /// Fills `out` with the next bytes of the state; how many there were, less than `out` is long only
    /// at the end. Whoever reads on from where he stopped finds the next bytes read ahead.
    pub async fn read(&mut self, out: &mut [u8]) -> Result<usize, ImageError> {
        let mut filled = 0;
        while filled < out.len() && self.position < self.size_bytes() {
            let rest = out.get_mut(filled..).unwrap_or_default();
            let state = &self.state;
            let count = self.ahead.read(state, self.queue, self.position, rest);
            let count = count.await.map_err(failed)?;
            self.position += count as u64;
            filled += count;
        }
        Ok(filled)
    }

    /// Fills `out` with the bytes at `offset`; how many there were, less than `out` is long only at the
    /// end. Long reads are several at once.
    pub async fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize, ImageError> {
        let left = self.size_bytes().saturating_sub(offset);
        let count = (out.len() as u64).min(left) as usize;
        let mut reads = FuturesUnordered::new();
        let mut at = offset;
        let mut rest = out.get_mut(..count).unwrap_or_default();
        while !rest.is_empty() {
            let len = (PIECE_BYTES - at % PIECE_BYTES).min(rest.len() as u64);
            let (part, after) = rest.split_at_mut(len as usize);
            rest = after;
            while reads.len() >= DEPTH
                && let Some(result) = reads.next().await
            {
                result?;
            }
            reads.push(async move {
                let filled = self.state.fill(self.queue, at, part, true).await;
                filled.map(|_| ()).map_err(failed)
            });
            at += len;
        }
        while let Some(result) = reads.next().await {
            result?;
        }
        Ok(count)
    }
}

async fn read_l1<F: File>(
    queue: &Queue<F>,
    offset: u64,
    entries: u64,
) -> Result<Vec<u64>, ImageError> {
    let fail = |errno| ImageError::io(errno, "cannot read the L1 table of the snapshot");
    let file = queue.top_file();
    let len = file.len().await.map_err(fail)?;
    // At most 32 MiB, which the snapshot table was checked for, and not more than there is.
    let end = offset.saturating_add(entries.saturating_mul(8));
    if entries > 0 && end > len {
        let text = "the L1 table of the snapshot is not inside the file";
        return Err(ImageError::new(ErrorKind::Corrupt, text));
    }
    let mut bytes = vec![0; (entries * 8) as usize];
    let read = align::read(file, &queue.pool, offset, Target::Memory(&mut bytes)).await;
    read.map_err(fail)?;
    let words = bytes.as_chunks::<8>().0.iter();
    Ok(words.map(|word| u64::from_be_bytes(*word)).collect())
}

fn failed(errno: Errno) -> ImageError {
    ImageError::io(errno, "cannot read the state of the machine")
}

fn corrupt(_what: Corruption) -> Errno {
    Errno::EIO
}

impl State {
    /// Length of the state in bytes.
    pub(super) fn size_bytes(&self) -> u64 {
        self.snapshot.vm_state_size
    }

    /// Fills `out` with the bytes at `at`, all inside the state. What a backing file has is read only if
    /// `below` says so; otherwise this ends there. How many bytes were filled.
    pub(super) async fn fill<F: File>(
        &self,
        queue: &Queue<F>,
        at: u64,
        out: &mut [u8],
        below: bool,
    ) -> Result<usize, Errno> {
        let mut filled = 0;
        while filled < out.len() {
            let at = at + filled as u64;
            let rest = out.get_mut(filled..).unwrap_or_default();
            let (kind, len) = self.run(queue, at, rest.len() as u64).await?;
            let rest = rest.get_mut(..len as usize).unwrap_or_default();
            match kind {
                Kind::Zero => rest.fill(0),
                Kind::Data { host } => {
                    let target = Target::Memory(rest);
                    align::read(queue.top_file(), &queue.pool, host, target).await?;
                }
                Kind::Compressed { descriptor } => {
                    let at = self.start_bytes.saturating_add(at);
                    queue.mapped(0)?.decompress(descriptor, at, rest).await?;
                }
                Kind::Nothing => {
                    let at = self.start_bytes.saturating_add(at);
                    let shows = queue.image.has_backing_at(at);
                    if shows && !below {
                        break;
                    }
                    rest.fill(0);
                    if shows {
                        queue.read_below(at, rest).await?;
                    }
                }
            }
            filled += len as usize;
        }
        Ok(filled)
    }

    /// What the bytes at `at` are, and how many of up to `max` (1 or more) are of that kind.
    async fn run<F: File>(
        &self,
        queue: &Queue<F>,
        at: u64,
        max: u64,
    ) -> Result<(Kind, u64), Errno> {
        let geometry = &self.geometry;
        let per_table = geometry.guest_bytes_per_l2();
        let (index, within) = (at / per_table, at % per_table);
        let entry = self.l1.get(index as usize).copied().unwrap_or(0);
        let Some(table) = l1::decode(entry, geometry).map_err(corrupt)? else {
            return Ok((Kind::Nothing, max.min(per_table - within)));
        };
        let slice_bytes = geometry.cluster_size().min(SLICE_BYTES);
        let per_slice = slice_bytes / geometry.l2_entry_size() * geometry.cluster_size();
        let number = within / per_slice;
        let offset = table.offset.0 + number * slice_bytes;
        let kept = self.slices.lock().get(offset);
        let slice = match kept {
            Some(slice) => slice,
            None => self.load(queue, index, offset, slice_bytes).await?,
        };
        let max = max.min(per_slice - within % per_slice);
        run_in(&slice, geometry, within % per_slice, max).map_err(corrupt)
    }

    /// Reads the slice at host offset `offset` of table number `index`. Small tables that follow in the
    /// state and in the file come along.
    async fn load<F: File>(
        &self,
        queue: &Queue<F>,
        index: u64,
        offset: u64,
        slice_bytes: u64,
    ) -> Result<Arc<[u8]>, Errno> {
        let follows = |number: &u64| {
            let entry = self.l1.get((index + number) as usize).copied();
            let table = l1::decode(entry.unwrap_or(0), &self.geometry);
            matches!(table, Ok(Some(table)) if table.offset.0 == offset + number * slice_bytes)
        };
        let count = if slice_bytes == self.geometry.cluster_size() {
            1 + (1..SLICE_BYTES / slice_bytes).take_while(follows).count()
        } else {
            1
        };
        let file = queue.top_file();
        let mut bytes = queue.pool.take(file, count * slice_bytes as usize);
        align::read(file, &queue.pool, offset, Target::Memory(&mut bytes)).await?;
        let mut slices = self.slices.lock();
        let parts = bytes.chunks_exact(slice_bytes as usize);
        let mut first = None;
        for (number, part) in (0..).zip(parts) {
            let part: Arc<[u8]> = Arc::from(part);
            first.get_or_insert_with(|| Arc::clone(&part));
            slices.insert(offset + number * slice_bytes, part);
        }
        first.ok_or(Errno::EIO)
    }
}

impl<F: File> fmt::Debug for VmStateReader<'_, F> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("VmStateReader")
            .field("snapshot", &self.state.snapshot)
            .field("position", &self.position)
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}
