//! What is wrong with a header, a key or a choice.

use std::fmt;

/// What sort of failure an [`Error`] is, for programs that decide by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The header contradicts itself or its format.
    Damaged,
    /// The header names something that is not done here.
    Unsupported,
    /// No key slot opens with the passphrase.
    WrongPassphrase,
    /// Trying a passphrase would take longer than is allowed.
    TooSlow,
    /// The caller asked for something that makes no sense.
    InvalidInput,
}

/// One line, with what was found and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    text: String,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Error {
        Error {
            kind,
            text: text.into(),
        }
    }

    pub(crate) fn damaged(text: impl Into<String>) -> Error {
        Error::new(ErrorKind::Damaged, text)
    }

    pub(crate) fn unsupported(text: impl Into<String>) -> Error {
        Error::new(ErrorKind::Unsupported, text)
    }

    /// What sort of failure it is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl std::error::Error for Error {}
