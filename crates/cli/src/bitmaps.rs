//! The directory of an image's persistent bitmaps.

use gaur_engine::{Format, OpenOptions};
use gaur_format::bitmap::{self, Bitmap};
use gaur_format::feature::Autoclear;
use gaur_format::{Header, Version};

use crate::failure::Failure;
use crate::image_file::ImageFile;
use crate::image_spec::ImageSpec;

/// The bitmaps of the image whose header is `header`.
pub fn read(file: &ImageFile, header: &Header) -> Result<Vec<Bitmap>, Failure> {
    // A writer that does not know bitmaps cleared the bit and left them stale.
    let Some(extension) = header
        .bitmaps()
        .filter(|_| header.autoclear.has(Autoclear::BITMAPS))
    else {
        return Ok(Vec::new());
    };
    let (offset, len) = (extension.directory_offset.0, extension.directory_len_bytes);
    let bytes = file.read(offset, len)?;
    bitmap::parse_directory(&bytes, extension.count, &header.geometry())
        .map_err(|error| file.broken(&error))
}

/// The same of an image that is not open; `None` if its format has no place for bitmaps.
pub fn storable(spec: &ImageSpec, base: &OpenOptions) -> Result<Option<Vec<Bitmap>>, Failure> {
    let file = spec.open_file(base)?;
    if spec.format_of(&file)? != Format::Qcow2 {
        return Ok(None);
    }
    let header = file.header()?;
    match header.version {
        Version::V2 => Ok(None),
        Version::V3 => read(&file, &header).map(Some),
    }
}
