//! Corruption that is found while an image is in use: in which structure, where, and what is wrong.
//!
//! The metadata answers with a [`Fault`], which knows nothing of layers. [`Image::corrupt`] adds the layer,
//! keeps the first report, and stops writes if it concerns the layer that is written to.
//!
//! [`Image::corrupt`]: crate::Image::corrupt

use std::path::PathBuf;

use gaur_format::Corruption;
use thiserror::Error;

/// A structure of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Structure {
    /// An L1 table.
    #[error("l1 table")]
    L1Table,
    /// An L2 table.
    #[error("l2 table")]
    L2Table,
    /// The refcount table.
    #[error("refcount table")]
    RefcountTable,
    /// A refcount block.
    #[error("refcount block")]
    RefcountBlock,
    /// A cluster that the image maps guest data to.
    #[error("data cluster")]
    DataCluster,
    /// The table of a foreign image that says where its blocks are.
    #[error("block table")]
    BlockTable,
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Finding {
    /// An entry that the format does not allow.
    #[error("{0}")]
    Entry(Corruption),
    /// Guest data is mapped to a cluster that holds metadata.
    #[error("guest data is mapped to a cluster of metadata")]
    MapsMetadata,
    /// The cluster at this host offset holds metadata, and is counted as free.
    #[error("the cluster at offset {0} holds metadata and is counted as free")]
    MetadataIsFree(u64),
    /// The cluster at this host offset is in use, and no refcount block counts it.
    #[error("no refcount block counts the cluster at offset {0}, which is in use")]
    Uncounted(u64),
    /// An entry that a foreign format does not allow.
    #[error("{0}")]
    Foreign(gaur_foreign::Damage),
}

/// What is wrong in one file, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{structure} at offset {host}: {finding}")]
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

/// The first corruption that an open image was found to have. Prints as one line.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{}: {structure} at offset {host_offset}: {finding}", file.display())]
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
