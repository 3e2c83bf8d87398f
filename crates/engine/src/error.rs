//! The error of everything that is not a single request: opening, creating, resizing, closing.
//!
//! [`ImageError`] says what was being done and where; its source says why it failed. `{}` prints
//! the first alone, `{:#}` the whole chain on one line, which is what a user should be shown:
//! `cannot open backing file base.qcow2 of disk.qcow2: no such file or directory`. Requests on the
//! data path carry a plain [`Errno`] instead, which needs no memory.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

use gaur_block::{Errno, OpenError};
use gaur_format::{Error as FormatError, ErrorKind as FormatErrorKind};

/// What sort of failure an [`ImageError`] is, for programs that decide by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The host failed to read, write or flush.
    Io,
    /// The host has no space left.
    NoSpace,
    /// The image contradicts itself or its format.
    Corrupt,
    /// The image uses something this engine does not do.
    Unsupported,
    /// The image's format was not given, and its content shows one that this engine does not
    /// read.
    ForeignFormat,
    /// The image's format was not given, and to write to it that must be said.
    FormatNotTold,
    /// The caller asked for something that makes no sense.
    InvalidInput,
    /// Another program has the image open.
    Locked,
    /// A file does not exist.
    NotFound,
    /// The system does not permit opening a file.
    PermissionDenied,
    /// The image or its file is not open for writing.
    ReadOnly,
    /// An earlier failure left the image unwritable until it is opened again.
    Poisoned,
    /// The caller has cancelled it.
    Cancelled,
    /// The image's persistent bitmaps need more memory than they may have, and the caller has not agreed to lose
    /// them.
    HasBitmaps,
    /// An image names a file that it may not have opened ([`References`](crate::References)).
    ReferenceRefused,
}

impl ErrorKind {
    /// The error number that stands for this kind where no better one is known.
    pub const fn errno(self) -> Errno {
        match self {
            ErrorKind::Io | ErrorKind::Corrupt | ErrorKind::Poisoned => Errno::EIO,
            ErrorKind::NoSpace => Errno::ENOSPC,
            ErrorKind::Unsupported | ErrorKind::ForeignFormat | ErrorKind::HasBitmaps => {
                Errno::EOPNOTSUPP
            }
            ErrorKind::InvalidInput | ErrorKind::FormatNotTold => Errno::EINVAL,
            ErrorKind::Locked => Errno::EAGAIN,
            ErrorKind::NotFound => Errno::ENOENT,
            ErrorKind::PermissionDenied | ErrorKind::ReferenceRefused => Errno::EACCES,
            ErrorKind::ReadOnly => Errno::EROFS,
            ErrorKind::Cancelled => Errno::ECANCELED,
        }
    }

    /// The kind of a failed system call.
    pub fn of_errno(errno: Errno) -> ErrorKind {
        match errno {
            Errno::ENOSPC | Errno::EFBIG => ErrorKind::NoSpace,
            Errno::EROFS => ErrorKind::ReadOnly,
            Errno::EOPNOTSUPP => ErrorKind::Unsupported,
            Errno::EINVAL => ErrorKind::InvalidInput,
            Errno::ENOENT => ErrorKind::NotFound,
            Errno::EACCES | Errno::EPERM => ErrorKind::PermissionDenied,
            Errno::ECANCELED => ErrorKind::Cancelled,
            _ => ErrorKind::Io,
        }
    }
}

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    errno: Errno,
    context: String,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// Why an operation on an image failed. See the module for how it prints.
#[derive(Clone)]
pub struct ImageError(Box<Inner>);

impl ImageError {
    /// What sort of failure it is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The error number nearest to it.
    pub fn errno(&self) -> Errno {
        self.0.errno
    }

    fn build(
        kind: ErrorKind,
        errno: Errno,
        context: impl Into<String>,
        source: Option<Arc<dyn StdError + Send + Sync>>,
    ) -> ImageError {
        ImageError(Box::new(Inner {
            kind,
            errno,
            context: context.into(),
            source,
        }))
    }

    /// A failure that the engine itself found; `context` says all of it.
    pub(crate) fn new(kind: ErrorKind, context: impl Into<String>) -> ImageError {
        ImageError::build(kind, kind.errno(), context, None)
    }

    /// The host failed with `errno` while the engine did what `context` says.
    pub(crate) fn io(errno: Errno, context: impl Into<String>) -> ImageError {
        ImageError::build(
            ErrorKind::of_errno(errno),
            errno,
            context,
            Some(Arc::new(errno)),
        )
    }

    /// A file could not be opened; the caller adds which one.
    pub(crate) fn open(error: OpenError) -> ImageError {
        let kind = match error.errno {
            Errno::EAGAIN | Errno::EBUSY => ErrorKind::Locked,
            Errno::EXDEV => ErrorKind::ReferenceRefused,
            other => ErrorKind::of_errno(other),
        };
        ImageError::build(kind, error.errno, error.reason, None)
    }

    /// A structure of the image, or a request for a new one, is not what the format allows; the
    /// caller adds in which image.
    pub(crate) fn format(error: FormatError) -> ImageError {
        let kind = match error.kind() {
            FormatErrorKind::Unsupported | FormatErrorKind::TooLarge => ErrorKind::Unsupported,
            FormatErrorKind::NotQcow2 | FormatErrorKind::InvalidInput => ErrorKind::InvalidInput,
            _ => ErrorKind::Corrupt,
        };
        ImageError::new(kind, error.to_string())
    }

    /// A failure of some sort for a reason that has an error of its own.
    pub(crate) fn caused(
        kind: ErrorKind,
        cause: impl StdError + Send + Sync + 'static,
        context: impl Into<String>,
    ) -> ImageError {
        ImageError::build(kind, kind.errno(), context, Some(Arc::new(cause)))
    }

    /// A structure of the image cannot be right.
    pub(crate) fn corrupt(
        cause: impl StdError + Send + Sync + 'static,
        context: impl Into<String>,
    ) -> ImageError {
        ImageError::caused(ErrorKind::Corrupt, cause, context)
    }

    /// The same failure seen from further out: `context` comes first, `self` is its source.
    pub(crate) fn within(self, context: impl Into<String>) -> ImageError {
        ImageError::build(self.kind(), self.errno(), context, Some(Arc::new(self)))
    }
}

impl fmt::Display for ImageError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0.context)?;
        if out.alternate() {
            let mut source = StdError::source(self);
            while let Some(error) = source {
                write!(out, ": {error}")?;
                source = error.source();
            }
        }
        Ok(())
    }
}

impl fmt::Debug for ImageError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?}({:?}): {self:#}", self.0.kind, self.0.errno)
    }
}

impl StdError for ImageError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0
            .source
            .as_deref()
            .map(|source| source as &(dyn StdError + 'static))
    }
}

impl From<ImageError> for Errno {
    fn from(error: ImageError) -> Errno {
        error.errno()
    }
}

impl From<ImageError> for io::Error {
    fn from(error: ImageError) -> io::Error {
        let kind = match error.kind() {
            ErrorKind::NoSpace => io::ErrorKind::StorageFull,
            ErrorKind::InvalidInput => io::ErrorKind::InvalidInput,
            ErrorKind::ReadOnly => io::ErrorKind::ReadOnlyFilesystem,
            ErrorKind::Corrupt => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternate_prints_the_chain_on_one_line_and_plain_the_context_alone() {
        let missing = OpenError {
            errno: Errno::ENOENT,
            reason: "no such file or directory".into(),
        };
        let error = ImageError::open(missing).within("cannot open backing file base");
        let error = error.within("disk");
        assert_eq!(error.to_string(), "disk");
        assert_eq!(
            format!("{error:#}"),
            "disk: cannot open backing file base: no such file or directory"
        );
        assert_eq!(
            (error.kind(), error.errno()),
            (ErrorKind::NotFound, Errno::ENOENT)
        );
    }

    #[test]
    fn a_held_lock_is_told_from_an_input_output_error() {
        let held = OpenError {
            errno: Errno::EAGAIN,
            reason: "write lock is held".into(),
        };
        assert_eq!(ImageError::open(held).kind(), ErrorKind::Locked);
        assert_eq!(ImageError::io(Errno::EIO, "x").kind(), ErrorKind::Io);
        assert_eq!(
            ImageError::io(Errno::ENOSPC, "x").kind(),
            ErrorKind::NoSpace
        );
    }

    #[test]
    fn every_kind_has_an_error_number_that_maps_back_or_is_an_input_output_error() {
        for kind in [
            ErrorKind::NoSpace,
            ErrorKind::Unsupported,
            ErrorKind::InvalidInput,
            ErrorKind::NotFound,
            ErrorKind::PermissionDenied,
            ErrorKind::ReadOnly,
            ErrorKind::Cancelled,
        ] {
            assert_eq!(ErrorKind::of_errno(kind.errno()), kind);
        }
        assert_eq!(ErrorKind::Corrupt.errno(), Errno::EIO);
        assert_eq!(ErrorKind::Poisoned.errno(), Errno::EIO);
    }
}
