//! Corruption that is found while an image is in use: in which structure, where, and what is wrong.
//!
//! The metadata answers with a [`Fault`], which knows nothing of layers. [`Image::corrupt`] adds the layer,
//! keeps the first report, and stops writes if it concerns the layer that is written to.
//!
//! [`Image::corrupt`]: crate::Image::corrupt

use std::fmt;
use std::path::PathBuf;

use gaur_format::Corruption;

/// A structure of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Structure {
    /// An L1 table.
    L1Table,
    /// An L2 table.
    L2Table,
    /// The refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// A cluster that the image maps guest data to.
    DataCluster,
}

impl fmt::Display for Structure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Structure::L1Table => "l1 table",
            Structure::L2Table => "l2 table",
            Structure::RefcountTable => "refcount table",
            Structure::RefcountBlock => "refcount block",
            Structure::DataCluster => "data cluster",
        })
    }
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// An entry that the format does not allow.
    Entry(Corruption),
    /// Guest data is mapped to a cluster that holds metadata.
    MapsMetadata,
    /// The cluster at this host offset holds metadata, and is counted as free.
    MetadataIsFree(u64),
    /// The cluster at this host offset is in use, and no refcount block counts it.
    Uncounted(u64),
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Entry(entry) => write!(out, "{entry}"),
            Finding::MapsMetadata => out.write_str("guest data is mapped to a cluster of metadata"),
            Finding::MetadataIsFree(host) => write!(
                out,
                "the cluster at offset {host} holds metadata and is counted as free"
            ),
            Finding::Uncounted(host) => write!(
                out,
                "no refcount block counts the cluster at offset {host}, which is in use"
            ),
        }
    }
}

/// What is wrong in one file, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) structure: Structure,
    /// Host offset of what is wrong, in bytes.
    pub(crate) host: u64,
    pub(crate) finding: Finding,
}

impl Fault {
    /// Guest data is mapped to the cluster of metadata at `host`.
    pub(crate) fn maps_metadata(host: u64) -> Fault {
        Fault {
            structure: Structure::DataCluster,
            host,
            finding: Finding::MapsMetadata,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault {
            structure,
            host,
            finding,
        } = self;
        write!(out, "{structure} at offset {host}: {finding}")
    }
}

impl std::error::Error for Fault {}

/// The first corruption that an open image was found to have. Prints as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorruptionReport {
    /// Index of the layer in the backing chain, 0 for the top.
    pub layer: usize,
    /// The layer's file.
    pub file: PathBuf,
    /// The structure that is wrong.
    pub structure: Structure,
    /// Where in that file, in bytes.
    pub host_offset: u64,
    /// What is wrong there.
    pub finding: Finding,
}

impl fmt::Display for CorruptionReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fault = Fault {
            structure: self.structure,
            host: self.host_offset,
            finding: self.finding,
        };
        write!(out, "{}: {fault}", self.file.display())
    }
}

impl std::error::Error for CorruptionReport {}
