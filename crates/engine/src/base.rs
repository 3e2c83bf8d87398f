//! The base of an image: the layers below its top, which images over the same base share.
//!
//! Those layers are only read, and their locks keep other programs from writing them. So what is kept of them, their
//! mappings and caches and the merged index, serves any number of images at once, as it serves the queues
//! of one. It is bounded for the base, not for each image over it.
//!
//! Sharing is for the caller to ask for, by a [`Bases`] that it opens several images with. Two chains share what is below
//! their tops if that begins with the same file (device and inode, which is looked up for each), and every option that
//! counts below the top is the same, the keys and the places where files may be among them. A chain that was opened
//! without locks, or that ends early ([`OpenOptions::stop_at`]), is never shared. A base goes with the last image over it. Files
//! further down that were replaced meanwhile are not looked for: a base shows what it showed when it was opened.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use gaur_block::{File, FileId};

use crate::cache_options::CacheOptions;
use crate::chain::LayerParts;
use crate::decompressed::DecompressedClusters;
use crate::error::ImageError;
use crate::image::{Layer, add_mapping};
use crate::keys::Keys;
use crate::merged::MergedIndex;
use crate::options::{Format, OpenOptions};
use crate::references::Needed;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};

/// The layers below the top, and what is kept of them.
pub(crate) struct Base {
    /// The first is at depth 1.
    pub(crate) layers: Vec<Layer>,
    /// Where there are several with a mapping.
    pub(crate) merged: Option<MergedIndex>,
    pub(crate) decompressed: DecompressedClusters,
    /// Bytes of their tables.
    pub(crate) table_bytes: u64,
    /// Of its layers.
    pub(crate) file_count: usize,
    /// `None` for one that is not shared.
    identity: Option<Identity>,
    /// Calls of [`Base::clean`].
    cleanings: AtomicUsize,
}

/// What two chains have in common that share their base.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) file: FileId,
    /// By which it was opened. Relative names in it count from there.
    pub(crate) path: PathBuf,
    pub(crate) format: Option<Format>,
    /// The internal snapshot of it that is shown.
    pub(crate) snapshot: Option<String>,
    pub(crate) direct: bool,
    pub(crate) keys: Keys,
    pub(crate) cache: CacheOptions,
    /// Where the files below the first were allowed to be.
    pub(crate) needed: Needed,
}

impl Identity {
    /// Whether the chain that `wanted` begins would be the same.
    fn serves(&self, wanted: &Identity, first: Option<&Layer>) -> bool {
        let by_path = first.is_none_or(Layer::names_by_path);
        let caches = |cache: &CacheOptions| (cache.l2_bytes, cache.decompressed());
        self.file == wanted.file
            && (!by_path || self.path == wanted.path)
            && (self.format, &self.snapshot) == (wanted.format, &wanted.snapshot)
            && self.direct == wanted.direct
            && caches(&self.cache) == caches(&wanted.cache)
            && self.needed.is_met_by(&wanted.needed)
            && self.keys.same_below_top(&wanted.keys)
    }
}

impl Base {
    /// Builds it from what was read of every layer.
    pub(crate) fn assemble(
        parts: Vec<LayerParts>,
        options: &OpenOptions,
        table_bytes: u64,
        identity: Option<Identity>,
    ) -> Result<Base, ImageError> {
        let mut layers = Vec::with_capacity(parts.len());
        for mut part in parts {
            add_mapping(&mut part, CacheOptions::default(), false)?;
            layers.push(part.layer);
        }
        let mapped = |layer: &&Layer| layer.qcow2.is_some() || layer.foreign.is_some();
        let merged = layers.iter().filter(mapped).count() > 1;
        Ok(Base {
            file_count: layers.iter().map(Layer::file_count).sum(),
            layers,
            merged: merged.then(|| MergedIndex::new(options.cache.l2_bytes)),
            decompressed: DecompressedClusters::new(options.cache.decompressed()),
            table_bytes,
            identity,
            cleanings: AtomicUsize::new(0),
        })
    }

    /// Gives back the memory of what was not used since the last call. Each image over it calls; one call in as many
    /// does it.
    pub(crate) fn clean(self: &Arc<Base>) {
        let calls = self.cleanings.fetch_add(1, Ordering::Relaxed);
        if !calls.is_multiple_of(Arc::strong_count(self)) {
            return;
        }
        self.layers.iter().for_each(Layer::clean);
        self.decompressed.clean();
        if let Some(merged) = &self.merged {
            merged.clean();
        }
    }
}

/// The layers of an open image, top first.
#[derive(Clone, Copy)]
pub struct Layers<'a> {
    pub(crate) top: &'a Layer,
    pub(crate) below: &'a [Layer],
}

impl<'a> Layers<'a> {
    /// The top one.
    pub fn top(self) -> &'a Layer {
        self.top
    }

    /// The one at this depth; the top is at 0.
    #[inline]
    pub fn get(self, depth: usize) -> Option<&'a Layer> {
        match depth.checked_sub(1) {
            None => Some(self.top),
            Some(below) => self.below.get(below),
        }
    }

    /// How many there are.
    #[allow(clippy::len_without_is_empty, reason = "there is always a top")]
    pub fn len(self) -> usize {
        1 + self.below.len()
    }

    /// All of them, top first.
    pub fn iter(self) -> impl Iterator<Item = &'a Layer> + Clone {
        std::iter::once(self.top).chain(self.below)
    }
}

impl std::ops::Index<usize> for Layers<'_> {
    type Output = Layer;

    fn index(&self, depth: usize) -> &Layer {
        match depth.checked_sub(1) {
            None => self.top,
            Some(below) => &self.below[below],
        }
    }
}

/// The files of an open image: what a queue has handles of.
#[derive(Debug)]
pub struct ImageFiles<F> {
    /// That of the top layer, then its data file or the files of a VMDK.
    pub own: Vec<F>,
    /// Those of the layers below, then their data files in the same order. Other images may share them.
    pub below: Arc<[F]>,
}

impl<F> ImageFiles<F> {
    /// All of them, those of the top layer first.
    pub fn iter(&self) -> impl Iterator<Item = &F> {
        self.own.iter().chain(self.below.iter())
    }

    /// Those that belong to the top, or to the layers below it.
    #[inline]
    pub(crate) fn of(&self, depth: usize) -> &[F] {
        match depth {
            0 => &self.own,
            _ => &self.below,
        }
    }
}

impl<F: Clone> Clone for ImageFiles<F> {
    fn clone(&self) -> ImageFiles<F> {
        ImageFiles {
            own: self.own.clone(),
            below: Arc::clone(&self.below),
        }
    }
}

/// Of an image without a backing file.
impl<F> From<Vec<F>> for ImageFiles<F> {
    fn from(own: Vec<F>) -> ImageFiles<F> {
        ImageFiles {
            own,
            below: Arc::from([]),
        }
    }
}

/// The bases that several images may share: those of the images that were opened with it and are open still.
#[derive(Debug)]
pub struct Bases<F> {
    open: Mutex<Vec<Entry<F>>>,
}

#[derive(Debug)]
struct Entry<F> {
    file: FileId,
    base: Weak<Base>,
    files: Weak<[F]>,
}

/// A base, and its files.
pub(crate) type OpenBase<F> = (Arc<Base>, Arc<[F]>);

impl<F: File> Bases<F> {
    /// The base that serves the chain which `wanted` begins.
    pub(crate) fn find(&self, wanted: &Identity) -> Option<OpenBase<F>> {
        self.open.lock().iter().find_map(|entry| {
            let same_file = entry.file == wanted.file;
            let base = same_file.then(|| entry.base.upgrade()).flatten()?;
            let identity = base.identity.as_ref()?;
            let serves = identity.serves(wanted, base.layers.first());
            Some((base, entry.files.upgrade()?)).filter(|_| serves)
        })
    }

    /// Adds a base that was opened; the one that is there, if another image was quicker.
    pub(crate) fn add(&self, (base, files): OpenBase<F>) -> OpenBase<F> {
        let Some(identity) = &base.identity else {
            return (base, files);
        };
        if let Some(there) = self.find(identity) {
            return there;
        }
        let mut open = self.open.lock();
        open.retain(|entry| entry.base.strong_count() > 0);
        open.push(Entry {
            file: identity.file,
            base: Arc::downgrade(&base),
            files: Arc::downgrade(&files),
        });
        (base, files)
    }
}

impl<F> Default for Bases<F> {
    fn default() -> Bases<F> {
        Bases {
            open: Mutex::default(),
        }
    }
}

impl std::fmt::Debug for Base {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Base")
            .field("layers", &self.layers)
            .finish_non_exhaustive()
    }
}
