//! Errors of a switch of the whole image.

use gaur_block::Errno;
use gaur_format::Corruption;
use thiserror::Error;

use super::deltas::DeltaError;
use crate::error::{ErrorKind, ImageError};

/// Why it failed. Nothing has changed but for clusters that are given back.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// The host failed.
    #[error(transparent)]
    Host(#[from] Errno),
    /// A table of the image cannot be right.
    #[error(transparent)]
    Corrupt(#[from] Corruption),
    /// The references contradict the refcounts.
    #[error("{0}; check the image first")]
    Counts(#[from] DeltaError),
    /// A refcount would not fit in its width.
    #[error(
        "cluster {cluster} would have more references than refcounts of {bits} bits can tell; \
         an image with refcount_bits=16 takes more snapshots"
    )]
    TooLarge {
        /// Host cluster.
        cluster: u64,
        /// Bits of a refcount.
        bits: u32,
    },
    /// From the start again.
    #[error("the refcount table grew meanwhile")]
    Again,
    /// Something else, with its own words.
    #[error(transparent)]
    Said(#[from] ImageError),
}

impl Failure {
    /// The error for the caller, who asked for what `doing` says.
    pub(crate) fn explain(self, doing: &str) -> ImageError {
        let kind = match self {
            Failure::Host(errno) => return ImageError::io(errno, doing),
            Failure::Corrupt(corruption) => return ImageError::corrupt(corruption, doing),
            Failure::Again => return ImageError::io(Errno::EAGAIN, doing),
            Failure::Said(error) => return error,
            Failure::Counts(_) => ErrorKind::Corrupt,
            Failure::TooLarge { .. } => ErrorKind::Unsupported,
        };
        ImageError::new(kind, format!("{doing}: {self}"))
    }
}
