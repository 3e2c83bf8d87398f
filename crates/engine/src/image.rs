//! The open image, which all queues share: layers, mappings, free space, and whether writes are
//! still allowed. No file handle and no memory of requests; those belong to a [`crate::Queue`].

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gaur_block::{Errno, File, FileId, FileLimits, Source};
use gaur_format::feature::{Autoclear, Compatible};
use gaur_format::geometry::{Geometry, Version};
use gaur_format::header::{CompressionType, Header};
use gaur_format::{AllocationPolicy, limit};

use crate::base::{Base, ImageFiles, Layers};
use crate::bitmaps::{Bitmaps, LostBitmaps};
use crate::cache_options::{CacheOptions, CacheSizes};
use crate::chain::LayerParts;
use crate::container::Container;
use crate::copy_on_read::Copies;
use crate::corruption::{CorruptionReport, Fault};
use crate::decompressed::DecompressedClusters;
use crate::encryption::LayerCipher;
use crate::error::{ErrorKind, ImageError};
use crate::events::RequestEvents;
use crate::flush::FlushGroup;
use crate::foreign::Foreign;
use crate::metadata::alloc::Alloc;
use crate::metadata::claims::Claims;
use crate::metadata::cluster_set::ClusterSet;
use crate::metadata::epochs::Epochs;
use crate::metadata::l1_table::L1Table;
use crate::metadata::maps::Maps;
use crate::metadata::zeroed::ZeroedSpace;
use crate::options::{DetectZeroes, Format, OpenOptions};
use crate::poison::Poison;
use crate::queue::{Change, Queue, Unmap};
use crate::range::HostRange;
use crate::sector_locks::SectorLocks;
use crate::snapshot::SnapshotList;
use crate::statistics::{CacheStatistics, HoleStatistics};
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Mutex, OnceLock, RwLock};
use crate::waiters::{AsyncLock, KeyLocks};

/// An open image: the shared half. Make a [`Queue`] per thread to do input and output.
pub struct Image {
    pub(crate) top: Layer,
    /// What is below it; other images may have it, too.
    pub(crate) base: Arc<Base>,
    pub(crate) options: OpenOptions,
    pub(crate) writer: Option<Writer>,
    /// Sectors of the top file that are being read, changed and written back.
    pub(crate) locks: SectorLocks,
    /// The same of its data file.
    pub(crate) data_locks: SectorLocks,
    /// Held while the host flushes the top file; innermost.
    pub(crate) flushing: AsyncLock,
    pub(crate) read_only: bool,
    pub(crate) size_bytes: AtomicU64,
    /// The size that the disk is about to have, while it grows; otherwise 0.
    pub(crate) growing_to: AtomicU64,
    pub(crate) poison: Poison,
    pub(crate) events: RequestEvents,
    pub(crate) copies: Copies,
    /// Of the top layer.
    decompressed: DecompressedClusters,
    /// The host failed to flush the top file: it may have lost what was written since the flush before.
    pub(crate) flush_failed: AtomicBool,
    corrupt: AtomicBool,
    /// The first corruption that was found, and the index of its layer.
    first_corruption: OnceLock<(usize, Fault)>,
    queues: AtomicUsize,
}

/// One image of the backing chain.
pub struct Layer {
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
    pub(crate) id: Option<FileId>,
    pub(crate) size_bytes: u64,
    pub(crate) header: Option<Header>,
    pub(crate) qcow2: Option<Qcow2>,
    /// The mapping of an image of another program.
    pub(crate) foreign: Option<Foreign>,
    /// The disk of a LUKS container.
    pub(crate) container: Option<Container>,
    pub(crate) data_file: Option<DataFile>,
}

/// The external data file of a layer: where its guest clusters lie, each at its guest offset.
#[derive(Clone, Debug)]
pub struct DataFile {
    pub(crate) path: PathBuf,
    /// Which of the files of the top, or of those below it, it is.
    pub(crate) index: usize,
    pub(crate) is_raw: bool,
}

impl DataFile {
    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is the disk by itself, without the mapping.
    pub fn is_raw(&self) -> bool {
        self.is_raw
    }
}

/// The mapping of a qcow2 layer.
pub(crate) struct Qcow2 {
    pub(crate) geometry: Geometry,
    pub(crate) compression: CompressionType,
    /// Of an encrypted layer.
    pub(crate) cipher: Option<LayerCipher>,
    pub(crate) maps: Maps,
    /// Slices being loaded, by host offset.
    pub(crate) loads: KeyLocks,
    /// Neighbours of a slice that is loaded are worth loading with it.
    pub(crate) read_around: AtomicBool,
}

/// What a qcow2 top layer open for writing has besides.
pub(crate) struct Writer {
    pub(crate) alloc: Mutex<Alloc>,
    pub(crate) claims: Claims,
    /// Held while an L1 entry is given a table, and while the L1 table moves.
    pub(crate) tables: AsyncLock,
    /// Held while the image is resized, and while its snapshots change.
    pub(crate) resizing: AsyncLock,
    /// Refcount blocks being loaded, by host offset of the slice.
    pub(crate) refcount_loads: KeyLocks,
    /// Held while refcount blocks are made; taken before `structure`, and while a pass is waited for.
    pub(crate) blocks: AsyncLock,
    /// Held while refcount table, L1 table, header or file length change.
    pub(crate) structure: AsyncLock,
    pub(crate) flush: FlushGroup,
    /// States of machines that are being saved: nothing refers to their clusters yet.
    pub(crate) saves: AtomicUsize,
    pub(crate) epochs: Epochs,
    /// Where unwritten bytes are zeros.
    pub(crate) zeroed: RwLock<ZeroedSpace>,
    /// The allocator wants to be written back.
    pub(crate) pressed: AtomicBool,
    /// The header says what it must say while a process writes that does not maintain bitmaps.
    pub(crate) announced: AtomicBool,
    /// Autoclear bits when the image was opened.
    pub(crate) opened_with: Autoclear,
    /// Compatible bits then; none if there were no snapshots.
    pub(crate) snapshot_marks: Compatible,
    pub(crate) limits: FileLimits,
    pub(crate) allocation: AllocationPolicy,
    pub(crate) snapshots: Mutex<SnapshotList>,
    /// The persistent bitmaps that are kept.
    pub(crate) bitmaps: Bitmaps,
    /// What the first change removes.
    pub(crate) lost_bitmaps: Option<LostBitmaps>,
}

/// A process has written to the image and did not close it: it was killed, or the power went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unclosed {
    /// The number of its log of commits, which knows more than the image; 0 if there was none.
    pub log_number: u64,
}

impl Layer {
    /// The path it was opened by, to be shown: what is not text in it is replaced.
    pub fn name(&self) -> Cow<'_, str> {
        self.path.to_string_lossy()
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How its bytes are read.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The header as it was when the image was opened; `None` where the layer is not qcow2.
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// Whether its data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        let qcow2 = self.qcow2.as_ref();
        qcow2.is_some_and(|qcow2| qcow2.cipher.is_some()) || self.container.is_some()
    }

    /// Guest size in bytes when the image was opened.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// How the cache of its L2 tables is doing; `None` where the layer is not qcow2.
    pub fn l2_cache(&self) -> Option<CacheStatistics> {
        let qcow2 = self.qcow2.as_ref()?;
        Some(qcow2.maps.slices.statistics())
    }

    /// Its external data file, if it has one.
    pub fn data_file(&self) -> Option<&DataFile> {
        self.data_file.as_ref()
    }

    /// The paths of the files that hold the guest's bytes, by the guest offsets from which each does.
    pub fn data_paths(&self) -> Vec<(u64, &Path)> {
        match (&self.data_file, &self.foreign) {
            (Some(data), _) => vec![(0, data.path())],
            (None, Some(foreign)) => foreign.paths(&self.path),
            (None, None) => vec![(0, &self.path)],
        }
    }

    /// Which file it is, if the host can say.
    pub fn id(&self) -> Option<FileId> {
        self.id
    }

    /// The host offset of a guest offset where the disk lies in the file in one piece.
    pub(crate) fn flat_host(&self, at: u64) -> u64 {
        let container = self.container.as_ref();
        container.map_or(at, |container| container.host(at))
    }

    /// How many files it is in.
    pub(crate) fn file_count(&self) -> usize {
        let foreign = self.foreign.as_ref();
        let extents = foreign.map_or(0, |foreign| foreign.files.len());
        1 + usize::from(self.data_file.is_some()) + extents
    }

    /// Whether it names files by names that count from its own path.
    pub(crate) fn names_by_path(&self) -> bool {
        let foreign = self.foreign.as_ref();
        let header = self.header.as_ref();
        let names = header.map(|header| [header.backing_file(), header.data_file_name()]);
        foreign.is_some_and(|foreign| !foreign.files.is_empty())
            || names
                .into_iter()
                .flatten()
                .flatten()
                .any(|name| !name.starts_with(b"/"))
    }

    /// Gives back the memory of what was not used of its tables since the last call.
    pub(crate) fn clean(&self) {
        if let Some(qcow2) = &self.qcow2 {
            qcow2.maps.slices.clean();
        }
        if let Some(foreign) = &self.foreign {
            foreign.clean();
        }
    }
}

impl Qcow2 {
    pub(crate) fn new(
        maps: Maps,
        compression: CompressionType,
        cipher: Option<LayerCipher>,
    ) -> Qcow2 {
        Qcow2 {
            geometry: maps.geometry,
            compression,
            cipher,
            maps,
            loads: KeyLocks::default(),
            read_around: AtomicBool::new(true),
        }
    }
}

impl Image {
    /// Builds the shared state from what was read of the top layer, above its base.
    pub(crate) fn assemble(
        mut top: LayerParts,
        base: Arc<Base>,
        options: &OpenOptions,
    ) -> Result<Image, ImageError> {
        let writable = !options.read_only && !top.limits.read_only;
        let version = top.layer.header().map(|header| header.version);
        if writable && options.commit_log.is_some() && version == Some(Version::V2) {
            let text = "a version 2 image cannot name the log of the process that writes to it";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        if writable && options.discard_no_unref && version == Some(Version::V2) {
            let text =
                "discard-no-unref needs version 3, whose clusters may be zero and keep their place";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        if options.copy_on_read && !writable {
            let text = "copy-on-read writes to the image, which is open read-only";
            return Err(ImageError::new(ErrorKind::InvalidInput, text));
        }
        let mut writer = add_mapping(&mut top, options.cache, writable)?;
        if let (true, Some(qcow2)) = (writable, &mut top.layer.qcow2) {
            qcow2.maps.log.clone_from(&options.commit_log);
        }
        if let Some(writer) = &mut writer {
            writer.allocation = options.allocation.unwrap_or(writer.allocation);
        }
        let top = top.layer;
        Ok(Image {
            options: options.clone(),
            writer,
            locks: SectorLocks::default(),
            data_locks: SectorLocks::default(),
            flushing: AsyncLock::default(),
            read_only: !writable,
            size_bytes: AtomicU64::new(top.size_bytes),
            growing_to: AtomicU64::new(0),
            poison: Poison::new(top.name().into_owned()),
            events: RequestEvents::default(),
            copies: Copies::default(),
            top,
            base,
            decompressed: DecompressedClusters::new(options.cache.decompressed()),
            flush_failed: AtomicBool::new(false),
            corrupt: AtomicBool::new(false),
            first_corruption: OnceLock::new(),
            queues: AtomicUsize::new(0),
        })
    }

    /// A queue for the calling thread. `files` has one handle per file that the image was opened from, in
    /// the order of [`Opened::files`](crate::Opened).
    ///
    /// # Panics
    /// If `files` and the files of the image differ in number.
    pub fn queue<F: File>(self: &Arc<Self>, files: impl Into<ImageFiles<F>>) -> Queue<F> {
        let files = files.into();
        assert_eq!(
            (files.own.len(), files.below.len()),
            (self.top.file_count(), self.base.file_count),
            "a queue has one file handle per layer, data file and extent of a VMDK"
        );
        let id = self.queues.fetch_add(1, Ordering::Relaxed);
        Queue::new(Arc::clone(self), files, id)
    }

    /// Guest size in bytes, as of now.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// The path of the top layer, to be shown.
    pub(crate) fn name(&self) -> Cow<'_, str> {
        self.top.name()
    }

    /// The backing chain, top first.
    #[inline]
    pub fn layers(&self) -> Layers<'_> {
        Layers {
            top: &self.top,
            below: &self.base.layers,
        }
    }

    /// Whether another open image has the same base.
    pub fn shares_base(&self) -> bool {
        Arc::strong_count(&self.base) > 1
    }

    /// The decompressed clusters of the layer at `depth`.
    pub(crate) fn decompressed(&self, depth: usize) -> &DecompressedClusters {
        match depth {
            0 => &self.decompressed,
            _ => &self.base.decompressed,
        }
    }

    /// How the cache of refcount blocks is doing; `None` for an image that is not written to.
    pub fn refcount_cache(&self) -> Option<CacheStatistics> {
        let writer = self.writer.as_ref()?;
        Some(writer.alloc.lock().blocks.statistics())
    }

    /// Gives back the memory of metadata that was not used since the last call. A server with
    /// `cache-clean-interval` calls it that often.
    pub fn clean_caches(&self) {
        self.top.clean();
        if let Some(writer) = &self.writer {
            writer.alloc.lock().blocks.clean();
        }
        self.decompressed.clean();
        self.base.clean();
    }

    /// The persistent bitmaps that the first change to the image removes; `None` if it has none.
    pub fn lost_bitmaps(&self) -> Option<&LostBitmaps> {
        self.writer.as_ref()?.lost_bitmaps.as_ref()
    }

    /// What the header said, when the image was opened for writing, of a process that wrote to it and did
    /// not close it. `None` also in version 2, where nothing is said.
    pub fn unclosed(&self) -> Option<Unclosed> {
        let writer = self.writer.as_ref()?;
        let mut bits = writer.opened_with;
        // With snapshots the compatible bits say it. QEMU keeps those, also when it deletes the last snapshot.
        if writer.snapshot_marks.has(Compatible::IN_USE) {
            bits = Autoclear(writer.snapshot_marks.0);
        }
        bits.has(Autoclear::IN_USE).then_some(Unclosed {
            log_number: bits.log_number(),
        })
    }

    /// What was given back to the host inside clusters since the image was opened.
    pub fn holes(&self) -> HoleStatistics {
        let writer = self.writer.as_ref();
        writer.map_or_else(HoleStatistics::default, |writer| {
            writer.alloc.lock().holes.made
        })
    }

    /// What is done with the host's space; `None` for an image that is not written to.
    pub fn allocation(&self) -> Option<AllocationPolicy> {
        Some(self.writer.as_ref()?.allocation)
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The error that made the image refuse writes, if there was one.
    pub fn poisoned(&self) -> Option<Errno> {
        self.poison.get()
    }

    /// Refuses all writes from now on. The first error stays.
    pub(crate) fn poison(&self, errno: Errno) {
        self.poison.set(errno);
    }

    /// The first corruption that was found since the image was opened.
    pub fn corruption(&self) -> Option<CorruptionReport> {
        let (layer, fault) = *self.first_corruption.get()?;
        Some(CorruptionReport {
            layer,
            file: self.layers().get(layer)?.path.clone(),
            structure: fault.structure,
            host_offset: fault.host,
            finding: fault.finding,
        })
    }

    /// Reports corruption of layer `depth`. The request fails, and if it is the layer we write to,
    /// nothing is written any more and the header is to say so.
    #[cold]
    pub(crate) fn corrupt(&self, depth: usize, fault: Fault) -> Errno {
        let mut is_first = false;
        self.first_corruption.get_or_init(|| {
            is_first = true;
            (depth, fault)
        });
        if is_first && let Some(report) = self.corruption() {
            tracing::error!(image = %self.name(), layer = depth, %report, "the image is corrupt");
        }
        if depth == 0 && self.writer.is_some() {
            self.corrupt.store(true, Ordering::Release);
            self.poison(Errno::EIO);
        }
        Errno::EIO
    }

    /// Why something failed with `errno`: the corruption that was found, if that can be the reason.
    pub(crate) fn explain(&self, errno: Errno, context: &str) -> ImageError {
        match self.corruption() {
            Some(report) if errno == Errno::EIO => ImageError::corrupt(report, context),
            _ => ImageError::io(errno, context),
        }
    }

    /// Whether corruption was found that the header does not tell of yet; asks once.
    pub(crate) fn take_corrupt(&self) -> bool {
        self.corrupt.load(Ordering::Relaxed) && self.corrupt.swap(false, Ordering::AcqRel)
    }

    /// What a write is: zeros are looked for where that is asked for, in memory that can be looked into.
    pub(crate) fn detect_zeroes<'a>(&self, source: Source<'a>) -> Change<'a> {
        let unmap = match self.options.detect_zeroes {
            DetectZeroes::Off => return Change::Write(source),
            DetectZeroes::On => Unmap::Forbidden,
            DetectZeroes::Unmap => Unmap::Allowed,
        };
        match source {
            Source::Memory(memory) if memory.is_zero() => Change::Zero(unmap),
            source => Change::Write(source),
        }
    }

    /// The data file of the top layer.
    pub(crate) fn data_file(&self) -> Option<&DataFile> {
        self.top.data_file.as_ref()
    }

    /// The locks of the file that guest data are written to.
    pub(crate) fn data_locks(&self) -> &SectorLocks {
        match self.data_file() {
            Some(_) => &self.data_locks,
            None => &self.locks,
        }
    }

    /// Whether the layer below the top has anything at guest offset `at`.
    pub(crate) fn has_backing_at(&self, at: u64) -> bool {
        self.base
            .layers
            .first()
            .is_some_and(|layer| at < layer.size_bytes)
    }

    #[cfg(feature = "broken-order")]
    pub(crate) fn breaks(&self, rule: crate::options::BrokenRule) -> bool {
        self.options.broken == Some(rule)
    }
}

/// Gives a layer its mapping, and what it needs besides if it is to be written.
pub(crate) fn add_mapping(
    part: &mut LayerParts,
    cache: CacheOptions,
    writable: bool,
) -> Result<Option<Writer>, ImageError> {
    let Some(header) = part.layer.header() else {
        return Ok(None);
    };
    let geometry = header.geometry();
    let (metadata, clean) = metadata_clusters(part, header, &geometry);
    if writable && !clean {
        let path = part.layer.path.display();
        let text = format!(
            "tables of {path} overlap; gaur check -r all may separate them, gaur convert copies the disk"
        );
        return Err(ImageError::new(ErrorKind::Corrupt, text));
    }
    let sizes = cache.resolve(&geometry, part.layer.size_bytes)?;
    let l1 = L1Table::new(header.l1_table_offset.0, &part.l1);
    let maps = Maps::new(geometry, sizes, metadata, l1);
    let writer = writable.then(|| new_writer(part, header, &maps, sizes));
    let compression = header.compression_type;
    let cipher = part.cipher.take();
    part.layer.qcow2 = Some(Qcow2::new(maps, compression, cipher));
    Ok(writer)
}

fn new_writer(part: &LayerParts, header: &Header, maps: &Maps, sizes: CacheSizes) -> Writer {
    let geometry = maps.geometry;
    let place = (
        header.refcount_table_offset.0,
        u64::from(header.refcount_table_clusters),
    );
    let mut alloc = Alloc::new(
        geometry,
        part.refcount_table.clone(),
        place,
        sizes.refcount_bytes,
        part.file_len_bytes,
        part.limits.resizable,
    );
    alloc.watch = Arc::clone(&maps.watch);
    let zeroed = match alloc.capacity {
        // Zeros on the disk are not what the guest sees.
        _ if part.cipher.is_some() => ZeroedSpace::new(u64::MAX),
        None => ZeroedSpace::new(alloc.bump),
        Some(_) => ZeroedSpace::new(u64::MAX),
    };
    Writer {
        alloc: Mutex::new(alloc),
        claims: Claims::new(maps.guest_bytes_per_slice()),
        tables: AsyncLock::default(),
        resizing: AsyncLock::default(),
        refcount_loads: KeyLocks::default(),
        blocks: AsyncLock::default(),
        structure: AsyncLock::default(),
        flush: FlushGroup::default(),
        saves: AtomicUsize::new(0),
        epochs: Epochs::default(),
        zeroed: RwLock::new(zeroed),
        pressed: AtomicBool::new(false),
        announced: AtomicBool::new(false),
        opened_with: header.autoclear,
        snapshot_marks: match header.nb_snapshots {
            0 => Compatible::default(),
            _ => header.compatible,
        },
        limits: part.limits,
        allocation: header.allocation().unwrap_or_default(),
        snapshots: Mutex::new(SnapshotList::new(
            part.snapshots.clone(),
            HostRange::new(header.snapshots_offset.0, part.snapshot_table_bytes),
        )),
        bitmaps: Bitmaps::new(part.bitmaps.clone()),
        lost_bitmaps: part.lost_bitmaps.clone(),
    }
}

/// The clusters of an image that hold metadata, and whether no two structures share one.
fn metadata_clusters(
    part: &LayerParts,
    header: &Header,
    geometry: &Geometry,
) -> (ClusterSet, bool) {
    let mut set = ClusterSet::default();
    let mut clean = true;
    let size = geometry.cluster_size();
    let mut add = |offset: u64, bytes: u64| {
        if bytes > 0 {
            clean &= set.insert(HostRange::new(offset, bytes).clusters(geometry));
        }
    };
    add(0, 1);
    add(header.l1_table_offset.0, part.l1.len() as u64 * 8);
    add(
        header.refcount_table_offset.0,
        u64::from(header.refcount_table_clusters) * size,
    );
    add(header.snapshots_offset.0, part.snapshot_table_bytes);
    if let Some(luks) = header.encryption() {
        add(luks.offset.0, luks.len_bytes);
    }
    for snapshot in &part.snapshots {
        add(snapshot.l1_table_offset.0, u64::from(snapshot.l1_size) * 8);
    }
    for block in part.refcount_table.iter().filter(|block| **block != 0) {
        add(*block, 1);
    }
    for raw in &part.l1 {
        if let Ok(Some(table)) = gaur_format::l1::decode(*raw, geometry) {
            add(table.offset.0, 1);
        }
    }
    clean &= part.bitmaps.add_clusters(&mut set, geometry);
    (set, clean)
}

impl fmt::Debug for Image {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.layers().iter().map(Layer::name).collect();
        out.debug_struct("Image")
            .field("layers", &names)
            .field("size_bytes", &self.size_bytes())
            .field("read_only", &self.read_only)
            .field("poisoned", &self.poisoned())
            .finish()
    }
}

impl fmt::Debug for Layer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Layer")
            .field("path", &self.path)
            .field("format", &self.format)
            .field("size_bytes", &self.size_bytes)
            .finish_non_exhaustive()
    }
}

// Longest chain and largest tables are checked before an image is assembled; this keeps the two
// sides from drifting apart.
const _: () = assert!(limit::L1_BYTES_MAX <= 1 << 25, "an L1 table fits in memory");
