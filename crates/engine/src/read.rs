//! Reading: find what a run of guest bytes is, layer by layer in a loop, and fetch it.

use std::ops::Range;
use std::sync::Arc;

use gaur_block::{Errno, File, SegmentsMut, Target};
use gaur_format::CompressedDescriptor;

use crate::align;
use crate::decompressed::ClusterKey;
use crate::image::Qcow2;
use crate::merged::MergedIndex;
use crate::metadata::maps::{Extent, Kind, Lookup};
use crate::queue::Queue;
use crate::range::GuestRange;
use crate::sync::atomic::Ordering;

/// A qcow2 layer, and the queue that reads it.
pub(crate) struct MappedLayer<'q, F: File> {
    pub(crate) queue: &'q Queue<F>,
    /// Its index in the chain.
    pub(crate) depth: usize,
    pub(crate) qcow2: &'q Qcow2,
    pub(crate) file: &'q F,
}

/// A missing slice is read together with its neighbours in this many bytes.
const LOAD_BYTES: u64 = 64 << 10;

/// Largest cluster that is decompressed ahead of a reader: what it may cost in vain.
const AHEAD_CLUSTER_BYTES_MAX: u64 = 256 << 10;

enum Step {
    Found(Extent),
    /// A slice of a layer has to be loaded first.
    Miss {
        layer: usize,
        slice: u64,
    },
    /// A region of the merged index has to be looked up first.
    Unmerged {
        region: u64,
    },
}

impl<F: File> Queue<F> {
    /// Fills `target` from guest offset `offset` on. Bytes beyond the end of the image are zeros.
    pub(crate) async fn read(&self, offset: u64, target: Target<'_>) -> Result<(), Errno> {
        let mut at = offset;
        let mut rest = target;
        while !rest.is_empty() {
            let wanted = GuestRange::new(at, rest.len() as u64);
            let found = match self.find_now(wanted)? {
                Some(found) => found,
                None => self.find(wanted).await?,
            };
            if found.len == rest.len() as u64 {
                return self.fetch(found, at, rest).await;
            }
            // A request that is in pieces has up to four of them in flight.
            let (first, after) = rest.split_at(found.len as usize);
            rest = after;
            let mut next = at + found.len;
            let mut more = [None, None, None];
            for slot in &mut more {
                if rest.is_empty() {
                    break;
                }
                let wanted = GuestRange::new(next, rest.len() as u64);
                let found = self.find(wanted).await?;
                let (part, after) = rest.split_at(found.len as usize);
                *slot = Some((found, next, part));
                rest = after;
                next += found.len;
            }
            let [second, third, fourth] = more;
            // On the heap, so that a request in one piece does not carry the state of four.
            let done = Box::pin(futures_util::future::join4(
                self.fetch(found, at, first),
                self.fetch_if(second),
                self.fetch_if(third),
                self.fetch_if(fourth),
            ))
            .await;
            done.0.and(done.1).and(done.2).and(done.3)?;
            at = next;
        }
        Ok(())
    }

    /// Fills `out` with what the layers below the top have at guest offset `at`: zeros where none has
    /// anything, or none reaches.
    pub(crate) async fn read_below(&self, at: u64, out: &mut [u8]) -> Result<(), Errno> {
        let (mut at, mut rest) = (at, out);
        while !rest.is_empty() {
            let wanted = GuestRange::new(at, rest.len() as u64);
            let found = self.find_from(1, wanted).await?;
            let (part, after) = rest.split_at_mut(found.len as usize);
            self.fetch(found, at, Target::memory(part)).await?;
            rest = after;
            at += found.len;
        }
        Ok(())
    }

    /// The run at the start of a range, which is not empty.
    pub(crate) async fn find(&self, range: GuestRange) -> Result<Extent, Errno> {
        self.find_from(0, range).await
    }

    /// The same as layer `top` (0 or 1) and those below it see it.
    pub(crate) async fn find_from(&self, top: usize, range: GuestRange) -> Result<Extent, Errno> {
        loop {
            match (self.find_cached(top, range)?, &self.image.base.merged) {
                (Step::Found(found), _) => return Ok(found),
                (Step::Miss { layer, slice }, _) => self.load(layer, slice).await?,
                // On the heap, so that other requests do not carry its state.
                (Step::Unmerged { region }, Some(merged)) => {
                    Box::pin(self.merge_region(merged, region)).await?;
                }
                (Step::Unmerged { .. }, None) => return Err(Errno::EIO),
            }
        }
    }

    /// Brings a part of a layer's mapping into its cache.
    pub(crate) async fn load(&self, layer: usize, start: u64) -> Result<(), Errno> {
        match self.mapped(layer) {
            Ok(mapped) => mapped.load_slice(start).await,
            Err(_) => self.load_page(layer, start).await,
        }
    }

    /// The same without waiting; `None` when something has to be loaded first.
    pub(crate) fn find_now(&self, range: GuestRange) -> Result<Option<Extent>, Errno> {
        match self.find_cached(0, range)? {
            Step::Found(found) => Ok(Some(found)),
            Step::Miss { .. } | Step::Unmerged { .. } => Ok(None),
        }
    }

    fn find_cached(&self, top: usize, range: GuestRange) -> Result<Step, Errno> {
        let Some(merged) = &self.image.base.merged else {
            return self.find_in(top..self.image.layers().len(), range);
        };
        let mut below = range;
        if top == 0 {
            let step = self.find_in(0..1, range)?;
            let Step::Found(found) = step else {
                return Ok(step);
            };
            let open = matches!(found.kind, Kind::Unallocated { .. });
            if !open || range.start >= self.image.size_bytes() {
                return Ok(step);
            }
            below = range.first(found.len);
        }
        Ok(match merged.extent(below) {
            Some(found) => Step::Found(found),
            None => Step::Unmerged {
                region: MergedIndex::region_of(below.start),
            },
        })
    }

    /// The run at the start of a range as some of the layers see it, which follow each other.
    fn find_in(&self, layers: Range<usize>, range: GuestRange) -> Result<Step, Errno> {
        let at = range.start;
        let mut extent = Extent {
            layer: layers.start.saturating_sub(1),
            len: range.len,
            kind: Kind::Unallocated { host: None },
        };
        for depth in layers {
            let layer = self.image.layers().get(depth).ok_or(Errno::EIO)?;
            let size = if depth == 0 {
                self.image.size_bytes()
            } else {
                layer.size_bytes()
            };
            if at >= size {
                // This layer and those below it do not reach that far: the one above answers.
                break;
            }
            extent.layer = depth;
            extent.len = extent.len.min(size - at);
            let wanted = range.first(extent.len);
            let lookup = match (&layer.qcow2, &layer.foreign) {
                (Some(qcow2), _) => qcow2.maps.extent(wanted),
                (None, Some(foreign)) => foreign.extent(wanted),
                (None, None) => {
                    extent.kind = Kind::Data {
                        host: layer.flat_host(at),
                        copied: true,
                    };
                    break;
                }
            };
            match lookup.map_err(|fault| self.image.corrupt(depth, fault))? {
                Lookup::Miss(slice) => {
                    return Ok(Step::Miss {
                        layer: depth,
                        slice,
                    });
                }
                Lookup::Extent(found) => (extent.len, extent.kind) = (found.len, found.kind),
            }
            if !matches!(extent.kind, Kind::Unallocated { .. }) {
                break;
            }
        }
        Ok(Step::Found(extent))
    }

    /// The file of a layer.
    pub(crate) fn file_of(&self, depth: usize) -> Option<&F> {
        self.files.of(depth).get(depth.saturating_sub(1))
    }

    /// The file that holds the guest's bytes of a layer in one or two files.
    pub(crate) fn data_file_of(&self, depth: usize) -> Option<&F> {
        match &self.image.layers().get(depth)?.data_file {
            Some(data) => self.files.of(depth).get(data.index),
            None => self.file_of(depth),
        }
    }

    /// The file that holds the byte of a layer at guest offset `at`.
    pub(crate) fn file_at(&self, depth: usize, at: u64) -> Option<&F> {
        match &self.image.layers().get(depth)?.foreign {
            Some(foreign) => self.files.of(depth).get(foreign.file_index(depth, at)),
            None => self.data_file_of(depth),
        }
    }

    /// A qcow2 layer as this queue reads it.
    pub(crate) fn mapped(&self, depth: usize) -> Result<MappedLayer<'_, F>, Errno> {
        let layer = self.image.layers().get(depth);
        let qcow2 = layer.and_then(|layer| layer.qcow2.as_ref());
        let (qcow2, file) = qcow2.zip(self.file_of(depth)).ok_or(Errno::EIO)?;
        Ok(MappedLayer {
            queue: self,
            depth,
            qcow2,
            file,
        })
    }

    async fn fetch_if(&self, part: Option<(Extent, u64, Target<'_>)>) -> Result<(), Errno> {
        match part {
            Some((found, at, target)) => self.fetch(found, at, target).await,
            None => Ok(()),
        }
    }

    /// Fills `target`, which is as long as the run, with the run at guest offset `at`.
    async fn fetch(&self, found: Extent, at: u64, target: Target<'_>) -> Result<(), Errno> {
        match found.kind {
            Kind::Unallocated { .. } | Kind::Zero { .. } => {
                memory_of(target)?.fill_zeros();
                Ok(())
            }
            Kind::Data { host, .. } => {
                let layer = self.image.layers().get(found.layer);
                if let Some(container) = layer.and_then(|layer| layer.container.as_ref()) {
                    let file = self.file_of(found.layer).ok_or(Errno::EIO)?;
                    let cipher = container.cipher(host);
                    // On the heap, so that requests to plain images do not carry its state.
                    let read = align::read_encrypted(file, &self.pool, cipher, host, target);
                    return Box::pin(read).await;
                }
                if layer.is_some_and(|layer| layer.is_encrypted()) {
                    return self.mapped(found.layer)?.read_data(host, at, target).await;
                }
                let file = self.file_at(found.layer, at).ok_or(Errno::EIO)?;
                align::read(file, &self.pool, host, target).await
            }
            Kind::Compressed { descriptor } => {
                // On the heap, so that other requests do not carry its state.
                Box::pin(self.fetch_compressed(found.layer, descriptor, at, target)).await
            }
        }
    }

    async fn fetch_compressed(
        &self,
        layer: usize,
        descriptor: CompressedDescriptor,
        at: u64,
        target: Target<'_>,
    ) -> Result<(), Errno> {
        let out = memory_of(target)?;
        let foreign = self.image.layers().get(layer);
        if let Some(foreign) = foreign.and_then(|layer| layer.foreign.as_ref()) {
            let marker = descriptor.offset;
            return self.fetch_grain(layer, foreign, marker, at, out).await;
        }
        let layer = self.mapped(layer)?;
        let Some(ahead) = self.ahead_of(&layer, descriptor, at) else {
            return layer.decompress(descriptor, at, out).await;
        };
        let both = futures_util::join!(
            layer.decompress(descriptor, at, out),
            layer.decompressed(ahead),
        );
        // Damage in the second is reported to whom reads it.
        both.0
    }

    /// The compressed cluster behind that of guest offset `at`, if it is worth decompressing along with it: this
    /// queue reads one after the other, and it is not in the cache.
    fn ahead_of(
        &self,
        layer: &MappedLayer<'_, F>,
        descriptor: CompressedDescriptor,
        at: u64,
    ) -> Option<CompressedDescriptor> {
        let cache = self.image.decompressed(layer.depth);
        let size = layer.qcow2.geometry.cluster_size();
        let start = at & !(size - 1);
        if cache.contains(layer.key(descriptor)) {
            return None;
        }
        let next = start.checked_add(size)?;
        let in_sequence = self.decompressed_end.replace(next) == start;
        if !in_sequence || size > AHEAD_CLUSTER_BYTES_MAX || next >= self.image.size_bytes() {
            return None;
        }
        let found = self.find_now(GuestRange::new(next, 1)).ok()??;
        let Kind::Compressed { descriptor } = found.kind else {
            return None;
        };
        let wanted = found.layer == layer.depth && !cache.contains(layer.key(descriptor));
        if wanted {
            self.decompressed_end.set(next.saturating_add(size));
        }
        wanted.then_some(descriptor)
    }
}

impl<F: File> MappedLayer<'_, F> {
    /// Brings the L2 slice at host offset `slice` into the layer's cache.
    pub(crate) async fn load_slice(&self, slice: u64) -> Result<(), Errno> {
        let slices = &self.qcow2.maps.slices;
        let slice_bytes = slices.slice_bytes();
        // Read as far around as the next lookups are likely to go, but never out of the table.
        let around = LOAD_BYTES.min(self.qcow2.geometry.cluster_size());
        let chunk = slice & !(around.max(slice_bytes) - 1);
        let Some(_loading) = self.qcow2.loads.lock_or_wait(chunk).await else {
            return Ok(());
        };
        if slices.contains(slice) {
            return Ok(());
        }
        let wide = self.qcow2.read_around.load(Ordering::Relaxed) && slice_bytes < around;
        let (start, len) = if wide {
            (chunk, around)
        } else {
            (slice, slice_bytes)
        };
        // What is cached now may be newer than the disk, and may be evicted while this reads.
        let count = (len / slice_bytes).min(u64::from(u128::BITS));
        let nth = |number: u64| start + number * slice_bytes;
        let missing = (0..count)
            .filter(|number| !slices.contains(nth(*number)))
            .fold(0_u128, |missing, number| missing | 1 << number);
        let (file, pool) = (self.file, &self.queue.pool);
        let mut buffer = pool.take(file, len as usize);
        align::read(file, pool, start, Target::memory(&mut buffer)).await?;
        let mut packed = 0;
        for (number, bytes) in (0..count).zip(buffer.chunks_exact(slice_bytes as usize)) {
            if missing & 1 << number != 0 && nth(number) != slice {
                packed += u64::from(slices.insert(nth(number), bytes, true));
            }
        }
        // Last, so that its neighbours do not drive it out of a small cache.
        let at = (slice - start) as usize;
        let bytes = buffer
            .get(at..at + slice_bytes as usize)
            .ok_or(Errno::EIO)?;
        packed += u64::from(slices.insert(slice, bytes, false));
        if wide {
            // Not worth it where clusters are scattered; every slice that packs is a new hint.
            self.qcow2
                .read_around
                .store(packed * 2 > count, Ordering::Relaxed);
        } else if packed > 0 {
            self.qcow2.read_around.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Fills `out` with what is at guest offset `at` of the compressed cluster.
    pub(crate) async fn decompress(
        &self,
        descriptor: CompressedDescriptor,
        at: u64,
        out: SegmentsMut<'_>,
    ) -> Result<(), Errno> {
        let cipher = self.qcow2.cipher.as_ref();
        if cipher.is_some_and(|cipher| !cipher.allows_compressed()) {
            return Err(Errno::EIO);
        }
        let start = at as usize & (self.qcow2.geometry.cluster_size() as usize - 1);
        let bytes = self.decompressed(descriptor).await?;
        out.copy_from(bytes.get(start..start + out.len()).ok_or(Errno::EIO)?);
        Ok(())
    }

    fn key(&self, descriptor: CompressedDescriptor) -> ClusterKey {
        ClusterKey {
            layer: self.depth,
            descriptor,
        }
    }

    /// The bytes of a compressed cluster. Of several tasks that want them one decompresses.
    async fn decompressed(&self, descriptor: CompressedDescriptor) -> Result<Arc<Vec<u8>>, Errno> {
        let cache = self.queue.image.decompressed(self.depth);
        let key = self.key(descriptor);
        loop {
            if let Some(bytes) = cache.get(key) {
                return Ok(bytes);
            }
            let Some(_loading) = cache.loads.lock_or_wait(descriptor.offset).await else {
                continue;
            };
            if let Some(bytes) = cache.get(key) {
                return Ok(bytes);
            }
            let (queue, file) = (self.queue, self.file);
            let mut input = queue.pool.take(file, descriptor.byte_len() as usize);
            let target = Target::memory(&mut input);
            align::read(file, &queue.pool, descriptor.offset, target).await?;
            let mut bytes = cache.memory(self.qcow2.geometry.cluster_size() as usize);
            queue
                .decompressor
                .decompress(self.qcow2.compression, &input, &mut bytes)?;
            return Ok(cache.insert(key, bytes));
        }
    }
}

/// The memory of `target`. A buffer that only the kernel sees cannot be filled here: the export
/// asks again with memory.
fn memory_of(target: Target<'_>) -> Result<SegmentsMut<'_>, Errno> {
    match target {
        Target::Memory(memory) => Ok(memory),
        Target::Registered(_) => Err(Errno::EOPNOTSUPP),
    }
}
