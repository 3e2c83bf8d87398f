//! The external data file of an image: named by the image like a backing file, and opened where those may be.

use std::path::PathBuf;

use gaur_block::{Access, File, Host};
use gaur_format::feature::{Autoclear, Incompatible};

use super::Seen;
use crate::backing_name;
use crate::error::{ErrorKind, ImageError};
use crate::image::DataFile;
use crate::layer::LayerParts;
use crate::options::OpenOptions;

/// Opens the data file of a layer that was read, if it has one, and notes it there.
pub(super) async fn open<H: Host>(
    host: &H,
    parts: &mut LayerParts,
    is_top: bool,
    options: &OpenOptions,
    seen: &mut Seen,
) -> Result<Option<H::File>, ImageError> {
    let Some(header) = &parts.layer.header else {
        return Ok(None);
    };
    if !header.incompatible.has(Incompatible::DATA_FILE) {
        return match &options.data_file {
            Some(_) if is_top => Err(not_used(parts)),
            _ => Ok(None),
        };
    }
    let is_raw = header.autoclear.has(Autoclear::RAW_DATA_FILE);
    let told = options.data_file.as_ref().filter(|_| is_top);
    let path = match told {
        Some(path) => path.clone(),
        None => named(parts)?,
    };
    let context = || format!("cannot open {path:?}, data file of {:?}", parts.layer.path);
    seen.add_path(&path)
        .map_err(|error| error.within(context()))?;
    let write = is_top && !options.read_only && !parts.limits.read_only;
    let access = Access {
        write,
        direct: match options.backing_direct {
            Some(direct) if !is_top => direct,
            _ => options.direct,
        },
        lock: options.lock,
        force_share: options.force_share,
    };
    let opened = match told {
        Some(_) => host.open(&path, access).await,
        None => seen.open(host, &path, access).await,
    };
    let file = opened.map_err(|error| ImageError::open(error).within(context()))?;
    seen.add_id(file.id(), &path)
        .map_err(|error| error.within(context()))?;
    check(&file, parts.layer.size_bytes, write)
        .await
        .map_err(|error| error.within(context()))?;
    parts.layer.data_file = Some(DataFile {
        path,
        index: 0,
        is_raw,
    });
    Ok(Some(file))
}

/// Says of each layer's data file, and of the first of the files of a VMDK, which file of these layers it is: they
/// come behind those of the layers.
pub(super) fn number(layers: &mut [LayerParts]) {
    let mut next = layers.len();
    for layer in layers {
        if let Some(data) = &mut layer.layer.data_file {
            data.index = next;
            next += 1;
        }
        if let Some(foreign) = &mut layer.layer.foreign {
            foreign.first_file = next;
            next += foreign.files.len();
        }
    }
}

/// The path of the data file that an image names.
fn named(parts: &LayerParts) -> Result<PathBuf, ImageError> {
    let overlay = &parts.layer.path;
    let header = parts.layer.header.as_ref();
    let name = header.and_then(|header| header.data_file_name());
    let Some(name) = name else {
        let text = "the image has an external data file and does not say which; name it with \
                    data-file.filename=";
        return Err(ImageError::new(ErrorKind::InvalidInput, text)
            .within(overlay.to_string_lossy().into_owned()));
    };
    backing_name::resolve(overlay, name).map_err(|error| {
        let name = String::from_utf8_lossy(name);
        let context = format!("cannot use {name:?}, data file of {overlay:?}");
        ImageError::caused(ErrorKind::Unsupported, error, context)
    })
}

fn not_used(parts: &LayerParts) -> ImageError {
    let text = "a data file was named, but the image has no external data file";
    ImageError::new(ErrorKind::InvalidInput, text)
        .within(parts.layer.path.to_string_lossy().into_owned())
}

/// A data file that ends before the disk does was truncated, or is another one.
async fn check<F: File>(file: &F, size_bytes: u64, write: bool) -> Result<(), ImageError> {
    let len = file.len().await;
    let len = len.map_err(|errno| ImageError::io(errno, "cannot tell the length of the file"))?;
    if len.next_multiple_of(512) < size_bytes {
        let text =
            format!("it has {len} bytes, the disk {size_bytes}; it was truncated or is another");
        return Err(ImageError::new(ErrorKind::Corrupt, text));
    }
    if write && file.limits().read_only {
        return Err(ImageError::new(ErrorKind::ReadOnly, "it is read-only"));
    }
    Ok(())
}
