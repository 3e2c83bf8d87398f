//! The header of an image: what cluster 0 holds.
//!
//! Layout: the fields (72 bytes in version 2, 104 or more in version 3), the header extensions, the
//! name of the backing file. [`Header::parse`] checks every field; [`Header::encode`] gives the same
//! bytes back, unknown fields and extensions included.
//!
//! Crash rule: fields that change while an image is in use are rewritten alone, within one sector;
//! [`field`] says where they are. All of them lie in the first 104 bytes, so any set of them may
//! also be changed by one write of the first sector.

use alloc::string::String;
use alloc::vec::Vec;

use crate::addr::HostOffset;
use crate::bytes;
use crate::error::{Error, ErrorKind};
use crate::extension::{self, BitmapsExtension, Extension, LuksPointer};
use crate::feature::{self, Autoclear, Compatible, FeatureSet, Incompatible};
use crate::geometry::{Geometry, Version};
use crate::limit;

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
    None,
    /// AES-CBC, the method of old images.
    Aes,
    /// LUKS.
    Luks,
}

impl CryptMethod {
    const fn code(self) -> u32 {
        match self {
            CryptMethod::None => 0,
            CryptMethod::Aes => 1,
            CryptMethod::Luks => 2,
        }
    }
}

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CompressionType {
    /// A raw deflate stream.
    #[default]
    Deflate,
    /// Zstandard frames.
    Zstd,
}

impl CompressionType {
    const fn code(self) -> u8 {
        match self {
            CompressionType::Deflate => 0,
            CompressionType::Zstd => 1,
        }
    }

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

/// A field as read, with where it is, to complain about.
struct Field<T> {
    at: u64,
    value: T,
}

impl<T: core::fmt::Display> Field<T> {
    fn wrong(&self, what: &'static str) -> Error {
        Error::new(ErrorKind::Malformed, STRUCTURE, what)
            .at(self.at)
            .found(&self.value)
    }

    fn too_large(&self, what: &'static str) -> Error {
        Error::new(ErrorKind::TooLarge, STRUCTURE, what)
            .at(self.at)
            .found(&self.value)
    }

    fn unsupported(&self, what: &'static str) -> Error {
        Error::new(ErrorKind::Unsupported, STRUCTURE, what)
            .at(self.at)
            .found(&self.value)
    }
}

fn truncated(bytes: &[u8], needed: u64) -> Error {
    Error::new(ErrorKind::Truncated, STRUCTURE, "ends too early")
        .found(format_args!("{} bytes", bytes.len()))
        .allowed(alloc::format!("{needed} bytes or more"))
}

fn u32_field(bytes: &[u8], at: u64) -> Result<Field<u32>, Error> {
    let value = bytes::u32_at(bytes, at as usize);
    value
        .map(|value| Field { at, value })
        .ok_or_else(|| truncated(bytes, at.saturating_add(4)))
}

fn u64_field(bytes: &[u8], at: u64) -> Result<Field<u64>, Error> {
    let value = bytes::u64_at(bytes, at as usize);
    value
        .map(|value| Field { at, value })
        .ok_or_else(|| truncated(bytes, at.saturating_add(8)))
}

fn parse_version(bytes: &[u8]) -> Result<Version, Error> {
    if !bytes.starts_with(&MAGIC) {
        return Err(Error::new(
            ErrorKind::NotQcow2,
            STRUCTURE,
            "not a qcow2 image, no magic",
        ));
    }
    let version = u32_field(bytes, field::VERSION)?;
    match version.value {
        2 => Ok(Version::V2),
        3 => Ok(Version::V3),
        _ => Err(version
            .unsupported("unsupported version")
            .allowed("2 and 3")),
    }
}

fn parse_cluster_bits(bytes: &[u8]) -> Result<u32, Error> {
    let bits = u32_field(bytes, field::CLUSTER_BITS)?;
    if !(limit::CLUSTER_BITS_MIN..=limit::CLUSTER_BITS_MAX).contains(&bits.value) {
        return Err(bits
            .unsupported("unsupported cluster_bits")
            .allowed("9 to 21"));
    }
    Ok(bits.value)
}

fn parse_crypt_method(bytes: &[u8]) -> Result<CryptMethod, Error> {
    let method = u32_field(bytes, field::CRYPT_METHOD)?;
    match method.value {
        0 => Ok(CryptMethod::None),
        1 => Ok(CryptMethod::Aes),
        2 => Ok(CryptMethod::Luks),
        _ => Err(method
            .unsupported("unsupported encryption method")
            .allowed("0 to 2")),
    }
}

/// The fields that only version 3 has.
struct V3Fields {
    incompatible: Incompatible,
    compatible: Compatible,
    autoclear: Autoclear,
    refcount_order: u32,
    compression_type: CompressionType,
    tail: Vec<u8>,
    length: u32,
}

impl V3Fields {
    const OF_V2: V3Fields = V3Fields {
        incompatible: Incompatible(0),
        compatible: Compatible(0),
        autoclear: Autoclear(0),
        refcount_order: limit::REFCOUNT_ORDER_V2,
        compression_type: CompressionType::Deflate,
        tail: Vec::new(),
        length: LENGTH_V2,
    };

    fn parse(bytes: &[u8], cluster_size: u64) -> Result<V3Fields, Error> {
        let length = u32_field(bytes, field::HEADER_LENGTH)?;
        if length.value < LENGTH_V3 || !length.value.is_multiple_of(8) {
            return Err(length
                .wrong("bad header length")
                .allowed("a multiple of 8 from 104 on"));
        }
        if u64::from(length.value) > cluster_size {
            return Err(length.wrong("header is longer than a cluster"));
        }
        let Some(all) = bytes.get(..length.value as usize) else {
            return Err(truncated(bytes, u64::from(length.value)));
        };
        let refcount_order = u32_field(bytes, field::REFCOUNT_ORDER)?;
        if refcount_order.value > limit::REFCOUNT_ORDER_MAX {
            return Err(refcount_order
                .unsupported("unsupported refcount_order")
                .allowed("0 to 6"));
        }
        let compression = all
            .get(field::COMPRESSION_TYPE as usize)
            .copied()
            .unwrap_or(0);
        let compression_type = match compression {
            0 => CompressionType::Deflate,
            1 => CompressionType::Zstd,
            value => {
                let at = field::COMPRESSION_TYPE;
                let found = Field { at, value };
                return Err(found
                    .unsupported("unsupported compression type")
                    .allowed("0 and 1"));
            }
        };
        Ok(V3Fields {
            incompatible: Incompatible(u64_field(bytes, field::INCOMPATIBLE)?.value),
            compatible: Compatible(u64_field(bytes, field::COMPATIBLE)?.value),
            autoclear: Autoclear(u64_field(bytes, field::AUTOCLEAR)?.value),
            refcount_order: refcount_order.value,
            compression_type,
            tail: all.get(TAIL as usize..).unwrap_or(&[]).to_vec(),
            length: length.value,
        })
    }
}

/// Where the backing file name lies in cluster 0.
fn parse_backing_place(bytes: &[u8], cluster_size: u64) -> Result<Option<(usize, usize)>, Error> {
    let offset = u64_field(bytes, field::BACKING_FILE_OFFSET)?;
    let size = u32_field(bytes, field::BACKING_FILE_SIZE)?;
    if offset.value == 0 {
        return Ok(None);
    }
    if offset.value > cluster_size {
        return Err(offset.wrong("backing file name lies outside of cluster 0"));
    }
    if size.value > limit::BACKING_NAME_BYTES_MAX {
        return Err(size
            .wrong("backing file name is too long")
            .allowed("up to 1023 bytes"));
    }
    if u64::from(size.value) > cluster_size.saturating_sub(offset.value) {
        return Err(size.wrong("backing file name does not end in cluster 0"));
    }
    Ok(Some((offset.value as usize, size.value as usize)))
}

fn parse_backing_name(bytes: &[u8], offset: usize, len: usize) -> Result<Option<Vec<u8>>, Error> {
    if len == 0 {
        return Ok(None);
    }
    let needed = (offset as u64).saturating_add(len as u64);
    let name = bytes::slice(bytes, offset, len).ok_or_else(|| truncated(bytes, needed))?;
    if name.contains(&0) {
        let found = Error::new(
            ErrorKind::Malformed,
            STRUCTURE,
            "backing file name has a nul byte",
        );
        return Err(found.at(offset as u64));
    }
    Ok(Some(name.to_vec()))
}

impl Header {
    /// The cluster size that the header in `bytes` names: how much [`Header::parse`] wants to see.
    /// 24 bytes are enough.
    pub fn cluster_size_of(bytes: &[u8]) -> Result<u64, Error> {
        parse_version(bytes)?;
        parse_cluster_bits(bytes).map(|bits| 1u64.wrapping_shl(bits))
    }

    /// Parses and checks the header in `bytes`: cluster 0, or the whole file if that is shorter.
    ///
    /// Unknown incompatible features are not an error here, so that they can be shown:
    /// [`Header::check_features`] refuses them and must be called before anything else is believed.
    pub fn parse(bytes: &[u8]) -> Result<Header, Error> {
        let version = parse_version(bytes)?;
        let cluster_bits = parse_cluster_bits(bytes)?;
        let cluster_size = 1u64.wrapping_shl(cluster_bits);
        let bytes = bytes.get(..cluster_size as usize).unwrap_or(bytes);
        if bytes.len() < LENGTH_V2 as usize {
            return Err(truncated(bytes, u64::from(LENGTH_V2)));
        }
        let v3 = match version {
            Version::V2 => V3Fields::OF_V2,
            Version::V3 => V3Fields::parse(bytes, cluster_size)?,
        };
        let backing = parse_backing_place(bytes, cluster_size)?;
        let extensions_end = backing.map_or(bytes.len(), |(offset, _)| offset);
        let list = bytes
            .get(v3.length as usize..extensions_end.min(bytes.len()))
            .unwrap_or(&[]);
        let extensions = extension::parse_list(list, u64::from(v3.length))?;
        let header = Header {
            version,
            cluster_bits,
            size_bytes: u64_field(bytes, field::SIZE)?.value,
            crypt_method: parse_crypt_method(bytes)?,
            l1_size: u32_field(bytes, field::L1_SIZE)?.value,
            l1_table_offset: HostOffset(u64_field(bytes, field::L1_TABLE_OFFSET)?.value),
            refcount_table_offset: HostOffset(
                u64_field(bytes, field::REFCOUNT_TABLE_OFFSET)?.value,
            ),
            refcount_table_clusters: u32_field(bytes, field::REFCOUNT_TABLE_CLUSTERS)?.value,
            nb_snapshots: u32_field(bytes, field::NB_SNAPSHOTS)?.value,
            snapshots_offset: HostOffset(u64_field(bytes, field::SNAPSHOTS_OFFSET)?.value),
            incompatible: v3.incompatible,
            compatible: v3.compatible,
            autoclear: v3.autoclear,
            refcount_order: v3.refcount_order,
            compression_type: v3.compression_type,
            tail: v3.tail,
            extensions,
            backing_file_name: match backing {
                Some((offset, len)) => parse_backing_name(bytes, offset, len)?,
                None => None,
            },
        };
        // What an unknown feature does to the other fields nobody can say: name it first.
        header
            .validate()
            .map_err(|error| header.check_features().err().unwrap_or(error))?;
        Ok(header)
    }

    /// Checks the fields against each other and the limits.
    fn validate(&self) -> Result<(), Error> {
        let geometry = Geometry::new(
            self.version,
            self.cluster_bits,
            self.incompatible.has(Incompatible::EXTENDED_L2),
            self.refcount_order,
        )?;
        self.validate_l1(&geometry)?;
        self.validate_refcount_table(&geometry)?;
        let snapshots = Field {
            at: field::NB_SNAPSHOTS,
            value: self.nb_snapshots,
        };
        if self.nb_snapshots > limit::SNAPSHOTS_MAX {
            return Err(snapshots
                .too_large("too many snapshots")
                .allowed("up to 65536"));
        }
        let offset = Field {
            at: field::SNAPSHOTS_OFFSET,
            value: self.snapshots_offset.0,
        };
        check_place(
            &offset,
            0,
            self.nb_snapshots > 0,
            &geometry,
            "bad snapshot table offset",
        )?;
        let zstd = self.compression_type != CompressionType::Deflate;
        if zstd != self.incompatible.has(Incompatible::COMPRESSION_TYPE) {
            let found = Field {
                at: field::COMPRESSION_TYPE,
                value: self.compression_type.code(),
            };
            return Err(found.wrong("compression type contradicts incompatible feature bit 3"));
        }
        self.validate_extensions(&geometry)
    }

    fn validate_l1(&self, geometry: &Geometry) -> Result<(), Error> {
        let size = Field {
            at: field::SIZE,
            value: self.size_bytes,
        };
        let needed = geometry.l1_entries_for(self.size_bytes);
        if needed > limit::L1_ENTRIES_MAX {
            return Err(size.too_large("virtual size is too large for this cluster size"));
        }
        let entries = Field {
            at: field::L1_SIZE,
            value: self.l1_size,
        };
        if u64::from(self.l1_size) > limit::L1_ENTRIES_MAX {
            let allowed = alloc::format!("up to {}", limit::L1_ENTRIES_MAX);
            return Err(entries.too_large("l1 table is too long").allowed(allowed));
        }
        if u64::from(self.l1_size) < needed {
            return Err(entries
                .wrong("l1 table is too short for the virtual size")
                .allowed(alloc::format!("{needed} entries or more")));
        }
        let offset = Field {
            at: field::L1_TABLE_OFFSET,
            value: self.l1_table_offset.0,
        };
        let len = u64::from(self.l1_size).saturating_mul(8);
        check_place(&offset, len, len > 0, geometry, "bad l1 table offset")
    }

    fn validate_refcount_table(&self, geometry: &Geometry) -> Result<(), Error> {
        let at = field::REFCOUNT_TABLE_CLUSTERS;
        let clusters = Field {
            at,
            value: self.refcount_table_clusters,
        };
        let len = u64::from(clusters.value).saturating_mul(geometry.cluster_size());
        if len == 0 {
            return Err(clusters.wrong("image has no refcount table"));
        }
        if len > limit::REFCOUNT_TABLE_BYTES_MAX {
            let most = limit::REFCOUNT_TABLE_BYTES_MAX.wrapping_shr(self.cluster_bits);
            let allowed = alloc::format!("up to {most}");
            return Err(clusters
                .too_large("refcount table is too long")
                .allowed(allowed));
        }
        let at = field::REFCOUNT_TABLE_OFFSET;
        let offset = Field {
            at,
            value: self.refcount_table_offset.0,
        };
        check_place(&offset, len, true, geometry, "bad refcount table offset")
    }

    fn validate_extensions(&self, geometry: &Geometry) -> Result<(), Error> {
        let luks = self.crypt_method == CryptMethod::Luks;
        match self.extension(extension::LUKS) {
            Some(_) if !luks => {
                let method = Field {
                    at: field::CRYPT_METHOD,
                    value: self.crypt_method.code(),
                };
                return Err(method.wrong("luks pointer without luks encryption"));
            }
            Some(data) => LuksPointer::parse(data, geometry).map(drop)?,
            None if luks => {
                let method = Field {
                    at: field::CRYPT_METHOD,
                    value: self.crypt_method.code(),
                };
                return Err(method.wrong("luks encryption without a luks pointer"));
            }
            None => {}
        }
        if let Some(data) = self.live_bitmaps() {
            BitmapsExtension::parse(data, geometry)?;
        }
        Ok(())
    }

    /// Data of the bitmaps extension, when its autoclear bit says that it means something.
    fn live_bitmaps(&self) -> Option<&[u8]> {
        let live = self.autoclear.has(Autoclear::BITMAPS);
        self.extension(extension::BITMAPS).filter(|_| live)
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
    /// bitmaps was here, so they are stale and their clusters are nobody's.
    pub fn bitmaps(&self) -> Option<BitmapsExtension> {
        BitmapsExtension::parse(self.live_bitmaps()?, &self.geometry()).ok()
    }

    /// Name of the external data file.
    pub fn data_file_name(&self) -> Option<&[u8]> {
        self.extension(extension::DATA_FILE)
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
        put(field::CRYPT_METHOD, &self.crypt_method.code().to_be_bytes());
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
            put(field::COMPRESSION_TYPE, &[self.compression_type.code()]);
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

/// Checks that a table of `len` bytes at `offset` is cluster aligned and below the end of host
/// offsets, and, when it is `needed`, not in cluster 0.
fn check_place(
    offset: &Field<u64>,
    len: u64,
    needed: bool,
    geometry: &Geometry,
    what: &'static str,
) -> Result<(), Error> {
    if !geometry.is_aligned(HostOffset(offset.value)) {
        return Err(offset.wrong(what).allowed("a multiple of the cluster size"));
    }
    if offset
        .value
        .checked_add(len)
        .is_none_or(|end| end > limit::HOST_END)
    {
        return Err(offset.wrong(what).allowed("an end below 2^56"));
    }
    if needed && offset.value == 0 {
        return Err(offset
            .wrong(what)
            .allowed("not cluster 0, which is the header"));
    }
    Ok(())
}
