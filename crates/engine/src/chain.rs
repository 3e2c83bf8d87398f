//! Opening an image: its file, then its backing file, and so on down.
//!
//! A loop, not a recursion, with at most [`limit::CHAIN_DEPTH_MAX`] layers. Only the top file is opened
//! for writing. The others are named by images, and opened where [`References`](crate::References) lets
//! them be. Two layers that are the same file would make the chain endless; they are recognised by path
//! before the second is opened and by [`FileId`] after.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gaur_block::{Access, File, FileId, Host, OpenError};
use gaur_format::{extension, limit};

use crate::backing_name;
use crate::base::{Base, Bases, Identity, ImageFiles, OpenBase};
use crate::error::{ErrorKind, ImageError};
use crate::foreign;
use crate::image::Image;
use crate::layer::{LayerReader, Use};
use crate::options::{BackingFile, Format, OpenOptions};
use crate::references::Places;
use crate::repair::repair_if_dirty;

pub(crate) use crate::layer::LayerParts;

/// Most bytes of L1 and refcount tables over all layers. A single image has at most 40 MiB; a long
/// chain of huge ones is more likely made to exhaust memory than to be used.
pub(crate) const TABLE_BYTES: u64 = 1 << 30;

/// An image and its files.
#[derive(Debug)]
pub struct Opened<F> {
    /// The half that all queues share.
    pub image: Arc<Image>,
    /// What [`Image::queue`] wants.
    pub files: ImageFiles<F>,
}

/// A layer that is still to be opened.
struct Next {
    path: PathBuf,
    format: Option<Format>,
    /// The layer that named it; `None` for the top.
    overlay: Option<PathBuf>,
    /// Its index in the chain.
    depth: usize,
    /// The internal snapshot to show instead of the disk of today.
    snapshot: Option<String>,
    /// The caller names it, so it may be anywhere.
    told: bool,
}

impl Next {
    /// Says which file could not be opened, and whose backing file it is.
    fn context(&self) -> String {
        match &self.overlay {
            None => shown(&self.path),
            Some(overlay) => format!("cannot open {:?}, backing file of {overlay:?}", self.path),
        }
    }

    /// Why it could not be opened. The format of a backing file is for its overlay to tell, not for
    /// the caller who opens the chain.
    fn failed(&self, error: ImageError) -> ImageError {
        let error = match (&self.overlay, error.kind()) {
            (Some(_), ErrorKind::ForeignFormat) => {
                let text = format!(
                    "{error}; if it is a raw disk, 'qemu-img rebase -u -F raw' makes its overlay \
                     say so"
                );
                ImageError::new(ErrorKind::Unsupported, text)
            }
            _ => error,
        };
        error.within(self.context())
    }
}

/// The files that are part of a chain already, and where further ones may be.
pub(crate) struct Seen {
    places: Places,
    /// A file was opened that may have been let in by the directory of the top image alone.
    by_directory: bool,
    paths: BTreeSet<PathBuf>,
    ids: BTreeMap<FileId, PathBuf>,
}

/// A path as text.
fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn bites_its_tail(text: String) -> ImageError {
    ImageError::new(ErrorKind::InvalidInput, text)
}

impl Seen {
    /// Opens a file that an image of the chain names.
    pub(crate) async fn open<H: Host>(
        &mut self,
        host: &H,
        path: &Path,
        access: Access,
    ) -> Result<H::File, OpenError> {
        if let Some(allowed) = self.places.allowed()
            && let Ok(file) = host.open_within(path, allowed, access).await
        {
            return Ok(file);
        }
        let file = host.open_within(path, self.places.within(), access).await?;
        self.by_directory = true;
        Ok(file)
    }

    pub(crate) fn add_path(&mut self, path: &Path) -> Result<(), ImageError> {
        if self.paths.insert(path.to_owned()) {
            return Ok(());
        }
        Err(bites_its_tail(
            "the backing chain is a loop, this file is in it already".to_owned(),
        ))
    }

    fn check_id(&self, id: Option<FileId>) -> Result<(), ImageError> {
        match id.and_then(|id| self.ids.get(&id)) {
            None => Ok(()),
            Some(first) => Err(bites_its_tail(format!(
                "the backing chain is a loop, this file is in it already as {first:?}"
            ))),
        }
    }

    pub(crate) fn add_id(&mut self, id: Option<FileId>, path: &Path) -> Result<(), ImageError> {
        self.check_id(id)?;
        if let Some(id) = id {
            self.ids.insert(id, path.to_owned());
        }
        Ok(())
    }
}

/// Opens the image at `path` and its backing chain, and reads the tables that say where things
/// are. The host's files are opened with the locks that `options` ask for.
pub async fn open<H: Host>(
    host: &H,
    path: impl AsRef<Path>,
    options: &OpenOptions,
) -> Result<Opened<H::File>, ImageError> {
    open_sharing(host, path, options, &Bases::default()).await
}

/// The same; what is below the top is shared with images that were opened with the same `bases`, are open
/// still, and have the same below their tops.
pub async fn open_sharing<H: Host>(
    host: &H,
    path: impl AsRef<Path>,
    options: &OpenOptions,
    bases: &Bases<H::File>,
) -> Result<Opened<H::File>, ImageError> {
    let path = path.as_ref();
    check_options(path, options)?;
    let mut chain = Chain {
        host,
        options,
        seen: Seen {
            places: options.references.places(path),
            by_directory: false,
            paths: BTreeSet::new(),
            ids: BTreeMap::new(),
        },
        table_budget: TABLE_BYTES,
    };
    let top = Next {
        path: path.to_owned(),
        format: options.format,
        overlay: None,
        depth: 0,
        snapshot: options.snapshot.clone(),
        told: true,
    };
    let mut read = LayersRead::default();
    let file = chain.open_file(&top).await?;
    let next = chain.read(&top, file, &mut read).await?;
    let (base, below) = chain.base(path, next, bases).await?;
    let (mut parts, own) = read.finish();
    let Some(top) = parts.pop() else {
        return Err(ImageError::new(ErrorKind::InvalidInput, "it has no layer"));
    };
    let image = Image::assemble(top, base, options).map_err(|error| error.within(shown(path)))?;
    Ok(Opened {
        image: Arc::new(image),
        files: ImageFiles { own, below },
    })
}

fn check_options(path: &Path, options: &OpenOptions) -> Result<(), ImageError> {
    if options.force_share && !options.read_only {
        let text = "sharing an image with its writers needs read-only";
        return Err(ImageError::new(ErrorKind::InvalidInput, text));
    }
    if options.snapshot.is_some() && !options.read_only {
        let text =
            "a snapshot shows the disk as it was and cannot be written to; open it read-only";
        return Err(ImageError::new(ErrorKind::InvalidInput, text).within(shown(path)));
    }
    Ok(())
}

/// A chain that is being opened.
struct Chain<'a, H> {
    host: &'a H,
    options: &'a OpenOptions,
    seen: Seen,
    table_budget: u64,
}

/// What was read of some layers, and their files.
struct LayersRead<F> {
    parts: Vec<LayerParts>,
    files: Vec<F>,
    data_files: Vec<F>,
}

impl<F> Default for LayersRead<F> {
    fn default() -> LayersRead<F> {
        LayersRead {
            parts: Vec::new(),
            files: Vec::new(),
            data_files: Vec::new(),
        }
    }
}

impl<F> LayersRead<F> {
    /// The layers, and all their files in the order of [`ImageFiles`].
    fn finish(mut self) -> (Vec<LayerParts>, Vec<F>) {
        data_file::number(&mut self.parts);
        self.files.append(&mut self.data_files);
        (self.parts, self.files)
    }
}

impl<H: Host> Chain<'_, H> {
    /// Opens the file of a layer, which is not in the chain yet.
    async fn open_file(&mut self, layer: &Next) -> Result<H::File, ImageError> {
        let opened = async {
            self.seen.add_path(&layer.path)?;
            let file = self.open_unseen(layer).await?;
            self.seen.add_id(file.id(), &layer.path)?;
            Ok(file)
        };
        opened.await.map_err(|error| layer.failed(error))
    }

    async fn open_unseen(&mut self, layer: &Next) -> Result<H::File, ImageError> {
        let top = layer.overlay.is_none();
        let access = access(self.options, top);
        let opened = match layer.told {
            true => self.host.open(&layer.path, access).await,
            false => self.seen.open(self.host, &layer.path, access).await,
        };
        let error = match opened {
            Ok(file) => return Ok(file),
            Err(error) => ImageError::open(error),
        };
        if error.kind() == ErrorKind::Locked && !top {
            // The lock may be our own: the chain comes back to its top under another name.
            let look = Access {
                lock: false,
                ..access
            };
            if let Ok(file) = self.seen.open(self.host, &layer.path, look).await {
                self.seen.check_id(file.id())?;
            }
        }
        Err(error)
    }

    /// Reads what a layer says of itself, and opens what it names besides its backing file. The layer below, if there
    /// is one.
    async fn read(
        &mut self,
        layer: &Next,
        file: H::File,
        read: &mut LayersRead<H::File>,
    ) -> Result<Option<Next>, ImageError> {
        let mut parts = self
            .load(layer, &file)
            .await
            .map_err(|error| layer.failed(error))?;
        let mut more = self.more_files(&mut parts, layer.depth == 0).await?;
        read.data_files.append(&mut more);
        let mut next = match self.options.backing {
            true => backing_of(&parts, layer.depth, &self.options.backing_files)?,
            false => None,
        };
        if let (Some(next), 0) = (&mut next, layer.depth) {
            next.snapshot.clone_from(&self.options.backing_snapshot);
        }
        read.parts.push(parts);
        read.files.push(file);
        Ok(next)
    }

    async fn load(&mut self, layer: &Next, file: &H::File) -> Result<LayerParts, ImageError> {
        let options = self.options;
        let writable = layer.depth == 0 && !options.read_only && !file.limits().read_only;
        let purpose = Use {
            format: layer.format,
            writable,
            drop_bitmaps: options.drop_bitmaps,
            snapshot: layer.snapshot.as_deref(),
            key: options.keys.of_layer(layer.depth),
        };
        let mut reader = LayerReader::new(file).await?;
        if writable && reader.is_qcow2(layer.format).await? && repair_if_dirty(file).await? {
            // It may be longer now.
            reader = LayerReader::new(file).await?;
        }
        reader
            .load(layer.path.clone(), purpose, &mut self.table_budget)
            .await
    }

    /// Opens what a layer names besides its backing file: its data file, or the files of a VMDK.
    async fn more_files(
        &mut self,
        parts: &mut LayerParts,
        is_top: bool,
    ) -> Result<Vec<H::File>, ImageError> {
        let (host, options, seen) = (self.host, self.options, &mut self.seen);
        if let Some(data) = data_file::open(host, parts, is_top, options, seen).await? {
            return Ok(vec![data]);
        }
        let access = access(options, is_top);
        foreign::open_extents(host, parts, access, seen, &mut self.table_budget).await
    }

    /// The base of the image at `path`, which `next` begins.
    async fn base(
        &mut self,
        path: &Path,
        mut next: Option<Next>,
        bases: &Bases<H::File>,
    ) -> Result<OpenBase<H::File>, ImageError> {
        let (options, budget) = (self.options, self.table_budget);
        let invalid =
            |text: String| Err(ImageError::new(ErrorKind::InvalidInput, text).within(shown(path)));
        let mut stop = options.stop_at;
        let mut identity = None;
        let mut read = LayersRead::default();
        while let Some(layer) = next.take() {
            if layer.depth >= limit::CHAIN_DEPTH_MAX {
                let text = format!(
                    "the backing chain is longer than {} images",
                    limit::CHAIN_DEPTH_MAX
                );
                return Err(ImageError::new(ErrorKind::Unsupported, text).within(layer.context()));
            }
            let file = self.open_file(&layer).await?;
            if stop.is_some() && file.id() == stop {
                stop = None;
                break;
            }
            if layer.depth == 1 {
                self.seen.by_directory = false;
                identity = self.identity(&layer, file.id());
                if let Some(open) = identity.as_ref().and_then(|wanted| bases.find(wanted)) {
                    self.take_budget(open.0.table_bytes)
                        .map_err(|error| error.within(layer.context()))?;
                    return Ok(open);
                }
            }
            next = self.read(&layer, file, &mut read).await?;
        }
        if stop.is_some() {
            let text = "the file that its chain was to end above is not part of it";
            return invalid(text.to_owned());
        }
        if let (Some(which), true) = (&options.backing_snapshot, read.parts.is_empty()) {
            return invalid(format!(
                "it has no backing file, and so no {which:?} of that"
            ));
        }
        if let Some(identity) = &mut identity {
            identity.needed = self.seen.places.needed(self.seen.by_directory);
        }
        let (parts, files) = read.finish();
        let base = Base::assemble(parts, options, budget - self.table_budget, identity);
        let base = base.map_err(|error| error.within(shown(path)))?;
        Ok(bases.add((Arc::new(base), files.into())))
    }

    /// What a base has to have in common with the one that this layer begins, to be shared.
    fn identity(&self, first: &Next, file: Option<FileId>) -> Option<Identity> {
        let options = self.options;
        let locked = options.lock && !options.force_share;
        let alone = options.stop_at.is_some() || !options.backing_files.is_empty();
        let file = file.filter(|_| locked && !alone)?;
        Some(Identity {
            file,
            path: first.path.clone(),
            format: first.format,
            snapshot: first.snapshot.clone(),
            direct: access(options, false).direct,
            keys: options.keys.clone(),
            cache: options.cache,
            needed: self.seen.places.needed(true),
        })
    }

    /// Counts the tables of a base that is open already.
    fn take_budget(&mut self, table_bytes: u64) -> Result<(), ImageError> {
        let left = self.table_budget.checked_sub(table_bytes);
        self.table_budget = left.ok_or_else(|| {
            let text =
                format!("tables of {table_bytes} bytes are more than a chain may still have");
            ImageError::new(ErrorKind::Unsupported, text)
        })?;
        Ok(())
    }
}

/// How the files of a layer are opened.
fn access(options: &OpenOptions, top: bool) -> Access {
    Access {
        write: top && !options.read_only,
        direct: match options.backing_direct {
            Some(direct) if !top => direct,
            _ => options.direct,
        },
        lock: options.lock,
        force_share: options.force_share,
    }
}

/// The layer below, if there is one.
fn backing_of(
    parts: &LayerParts,
    depth: usize,
    told: &[BackingFile],
) -> Result<Option<Next>, ImageError> {
    let Some(header) = &parts.layer.header else {
        return Ok(None);
    };
    let told = told.get(depth).cloned().unwrap_or_default();
    let next = |path, format, is_told| Next {
        path,
        format,
        overlay: Some(parts.layer.path.clone()),
        depth: depth + 1,
        snapshot: None,
        told: is_told,
    };
    if let (Some(path), format) = (told.path, told.format) {
        return Ok(Some(next(path, format, true)));
    }
    let Some(backing) = header.backing_file() else {
        return Ok(None);
    };
    let context = || {
        let backing = String::from_utf8_lossy(backing);
        format!(
            "cannot use {backing:?}, backing file of {:?}",
            parts.layer.path
        )
    };
    let path = backing_name::resolve(&parts.layer.path, backing)
        .map_err(|error| ImageError::caused(ErrorKind::Unsupported, error, context()))?;
    let format = match header.extension(extension::BACKING_FORMAT) {
        _ if told.format.is_some() => told.format,
        None | Some(&[]) => None,
        Some(raw) => {
            let known = std::str::from_utf8(raw).ok().and_then(Format::from_name);
            Some(known.ok_or_else(|| {
                let text = format!(
                    "its format is given as {:?}, which is not supported (qcow2 and raw are)",
                    String::from_utf8_lossy(raw)
                );
                ImageError::new(ErrorKind::Unsupported, text).within(context())
            })?)
        }
    };
    Ok(Some(next(path, format, false)))
}

mod data_file;

#[cfg(test)]
mod reference_tests;
#[cfg(test)]
mod sharing_tests;
#[cfg(test)]
mod snapshot_tests;
#[cfg(test)]
mod tests;
