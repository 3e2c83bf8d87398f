//! Header extensions, which follow the header in cluster 0.
//!
//! Each is a type (u32), a length (u32), that many bytes, and zeros up to a multiple of eight. Type 0
//! ends the list; so does the backing file name or the end of the cluster. A list is kept as it was
//! found, in order, unknown types byte for byte.

use alloc::vec::Vec;

use crate::addr::HostOffset;
use crate::bytes;
use crate::error::{Error, ErrorKind};
use crate::geometry::Geometry;
use crate::limit;

/// Ends the list.
pub const END: u32 = 0;
/// Name of the backing file's format.
pub const BACKING_FORMAT: u32 = 0xe279_2aca;
/// Names of feature bits.
pub const FEATURE_NAMES: u32 = 0x6803_f857;
/// Where the bitmap directory is.
pub const BITMAPS: u32 = 0x2385_2875;
/// Where the LUKS header is.
pub const LUKS: u32 = 0x0537_be77;
/// Name of the external data file.
pub const DATA_FILE: u32 = 0x4441_5441;
/// How the image likes its space, an extension of Gaur's own; see [`crate::allocation`].
pub const ALLOCATION: u32 = 0xb5c8_1f6d;
/// What was an extension that is not wanted any more, of Gaur's own: its data mean nothing.
pub const REMOVED: u32 = 0x9d3e_60a7;

const STRUCTURE: &str = "header extension";

/// One header extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Its type, not [`END`].
    pub kind: u32,
    /// Its data without padding.
    pub data: Vec<u8>,
}

/// Where the LUKS header lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LuksPointer {
    /// First byte, cluster aligned.
    pub offset: HostOffset,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// Where the bitmap directory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Number of bitmaps, at least 1.
    pub count: u32,
    /// Length of the directory in bytes.
    pub directory_len_bytes: u64,
    /// First byte of the directory, cluster aligned.
    pub directory_offset: HostOffset,
}

/// Parses the list in `bytes`, which starts at byte `start` of the image and ends where the backing
/// file name or the cluster does.
pub(crate) fn parse_list(bytes: &[u8], start: u64) -> Result<Vec<Extension>, Error> {
    let mut list: Vec<Extension> = Vec::new();
    let mut at = 0usize;
    while let (Some(kind), Some(len)) = (
        bytes::u32_at(bytes, at),
        bytes::u32_at(bytes, at.saturating_add(4)),
    ) {
        if kind == END {
            break;
        }
        let position = start.saturating_add(at as u64);
        let data_at = at.saturating_add(8);
        let Some(data) = bytes::slice(bytes, data_at, len as usize) else {
            let left = bytes.len().saturating_sub(data_at);
            return Err(Error::new(
                ErrorKind::Malformed,
                STRUCTURE,
                "does not fit in the header",
            )
            .at(position)
            .found(format_args!("type {kind:#010x} with {len} bytes"))
            .allowed(alloc::format!("{left} bytes")));
        };
        let known = [BACKING_FORMAT, FEATURE_NAMES, BITMAPS, LUKS, DATA_FILE].contains(&kind);
        if known && list.iter().any(|other| other.kind == kind) {
            return Err(Error::new(ErrorKind::Malformed, STRUCTURE, "appears twice")
                .at(position)
                .found(format_args!("type {kind:#010x}")));
        }
        list.push(Extension {
            kind,
            data: data.to_vec(),
        });
        at = data_at.saturating_add((len as usize).next_multiple_of(8));
    }
    Ok(list)
}

/// Appends the list and its end to `out`.
pub(crate) fn encode_list(list: &[Extension], out: &mut Vec<u8>) -> Result<(), Error> {
    for extension in list {
        let len = u32::try_from(extension.data.len()).map_err(|_| {
            Error::new(ErrorKind::TooLarge, STRUCTURE, "is too long")
                .found(format_args!("type {:#010x}", extension.kind))
        })?;
        out.extend_from_slice(&extension.kind.to_be_bytes());
        out.extend_from_slice(&len.to_be_bytes());
        out.extend_from_slice(&extension.data);
        bytes::pad_to_8(out);
    }
    out.extend_from_slice(&[0; 8]);
    Ok(())
}

/// Whether `len` bytes at `offset` start at a cluster and end where host offsets do.
fn check_range(
    offset: u64,
    len: u64,
    geometry: &Geometry,
    what: &'static str,
) -> Result<(), Error> {
    let end = offset.checked_add(len);
    if end.is_none_or(|end| end > limit::HOST_END) || !geometry.is_aligned(HostOffset(offset)) {
        return Err(Error::new(ErrorKind::Malformed, STRUCTURE, what)
            .found(format_args!("{len} bytes at {offset:#x}"))
            .allowed("cluster aligned, below 2^56"));
    }
    Ok(())
}

/// Checks the length of the data of an extension with a fixed layout.
fn check_len<const N: usize>(data: &[u8], what: &'static str) -> Result<(), Error> {
    if data.len() == N {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Malformed, STRUCTURE, what)
        .found(format_args!("{} bytes", data.len()))
        .allowed(alloc::format!("{N} bytes")))
}

fn u32_of(data: &[u8], at: usize) -> u32 {
    bytes::u32_at(data, at).unwrap_or(0)
}

fn u64_of(data: &[u8], at: usize) -> u64 {
    bytes::u64_at(data, at).unwrap_or(0)
}

impl LuksPointer {
    /// Parses the data of a [`LUKS`] extension.
    pub fn parse(data: &[u8], geometry: &Geometry) -> Result<LuksPointer, Error> {
        check_len::<16>(data, "luks pointer has a wrong length")?;
        let (offset, len) = (u64_of(data, 0), u64_of(data, 8));
        check_range(offset, len, geometry, "luks header is out of place")?;
        Ok(LuksPointer {
            offset: HostOffset(offset),
            len_bytes: len,
        })
    }

    /// The extension.
    pub fn encode(&self) -> Extension {
        let data = [self.offset.0.to_be_bytes(), self.len_bytes.to_be_bytes()].concat();
        Extension { kind: LUKS, data }
    }
}

impl BitmapsExtension {
    /// Parses the data of a [`BITMAPS`] extension.
    pub fn parse(data: &[u8], geometry: &Geometry) -> Result<BitmapsExtension, Error> {
        check_len::<24>(data, "bitmaps pointer has a wrong length")?;
        let (count, reserved) = (u32_of(data, 0), u32_of(data, 4));
        let (len, offset) = (u64_of(data, 8), u64_of(data, 16));
        let wrong = |kind, what| Error::new(kind, STRUCTURE, what);
        if reserved != 0 {
            return Err(wrong(
                ErrorKind::Malformed,
                "bitmaps pointer has reserved bits set",
            )
            .found(format_args!("{reserved:#x}")));
        }
        if count == 0 {
            return Err(wrong(
                ErrorKind::Malformed,
                "bitmaps pointer counts no bitmap",
            ));
        }
        if count > limit::BITMAPS_MAX {
            return Err(wrong(ErrorKind::TooLarge, "too many bitmaps")
                .found(count)
                .allowed("up to 65535"));
        }
        if len > limit::BITMAP_DIRECTORY_BYTES_MAX {
            return Err(wrong(ErrorKind::TooLarge, "bitmap directory is too long")
                .found(format_args!("{len} bytes"))
                .allowed(alloc::format!(
                    "up to {} bytes",
                    limit::BITMAP_DIRECTORY_BYTES_MAX
                )));
        }
        check_range(offset, len, geometry, "bitmap directory is out of place")?;
        Ok(BitmapsExtension {
            count,
            directory_len_bytes: len,
            directory_offset: HostOffset(offset),
        })
    }

    /// The extension.
    pub fn encode(&self) -> Extension {
        let mut data = Vec::with_capacity(24);
        data.extend_from_slice(&self.count.to_be_bytes());
        data.extend_from_slice(&[0; 4]);
        data.extend_from_slice(&self.directory_len_bytes.to_be_bytes());
        data.extend_from_slice(&self.directory_offset.0.to_be_bytes());
        Extension {
            kind: BITMAPS,
            data,
        }
    }
}
