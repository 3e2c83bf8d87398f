//! Opening an image: its file, then its backing file, and so on down.
//!
//! A loop, not a recursion, with at most [`limit::CHAIN_DEPTH_MAX`] layers. Only the top file is opened
//! for writing. The others are named by images, and opened where [`References`](crate::References) lets
//! them be. Two layers that are the same file would make the chain endless; they are recognised by path
//! before the second is opened and by [`FileId`] after.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gaur_block::{Access, File, FileId, Host, Within};
use gaur_format::{extension, limit};

use crate::backing_name;
use crate::error::{ErrorKind, ImageError};
use crate::foreign;
use crate::image::Image;
use crate::layer::{LayerReader, Use};
use crate::options::{Format, OpenOptions};
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
    /// One handle per layer, top first, then one per external data file in the same order: what
    /// [`Image::queue`] wants.
    pub files: Vec<F>,
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
    pub(crate) places: Places,
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
    let path = path.as_ref();
    if options.force_share && !options.read_only {
        let text = "sharing an image with its writers needs read-only";
        return Err(ImageError::new(ErrorKind::InvalidInput, text));
    }
    if options.snapshot.is_some() && !options.read_only {
        let text =
            "a snapshot shows the disk as it was and cannot be written to; open it read-only";
        return Err(ImageError::new(ErrorKind::InvalidInput, text).within(shown(path)));
    }
    let mut layers: Vec<LayerParts> = Vec::new();
    let (mut files, mut data_files) = (Vec::new(), Vec::new());
    let mut seen = Seen {
        places: options.references.places(path),
        paths: BTreeSet::new(),
        ids: BTreeMap::new(),
    };
    let mut table_budget = TABLE_BYTES;
    let mut stop = options.stop_at;
    let mut next = Some(Next {
        path: path.to_owned(),
        format: options.format,
        overlay: None,
        depth: 0,
        snapshot: options.snapshot.clone(),
    });
    while let Some(layer) = next.take() {
        if layers.len() >= limit::CHAIN_DEPTH_MAX {
            let text = format!(
                "the backing chain is longer than {} images",
                limit::CHAIN_DEPTH_MAX
            );
            return Err(ImageError::new(ErrorKind::Unsupported, text).within(layer.context()));
        }
        let (file, mut parts) = open_layer(host, &layer, options, &mut seen, &mut table_budget)
            .await
            .map_err(|error| layer.failed(error))?;
        if stop.is_some() && layer.overlay.is_some() && file.id() == stop {
            stop = None;
            break;
        }
        let (is_top, budget) = (layers.is_empty(), &mut table_budget);
        let more = more_files(host, &mut parts, is_top, options, &mut seen, budget);
        data_files.append(&mut more.await?);
        if options.backing {
            next = backing_of(&parts, layer.depth)?;
        }
        if let (Some(next), true) = (&mut next, layers.is_empty()) {
            next.snapshot.clone_from(&options.backing_snapshot);
        }
        layers.push(parts);
        files.push(file);
    }
    if stop.is_some() {
        let text = "the file that its chain was to end above is not part of it".to_owned();
        return Err(ImageError::new(ErrorKind::InvalidInput, text).within(shown(path)));
    }
    if let (Some(which), 0 | 1) = (&options.backing_snapshot, layers.len()) {
        let text = format!("it has no backing file, and so no {which:?} of that");
        return Err(ImageError::new(ErrorKind::InvalidInput, text).within(shown(path)));
    }
    data_file::number(&mut layers);
    files.append(&mut data_files);
    let image = Image::assemble(layers, options).map_err(|error| error.within(shown(path)))?;
    Ok(Opened {
        image: Arc::new(image),
        files,
    })
}

async fn open_layer<H: Host>(
    host: &H,
    layer: &Next,
    options: &OpenOptions,
    seen: &mut Seen,
    table_budget: &mut u64,
) -> Result<(H::File, LayerParts), ImageError> {
    seen.add_path(&layer.path)?;
    let file = open_file(host, layer, options, seen).await?;
    seen.add_id(file.id(), &layer.path)?;
    let writable = layer.overlay.is_none() && !options.read_only && !file.limits().read_only;
    let purpose = Use {
        format: layer.format,
        writable,
        drop_bitmaps: options.drop_bitmaps,
        snapshot: layer.snapshot.as_deref(),
        key: options.keys.of_layer(layer.depth),
    };
    let mut reader = LayerReader::new(&file).await?;
    if writable && reader.is_qcow2(layer.format).await? && repair_if_dirty(&file).await? {
        // It may be longer now.
        reader = LayerReader::new(&file).await?;
    }
    let parts = reader
        .load(layer.path.clone(), purpose, table_budget)
        .await?;
    drop(reader);
    Ok((file, parts))
}

/// Opens what a layer names besides its backing file: its data file, or the files of a VMDK.
async fn more_files<H: Host>(
    host: &H,
    parts: &mut LayerParts,
    is_top: bool,
    options: &OpenOptions,
    seen: &mut Seen,
    table_budget: &mut u64,
) -> Result<Vec<H::File>, ImageError> {
    if let Some(data) = data_file::open(host, parts, is_top, options, seen).await? {
        return Ok(vec![data]);
    }
    foreign::open_extents(host, parts, access(options, is_top), seen, table_budget).await
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

async fn open_file<H: Host>(
    host: &H,
    layer: &Next,
    options: &OpenOptions,
    seen: &Seen,
) -> Result<H::File, ImageError> {
    let top = layer.overlay.is_none();
    let access = access(options, top);
    let within = match top {
        true => Within::Anywhere,
        false => seen.places.within(),
    };
    let error = match host.open_within(&layer.path, within, access).await {
        Ok(file) => return Ok(file),
        Err(error) => error,
    };
    let error = ImageError::open(error);
    if error.kind() == ErrorKind::Locked && !top {
        // The lock may be our own: the chain comes back to its top under another name.
        let look = Access {
            lock: false,
            ..access
        };
        if let Ok(file) = host.open_within(&layer.path, within, look).await {
            seen.check_id(file.id())?;
        }
    }
    Err(error)
}

/// The layer below, if there is one.
fn backing_of(parts: &LayerParts, depth: usize) -> Result<Option<Next>, ImageError> {
    let Some(header) = &parts.layer.header else {
        return Ok(None);
    };
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
    Ok(Some(Next {
        path,
        format,
        overlay: Some(parts.layer.path.clone()),
        depth: depth + 1,
        snapshot: None,
    }))
}

mod data_file;

#[cfg(test)]
mod reference_tests;
#[cfg(test)]
mod snapshot_tests;
#[cfg(test)]
mod tests;
