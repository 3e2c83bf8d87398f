//! Why an image cannot be read.

use alloc::string::String;

use thiserror::Error;

/// Why a header was refused. Says all of it but which file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// The image contradicts itself, its format or the length of its file.
    #[error("{0}")]
    Damaged(String),
    /// The image uses something that is not done here.
    #[error("{0}")]
    Unsupported(String),
}

impl Error {
    pub(crate) fn damaged(text: impl Into<String>) -> Error {
        Error::Damaged(text.into())
    }

    pub(crate) fn unsupported(text: impl Into<String>) -> Error {
        Error::Unsupported(text.into())
    }
}

/// What is wrong with an entry of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Damage {
    /// The block begins behind the end of the file.
    #[error("it leads to offset {0}, behind the end of the file")]
    BehindEnd(u64),
    /// The entry is none that the format knows.
    #[error("it is {0:#x}, which the format does not know")]
    Entry(u64),
    /// The compressed grain is not the one that belongs there, or cannot be decompressed.
    #[error("the compressed grain there is damaged")]
    Grain,
}
