//! Header parsing: cluster 0 to a [`Header`].

use alloc::vec::Vec;

use super::{CompressionType, CryptMethod, Header, MAGIC, STRUCTURE, field};
use super::{LENGTH_V2, LENGTH_V3, TAIL};
use crate::addr::HostOffset;
use crate::bytes;
use crate::error::{Error, ErrorKind};
use crate::extension;
use crate::feature::{Autoclear, Compatible, Incompatible};
use crate::geometry::Version;
use crate::limit;

/// A field as read, with where it is, to complain about.
pub(super) struct Field<T> {
    pub(super) at: u64,
    pub(super) value: T,
}

impl<T: core::fmt::Display> Field<T> {
    pub(super) fn new(at: u64, value: T) -> Field<T> {
        Field { at, value }
    }

    fn error(&self, kind: ErrorKind, what: &'static str) -> Error {
        Error::new(kind, STRUCTURE, what)
            .at(self.at)
            .found(&self.value)
    }

    pub(super) fn wrong(&self, what: &'static str) -> Error {
        self.error(ErrorKind::Malformed, what)
    }

    pub(super) fn too_large(&self, what: &'static str) -> Error {
        self.error(ErrorKind::TooLarge, what)
    }

    pub(super) fn unsupported(&self, what: &'static str) -> Error {
        self.error(ErrorKind::Unsupported, what)
    }
}

fn truncated(bytes: &[u8], needed: u64) -> Error {
    let what = "the image ends in it, it is damaged or was truncated";
    Error::new(ErrorKind::Truncated, STRUCTURE, what)
        .found(format_args!("{} bytes", bytes.len()))
        .allowed(alloc::format!("{needed} bytes or more"))
}

fn u32_field(bytes: &[u8], at: u64) -> Result<Field<u32>, Error> {
    let value = bytes::u32_at(bytes, at as usize);
    value
        .map(|value| Field::new(at, value))
        .ok_or_else(|| truncated(bytes, at.saturating_add(4)))
}

fn u64_field(bytes: &[u8], at: u64) -> Result<Field<u64>, Error> {
    let value = bytes::u64_at(bytes, at as usize);
    value
        .map(|value| Field::new(at, value))
        .ok_or_else(|| truncated(bytes, at.saturating_add(8)))
}

fn parse_version(bytes: &[u8]) -> Result<Version, Error> {
    if !bytes.starts_with(&MAGIC) {
        return Err(Error::new(
            ErrorKind::NotQcow2,
            STRUCTURE,
            "not a qcow2 image, it does not begin like one",
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

impl Header {
    /// The fields that only version 3 has; returns the length of the header.
    fn parse_v3(&mut self, bytes: &[u8], cluster_size: u64) -> Result<u32, Error> {
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
        self.compression_type = match compression {
            0 => CompressionType::Deflate,
            1 => CompressionType::Zstd,
            value => {
                let at = field::COMPRESSION_TYPE;
                let found = Field::new(at, value);
                return Err(found
                    .unsupported("unsupported compression type")
                    .allowed("0 and 1"));
            }
        };
        self.incompatible = Incompatible(u64_field(bytes, field::INCOMPATIBLE)?.value);
        self.compatible = Compatible(u64_field(bytes, field::COMPATIBLE)?.value);
        self.autoclear = Autoclear(u64_field(bytes, field::AUTOCLEAR)?.value);
        self.refcount_order = refcount_order.value;
        self.tail = all.get(TAIL as usize..).unwrap_or(&[]).to_vec();
        Ok(length.value)
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
        let mut header = Header {
            version,
            cluster_bits,
            size_bytes: u64_field(bytes, field::SIZE)?.value,
            crypt_method: CryptMethod::None,
            l1_size: u32_field(bytes, field::L1_SIZE)?.value,
            l1_table_offset: HostOffset(u64_field(bytes, field::L1_TABLE_OFFSET)?.value),
            refcount_table_offset: HostOffset(
                u64_field(bytes, field::REFCOUNT_TABLE_OFFSET)?.value,
            ),
            refcount_table_clusters: u32_field(bytes, field::REFCOUNT_TABLE_CLUSTERS)?.value,
            nb_snapshots: u32_field(bytes, field::NB_SNAPSHOTS)?.value,
            snapshots_offset: HostOffset(u64_field(bytes, field::SNAPSHOTS_OFFSET)?.value),
            incompatible: Incompatible(0),
            compatible: Compatible(0),
            autoclear: Autoclear(0),
            refcount_order: limit::REFCOUNT_ORDER_V2,
            compression_type: CompressionType::Deflate,
            tail: Vec::new(),
            extensions: Vec::new(),
            backing_file_name: None,
        };
        let length = match version {
            Version::V2 => LENGTH_V2,
            Version::V3 => header.parse_v3(bytes, cluster_size)?,
        };
        let backing = parse_backing_place(bytes, cluster_size)?;
        let extensions_end = backing.map_or(bytes.len(), |(offset, _)| offset);
        let list = bytes
            .get(length as usize..extensions_end.min(bytes.len()))
            .unwrap_or(&[]);
        header.extensions = extension::parse_list(list, u64::from(length))?;
        header.crypt_method = parse_crypt_method(bytes)?;
        if let Some((offset, len)) = backing {
            header.backing_file_name = parse_backing_name(bytes, offset, len)?;
        }
        // An unknown feature may change the meaning of the other fields: name it first.
        header
            .validate()
            .map_err(|error| header.check_features().err().unwrap_or(error))?;
        Ok(header)
    }
}
