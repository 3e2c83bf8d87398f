//! Options of a new image.

use alloc::string::String;
use alloc::vec::Vec;

use crate::allocation::AllocationPolicy;
use crate::error::{Error, ErrorKind};
use crate::geometry::{Geometry, Version};
use crate::header::CompressionType;
use crate::limit;

pub(super) const STRUCTURE: &str = "options";

/// What of the disk gets space when the image is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preallocation {
    /// Nothing: clusters come as they are written.
    #[default]
    Off,
    /// Every cluster has its place, the file may have holes there.
    Metadata,
    /// Like metadata, and the host reserves the space.
    Falloc,
    /// Like metadata, and the whole file is written.
    Full,
}

/// The LUKS header of a new image with its key slots, made by the caller: this crate knows no ciphers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LuksArea {
    /// Its start; the rest is zeros. Empty where only sizes are asked for.
    pub bytes: Vec<u8>,
    /// Length of header and all key slots in bytes.
    pub len_bytes: u64,
}

/// What a new image is to be. The default is an image of 0 bytes as QEMU makes it: version 3, 64 KiB
/// clusters, refcounts of 16 bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Version of the format.
    pub version: Version,
    /// Cluster size as a power of two, 9 to 21.
    pub cluster_bits: u32,
    /// 16-byte L2 entries with subclusters; needs 16 KiB clusters and version 3.
    pub extended_l2: bool,
    /// Refcount width as a power of two, 0 to 6; 4 with version 2.
    pub refcount_order: u32,
    /// Size of the virtual disk in bytes; rounded up to a multiple of 512.
    pub size_bytes: u64,
    /// Name of the backing file as it goes into the image: bytes that need not be text.
    pub backing_file: Option<Vec<u8>>,
    /// Format of the backing file, `"qcow2"` or `"raw"`; only with a backing file.
    pub backing_format: Option<String>,
    /// Name of the external data file as it goes into the image; needs version 3.
    pub data_file: Option<Vec<u8>>,
    /// The data file is the disk by itself: all of it is mapped. Not with a backing file.
    pub data_file_raw: bool,
    /// How compressed clusters will be compressed; other than deflate needs version 3.
    pub compression_type: CompressionType,
    /// Refcount updates may be postponed; needs version 3.
    pub lazy_refcounts: bool,
    /// Guest data is encrypted, and this is the header with the keys.
    pub luks: Option<LuksArea>,
    /// What gets space at once.
    pub preallocation: Preallocation,
    /// What is done with the host's space; `None` does not say, and costs no space in the header.
    pub allocation: Option<AllocationPolicy>,
}

impl Default for CreateOptions {
    fn default() -> CreateOptions {
        CreateOptions {
            version: Version::V3,
            cluster_bits: 16,
            extended_l2: false,
            refcount_order: 4,
            size_bytes: 0,
            backing_file: None,
            backing_format: None,
            data_file: None,
            data_file_raw: false,
            compression_type: CompressionType::Deflate,
            lazy_refcounts: false,
            luks: None,
            preallocation: Preallocation::Off,
            allocation: None,
        }
    }
}

pub(super) fn wrong(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidInput, STRUCTURE, what)
}

impl CreateOptions {
    /// The size of the disk as the image will have it.
    pub fn rounded_size_bytes(&self) -> Result<u64, Error> {
        self.size_bytes
            .checked_next_multiple_of(512)
            .ok_or_else(|| wrong("size is too large"))
    }

    /// Checks the options against each other; gives the geometry they make.
    pub(super) fn check(&self) -> Result<Geometry, Error> {
        let geometry = Geometry::new(
            self.version,
            self.cluster_bits,
            self.extended_l2,
            self.refcount_order,
        )
        .map_err(Error::into_invalid_input)?;
        let v2 = self.version == Version::V2;
        if v2 && self.compression_type != CompressionType::Deflate {
            return Err(wrong("compression type zstd needs version 3"));
        }
        if v2 && self.lazy_refcounts {
            return Err(wrong("lazy refcounts need version 3"));
        }
        if self.backing_format.is_some() && self.backing_file.is_none() {
            return Err(wrong("backing format without a backing file"));
        }
        if v2 && self.data_file.is_some() {
            return Err(wrong("an external data file needs version 3"));
        }
        if self.data_file.as_deref() == Some(b"") {
            return Err(wrong("the name of the external data file is empty"));
        }
        if self.data_file_raw && self.data_file.is_none() {
            return Err(wrong("data_file_raw without data_file"));
        }
        if self.data_file_raw && self.backing_file.is_some() {
            return Err(wrong("a raw external data file and a backing file"));
        }
        if self.luks.is_some() && self.data_file_raw {
            return Err(wrong("encryption and a raw external data file"));
        }
        let preallocated = self.is_mapped();
        if preallocated && self.backing_file.is_some() && !self.extended_l2 {
            return Err(wrong(
                "preallocation with a backing file needs extended l2 entries",
            ));
        }
        if preallocated && v2 && self.luks.is_some() {
            return Err(wrong("preallocation of an encrypted image needs version 3"));
        }
        let most = limit::L1_ENTRIES_MAX.saturating_mul(geometry.guest_bytes_per_l2());
        if self.rounded_size_bytes()? > most {
            return Err(
                wrong("size is too large for this cluster size, try a larger one")
                    .found(format_args!("{} bytes", self.size_bytes))
                    .allowed(alloc::format!("up to {most} bytes")),
            );
        }
        Ok(geometry.with_data_file(self.data_file.is_some()))
    }

    /// Length of the LUKS header with its key slots.
    pub(super) fn luks_bytes(&self) -> u64 {
        self.luks.as_ref().map_or(0, |luks| luks.len_bytes)
    }

    /// Whether every cluster gets its place at once.
    pub(super) fn is_mapped(&self) -> bool {
        self.data_file_raw || self.preallocation != Preallocation::Off
    }
}
