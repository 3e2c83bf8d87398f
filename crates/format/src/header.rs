//! The image header in cluster 0.
//!
//! Layout: the fields (72 bytes in version 2, 104 or more in version 3), the header extensions, the
//! name of the backing file. [`Header::parse`] checks every field; [`Header::encode`] gives the same
//! bytes back, unknown fields and extensions included.
//!
//! Crash rule: fields that change while an image is in use are rewritten alone, within one sector;
//! [`field`] says where they are. All of them lie in the first 104 bytes, so any set of them may
//! also be changed by one write of the first sector.

mod change;
mod parse;
#[cfg(test)]
mod tests;
mod validate;

use alloc::string::String;
use alloc::vec::Vec;

use crate::addr::HostOffset;
use crate::allocation::AllocationPolicy;
use crate::bytes;
use crate::error::{Error, ErrorKind};
use crate::extension::{self, BitmapsExtension, Extension, LuksPointer};
use crate::feature::{self, Autoclear, Compatible, FeatureSet, Incompatible};
use crate::geometry::{Geometry, Version};
use crate::limit;

pub use change::HeaderChange;

/// Offsets of header fields in bytes; [`field::SIZE`] and others may be rewritten alone.
pub mod field {
    /// The first four bytes, [`super::MAGIC`].
    pub const MAGIC: u64 = 0;
    /// u32.
    pub const VERSION: u64 = 4;
    /// u64.
    pub const BACKING_FILE_OFFSET: u64 = 8;
    /// u32.
    pub const BACKING_FILE_SIZE: u64 = 16;
    /// u32.
    pub const CLUSTER_BITS: u64 = 20;
    /// Size of the virtual disk in bytes, u64.
    pub const SIZE: u64 = 24;
    /// u32.
    pub const CRYPT_METHOD: u64 = 32;
    /// Entries of the active L1 table, u32.
    pub const L1_SIZE: u64 = 36;
    /// u64, right after the L1 size: both change in one write of 12 bytes.
    pub const L1_TABLE_OFFSET: u64 = 40;
    /// u64.
    pub const REFCOUNT_TABLE_OFFSET: u64 = 48;
    /// u32, right after the offset: both change in one write of 12 bytes.
    pub const REFCOUNT_TABLE_CLUSTERS: u64 = 56;
    /// u32.
    pub const NB_SNAPSHOTS: u64 = 60;
    /// u64, right after the number: both change in one write of 12 bytes.
    pub const SNAPSHOTS_OFFSET: u64 = 64;
    /// u64, version 3 and later.
    pub const INCOMPATIBLE: u64 = 72;
    /// u64, version 3 and later.
    pub const COMPATIBLE: u64 = 80;
    /// u64, version 3 and later.
    pub const AUTOCLEAR: u64 = 88;
    /// u32, version 3 and later.
    pub const REFCOUNT_ORDER: u64 = 96;
    /// u32, version 3 and later.
    pub const HEADER_LENGTH: u64 = 100;
    /// u8, when the header is longer than 104 bytes.
    pub const COMPRESSION_TYPE: u64 = 104;
}

/// The first four bytes of an image.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";

/// Length of a version 2 header.
const LENGTH_V2: u32 = 72;
/// Shortest version 3 header.
const LENGTH_V3: u32 = 104;
/// First byte after the fields this crate knows.
const TAIL: u32 = 105;

const STRUCTURE: &str = "header";

/// How guest data is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CryptMethod {
    /// Not at all.
    None = 0,
    /// AES-CBC, the method of old images.
    Aes = 1,
    /// LUKS.
    Luks = 2,
}

impl CryptMethod {
    /// The name in options and reports; `none` for no encryption.
    pub const fn name(self) -> &'static str {
        match self {
            CryptMethod::None => "none",
            CryptMethod::Aes => "aes",
            CryptMethod::Luks => "luks",
        }
    }
}

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CompressionType {
    /// A raw deflate stream.
    #[default]
    Deflate = 0,
    /// Zstandard frames.
    Zstd = 1,
}

impl CompressionType {
    /// The name used for it on command lines: `zlib` or `zstd`.
    pub const fn name(self) -> &'static str {
        match self {
            CompressionType::Deflate => "zlib",
            CompressionType::Zstd => "zstd",
        }
    }
}

/// The header of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Version of the format.
    pub version: Version,
    /// Cluster size as a power of two.
    pub cluster_bits: u32,
    /// Size of the virtual disk in bytes. QEMU rounds it down to a multiple of 512.
    pub size_bytes: u64,
    /// How guest data is encrypted.
    pub crypt_method: CryptMethod,
    /// Entries of the active L1 table; at least what the size needs.
    pub l1_size: u32,
    /// Where the active L1 table starts; 0 only without entries.
    pub l1_table_offset: HostOffset,
    /// Where the refcount table starts.
    pub refcount_table_offset: HostOffset,
    /// Length of the refcount table in clusters, at least 1.
    pub refcount_table_clusters: u32,
    /// Number of internal snapshots.
    pub nb_snapshots: u32,
    /// Where the snapshot table starts.
    pub snapshots_offset: HostOffset,
    /// Features that change what the image means; none in version 2.
    pub incompatible: Incompatible,
    /// Features a reader may ignore; none in version 2.
    pub compatible: Compatible,
    /// Features a writer clears unless it keeps them; none in version 2.
    pub autoclear: Autoclear,
    /// Refcount width as a power of two, 4 in version 2.
    pub refcount_order: u32,
    /// How compressed clusters are compressed.
    pub compression_type: CompressionType,
    /// The header's bytes from 105 on, padding included; empty for a header of 104 bytes.
    pub tail: Vec<u8>,
    /// Header extensions in the order found, without the end.
    pub extensions: Vec<Extension>,
    /// Name of the backing file as bytes; see [`Header::backing_file`].
    pub backing_file_name: Option<Vec<u8>>,
}

impl Header {
    /// Data of the bitmaps extension, when its autoclear bit says that it means something.
    fn live_bitmaps(&self) -> Option<&[u8]> {
        let live = self.autoclear.has(Autoclear::BITMAPS);
        self.extension(extension::BITMAPS).filter(|_| live)
    }

    /// The extensions, each with where it begins in cluster 0, and [`None`] with where the list ends.
    pub fn extension_places(&self) -> impl Iterator<Item = (u64, Option<&Extension>)> {
        let mut at = u64::from(self.header_length());
        let list = self.extensions.iter().map(Some).chain([None]);
        list.map(move |extension| {
            let place = at;
            let padded = extension.map_or(0, |one| one.data.len().next_multiple_of(8));
            at = at.saturating_add(padded as u64).saturating_add(8);
            (place, extension)
        })
    }

    /// Where the extension of a type begins in cluster 0, with the type itself.
    pub fn extension_at(&self, kind: u32) -> Option<u64> {
        let mut places = self.extension_places();
        let found = places.find(|(_, extension)| extension.is_some_and(|one| one.kind == kind));
        found.map(|(at, _)| at)
    }

    /// Data of the extension of a type.
    pub fn extension(&self, kind: u32) -> Option<&[u8]> {
        let found = self
            .extensions
            .iter()
            .find(|extension| extension.kind == kind);
        found.map(|extension| extension.data.as_slice())
    }

    /// Refuses unknown incompatible features, by the names the image itself gives them.
    pub fn check_features(&self) -> Result<(), Error> {
        let unknown = self.incompatible.unknown();
        if unknown == 0 {
            return Ok(());
        }
        let table = self.extension(extension::FEATURE_NAMES);
        let names = feature::describe(unknown, FeatureSet::Incompatible, table);
        let what = "image uses features that are not supported";
        Err(Error::new(ErrorKind::Unsupported, STRUCTURE, what)
            .at(field::INCOMPATIBLE)
            .found(names))
    }

    /// The sizes that follow from the header. A header made by hand with an illegal combination
    /// gives the geometry of 64 KiB clusters; [`Header::encode`] refuses it.
    pub fn geometry(&self) -> Geometry {
        let extended = self.incompatible.has(Incompatible::EXTENDED_L2);
        Geometry::new(
            self.version,
            self.cluster_bits,
            extended,
            self.refcount_order,
        )
        .unwrap_or(Geometry::FALLBACK)
        .with_data_file(self.incompatible.has(Incompatible::DATA_FILE))
    }

    /// Length of the header without extensions in bytes.
    pub fn header_length(&self) -> u32 {
        match self.version {
            Version::V2 => LENGTH_V2,
            Version::V3 => {
                let tail = u32::try_from(self.tail.len()).unwrap_or(u32::MAX);
                if tail == 0 && self.compression_type == CompressionType::Deflate {
                    LENGTH_V3
                } else {
                    tail.saturating_add(TAIL)
                        .checked_next_multiple_of(8)
                        .unwrap_or(u32::MAX)
                }
            }
        }
    }

    /// Name of the backing file, as the image has it: bytes, never empty, without NUL.
    pub fn backing_file(&self) -> Option<&[u8]> {
        self.backing_file_name.as_deref()
    }

    /// Name of the backing file as text; bytes that are not UTF-8 show as U+FFFD.
    pub fn backing_file_lossy(&self) -> Option<alloc::borrow::Cow<'_, str>> {
        self.backing_file().map(String::from_utf8_lossy)
    }

    /// Format of the backing file, when the image says one and it is text.
    pub fn backing_format(&self) -> Option<&str> {
        self.extension(extension::BACKING_FORMAT)
            .and_then(|data| core::str::from_utf8(data).ok())
    }

    /// Where the LUKS header is.
    pub fn encryption(&self) -> Option<LuksPointer> {
        let data = self.extension(extension::LUKS)?;
        LuksPointer::parse(data, &self.geometry()).ok()
    }

    /// Where the bitmap directory is. `None` also when the autoclear bit is clear: a writer without
    /// bitmaps was here, so they are stale and their clusters no longer belong to them.
    pub fn bitmaps(&self) -> Option<BitmapsExtension> {
        BitmapsExtension::parse(self.live_bitmaps()?, &self.geometry()).ok()
    }

    /// Name of the external data file.
    pub fn data_file_name(&self) -> Option<&[u8]> {
        self.extension(extension::DATA_FILE)
    }

    /// What is to be done with the host's space, when the image says so.
    pub fn allocation(&self) -> Option<AllocationPolicy> {
        AllocationPolicy::parse(self.extension(extension::ALLOCATION)?)
    }

    /// The start of cluster 0: fields, extensions and backing file name. Fails when a field is not
    /// legal or all of it does not fit in the cluster.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        self.validate()?;
        let length = self.header_length();
        let mut out = alloc::vec![0; length as usize];
        self.put_fields(&mut out);
        extension::encode_list(&self.extensions, &mut out)?;
        if let Some(name) = self.backing_file() {
            self.put_backing_file(name, &mut out)?;
        }
        if out.len() as u64 > 1u64.wrapping_shl(self.cluster_bits) {
            let what = "header, extensions and backing file name do not fit in a cluster";
            return Err(Error::new(ErrorKind::TooLarge, STRUCTURE, what)
                .found(format_args!("{} bytes", out.len()))
                .allowed(alloc::format!(
                    "{} bytes",
                    1u64.wrapping_shl(self.cluster_bits)
                )));
        }
        Ok(out)
    }

    fn put_fields(&self, out: &mut [u8]) {
        let mut put = |at: u64, value: &[u8]| bytes::put(out, at as usize, value);
        put(field::MAGIC, &MAGIC);
        put(field::VERSION, &self.version.number().to_be_bytes());
        put(field::CLUSTER_BITS, &self.cluster_bits.to_be_bytes());
        put(field::SIZE, &self.size_bytes.to_be_bytes());
        put(
            field::CRYPT_METHOD,
            &(self.crypt_method as u32).to_be_bytes(),
        );
        put(field::L1_SIZE, &self.l1_size.to_be_bytes());
        put(
            field::L1_TABLE_OFFSET,
            &self.l1_table_offset.0.to_be_bytes(),
        );
        put(
            field::REFCOUNT_TABLE_OFFSET,
            &self.refcount_table_offset.0.to_be_bytes(),
        );
        put(
            field::REFCOUNT_TABLE_CLUSTERS,
            &self.refcount_table_clusters.to_be_bytes(),
        );
        put(field::NB_SNAPSHOTS, &self.nb_snapshots.to_be_bytes());
        put(
            field::SNAPSHOTS_OFFSET,
            &self.snapshots_offset.0.to_be_bytes(),
        );
        if self.version == Version::V3 {
            put(field::INCOMPATIBLE, &self.incompatible.0.to_be_bytes());
            put(field::COMPATIBLE, &self.compatible.0.to_be_bytes());
            put(field::AUTOCLEAR, &self.autoclear.0.to_be_bytes());
            put(field::REFCOUNT_ORDER, &self.refcount_order.to_be_bytes());
            put(field::HEADER_LENGTH, &self.header_length().to_be_bytes());
            put(field::COMPRESSION_TYPE, &[self.compression_type as u8]);
            put(u64::from(TAIL), &self.tail);
        }
    }

    fn put_backing_file(&self, name: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
        let wrong = |what| Error::new(ErrorKind::InvalidInput, STRUCTURE, what);
        if name.contains(&0) {
            return Err(wrong("backing file name has a nul byte"));
        }
        let len = u32::try_from(name.len()).unwrap_or(u32::MAX);
        if len == 0 || len > limit::BACKING_NAME_BYTES_MAX {
            return Err(wrong("bad length of the backing file name")
                .found(format_args!("{} bytes", name.len()))
                .allowed("1 to 1023 bytes"));
        }
        let offset = out.len() as u64;
        bytes::put(
            out,
            field::BACKING_FILE_OFFSET as usize,
            &offset.to_be_bytes(),
        );
        bytes::put(out, field::BACKING_FILE_SIZE as usize, &len.to_be_bytes());
        out.extend_from_slice(name);
        Ok(())
    }
}
