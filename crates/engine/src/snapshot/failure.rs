//! Errors of a switch of the whole image.

use gaur_block::Errno;
use gaur_format::Corruption;

use super::deltas::DeltaError;
use crate::error::{ErrorKind, ImageError};

/// Why it failed. Nothing has changed but for clusters that are given back.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The host failed.
    Host(Errno),
    /// A table of the image cannot be right.
    Corrupt(Corruption),
    /// The references contradict the refcounts.
    Counts(DeltaError),
    /// A refcount would be negative: this cluster has more references than it counts.
    Negative(u64),
    /// A refcount would not fit in its width.
    TooLarge {
        /// Host cluster.
        cluster: u64,
        /// Bits of a refcount.
        bits: u32,
    },
    /// The refcount table grew meanwhile; from the start again.
    Again,
    /// Something else, with its own words.
    Said(ImageError),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure::Host(errno)
    }
}

impl From<Corruption> for Failure {
    fn from(corruption: Corruption) -> Failure {
        Failure::Corrupt(corruption)
    }
}

impl From<DeltaError> for Failure {
    fn from(error: DeltaError) -> Failure {
        Failure::Counts(error)
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Failure {
        Failure::Said(error)
    }
}

impl Failure {
    /// The error for the caller, who asked for what `doing` says.
    pub(crate) fn explain(self, doing: &str) -> ImageError {
        let corrupt = |text: String| {
            let text = format!("{doing}: {text}; check the image first");
            ImageError::new(ErrorKind::Corrupt, text)
        };
        match self {
            Failure::Host(errno) => ImageError::io(errno, doing),
            Failure::Corrupt(corruption) => ImageError::corrupt(corruption, doing),
            Failure::Counts(DeltaError::Uncounted(cluster)) => {
                corrupt(format!("no refcount block counts cluster {cluster}"))
            }
            Failure::Counts(DeltaError::TooMany(cluster)) => {
                corrupt(format!("cluster {cluster} has too many references"))
            }
            Failure::Negative(cluster) => {
                corrupt(format!("the refcount of cluster {cluster} is too low"))
            }
            Failure::TooLarge { cluster, bits } => {
                let text = format!(
                    "{doing}: cluster {cluster} would have more references than refcounts of {bits} \
                     bits can tell; an image with refcount_bits=16 takes more snapshots"
                );
                ImageError::new(ErrorKind::Unsupported, text)
            }
            Failure::Again => ImageError::io(Errno::EAGAIN, doing),
            Failure::Said(error) => error,
        }
    }
}
