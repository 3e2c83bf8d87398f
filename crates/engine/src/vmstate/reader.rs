//! Reading the state of a machine from a snapshot, which stays as it is and need not be applied.
//!
//! What a snapshot says of itself may be anything: the state has to fit into the snapshot's L1 table, the
//! table into the file, and no length that was read decides how much memory is taken. Bytes beyond
//! the end of the file are zeros, as everywhere.

use std::fmt;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use gaur_block::{Errno, File, Target};

use super::ahead::{Ahead, PIECE_BYTES};
use super::writer::IN_FLIGHT_MAX;
use crate::align;
use crate::cache_options::CacheOptions;
use crate::error::{ErrorKind, ImageError};
use crate::image::Qcow2;
use crate::metadata::cluster_set::ClusterSet;
use crate::metadata::l1_table::L1Table;
use crate::metadata::maps::{Extent, Kind, Lookup, Maps};
use crate::queue::Queue;
use crate::range::GuestRange;
use crate::read::MappedLayer;
use crate::snapshot::{HeldSnapshot, Snapshot, find_snapshot};

/// Most bytes of L2 tables that are kept.
const CACHE_BYTES: u64 = 4 << 20;

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
    /// Guest offset at which the state would be if it were part of the disk.
    start_bytes: u64,
    /// The mapping of the state, from its byte 0 on.
    qcow2: Qcow2,
}

impl<'q, F: File> VmStateReader<'q, F> {
    /// Opens the state of the snapshot whose id, else name, is `which`. A snapshot of the disk alone has
    /// a state of 0 bytes.
    pub async fn open(
        queue: &'q Queue<F>,
        which: &str,
    ) -> Result<VmStateReader<'q, F>, ImageError> {
        let Some(qcow2) = queue.image.top.qcow2.as_ref() else {
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
        let header = queue.image.top.header();
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
        let cache = CacheOptions {
            l2_bytes: Some(CACHE_BYTES),
            ..CacheOptions::default()
        };
        let sizes = cache.resolve(&geometry, snapshot.vm_state_size)?;
        let l1 = L1Table::new(offset, &l1);
        let maps = Maps::new(geometry, sizes, ClusterSet::default(), l1);
        let state = State {
            start_bytes: first.saturating_mul(geometry.guest_bytes_per_l2()),
            snapshot,
            qcow2: Qcow2::new(maps, qcow2.compression, qcow2.cipher.clone()),
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
    /// at the end. A caller that reads on from where it stopped finds the next bytes read ahead.
    pub async fn read(&mut self, out: &mut [u8]) -> Result<usize, ImageError> {
        let mut filled = 0;
        while filled < out.len() && self.position < self.size_bytes() {
            let rest = out.get_mut(filled..).unwrap_or_default();
            let state = &self.state;
            let count = self.ahead.read(state, self.queue, self.position, rest);
            let count = count.await?;
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
        let parts = out.get_mut(..count).unwrap_or_default();
        let parts = parts.chunks_mut(PIECE_BYTES as usize).enumerate();
        let reads = parts.map(|(number, part)| {
            let at = offset + number as u64 * PIECE_BYTES;
            self.state.read(self.queue, at, part)
        });
        let reads = stream::iter(reads).buffer_unordered(IN_FLIGHT_MAX);
        let () = reads.try_collect().await?;
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
    let read = align::read(file, &queue.pool, offset, Target::memory(&mut bytes)).await;
    read.map_err(fail)?;
    let words = bytes.as_chunks::<8>().0.iter();
    Ok(words.map(|word| u64::from_be_bytes(*word)).collect())
}

const READING: &str = "cannot read the state of the machine";

impl State {
    /// Length of the state in bytes.
    pub(super) fn size_bytes(&self) -> u64 {
        self.snapshot.vm_state_size
    }

    /// Fills `out` with the bytes at `at`, all inside the state.
    pub(super) async fn read<F: File>(
        &self,
        queue: &Queue<F>,
        mut at: u64,
        mut out: &mut [u8],
    ) -> Result<(), ImageError> {
        while !out.is_empty() {
            let extent = self.extent(queue, at, out.len() as u64).await?;
            let (part, rest) = out.split_at_mut(extent.len as usize);
            self.fetch(queue, extent, at, part).await?;
            (at, out) = (at + extent.len, rest);
        }
        Ok(())
    }

    /// What the bytes at `at` are; at most `max` of them (1 or more).
    pub(super) async fn extent<F: File>(
        &self,
        queue: &Queue<F>,
        at: u64,
        max: u64,
    ) -> Result<Extent, ImageError> {
        loop {
            let found = self.qcow2.maps.extent(GuestRange::new(at, max));
            match found.map_err(|fault| ImageError::corrupt(fault, READING))? {
                Lookup::Extent(extent) => return Ok(extent),
                Lookup::Miss(slice) => {
                    let loaded = self.layer(queue).load_slice(slice).await;
                    loaded.map_err(failed)?;
                }
            }
        }
    }

    fn layer<'q, F: File>(&'q self, queue: &'q Queue<F>) -> MappedLayer<'q, F> {
        MappedLayer {
            queue,
            depth: 0,
            qcow2: &self.qcow2,
            file: queue.top_file(),
        }
    }

    /// Whether the bytes at `at` are those of a backing file.
    pub(super) fn shows_backing<F: File>(
        &self,
        queue: &Queue<F>,
        extent: &Extent,
        at: u64,
    ) -> bool {
        let at = self.start_bytes.saturating_add(at);
        matches!(extent.kind, Kind::Unallocated { .. }) && queue.image.has_backing_at(at)
    }

    /// Fills `out`, which is as long as the extent, with the extent at `at`.
    pub(super) async fn fetch<F: File>(
        &self,
        queue: &Queue<F>,
        extent: Extent,
        at: u64,
        out: &mut [u8],
    ) -> Result<(), ImageError> {
        let fetched = match extent.kind {
            Kind::Data { host, .. } => {
                let guest = self.start_bytes.saturating_add(at);
                let target = Target::memory(out);
                self.layer(queue).read_data(host, guest, target).await
            }
            Kind::Compressed { descriptor } => {
                self.layer(queue)
                    .decompress(descriptor, at, out.into())
                    .await
            }
            Kind::Unallocated { .. } if self.shows_backing(queue, &extent, at) => {
                let at = self.start_bytes.saturating_add(at);
                queue.read_below(at, out).await
            }
            Kind::Unallocated { .. } | Kind::Zero { .. } => {
                out.fill(0);
                Ok(())
            }
        };
        fetched.map_err(failed)
    }
}

fn failed(errno: Errno) -> ImageError {
    ImageError::io(errno, READING)
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
