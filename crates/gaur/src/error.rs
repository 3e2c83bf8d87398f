//! The one error of this crate. `{}` says all of it, the cause included, on one line.

use std::{fmt, io};

use gaur_block::{Errno, OpenError};
use gaur_engine::{ErrorKind, ImageError};

/// Why something could not be done. Programs decide by [`Error::kind`], people read what `{}` prints:
/// `disk.qcow2: cannot open "base.qcow2", backing file of "disk.qcow2": no such file or directory`.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    errno: Errno,
    text: String,
}

/// What functions of this crate return.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(kind: ErrorKind, text: impl Into<String>) -> Error {
        Error {
            kind,
            errno: kind.errno(),
            text: text.into(),
        }
    }

    /// What sort of failure it is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The error number nearest to it, for a guest.
    pub fn errno(&self) -> Errno {
        self.errno
    }

    /// The same failure, with what was being done in front.
    pub(crate) fn context(mut self, doing: impl fmt::Display) -> Error {
        self.text = format!("{doing}: {}", self.text);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?}({:?}): {}", self.kind, self.errno, self.text)
    }
}

/// It has no source: its text is that of the whole chain.
impl std::error::Error for Error {}

impl From<ImageError> for Error {
    fn from(error: ImageError) -> Error {
        Error {
            kind: error.kind(),
            errno: error.errno(),
            text: format!("{error:#}"),
        }
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Error {
        Error {
            kind: ErrorKind::of_errno(errno),
            errno,
            text: errno.to_string(),
        }
    }
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Error {
        let kind = match error.errno {
            Errno::EAGAIN | Errno::EBUSY => ErrorKind::Locked,
            errno => ErrorKind::of_errno(errno),
        };
        Error {
            kind,
            errno: error.errno,
            text: error.reason,
        }
    }
}

impl From<io::Error> for Error {
    /// An error of this crate that went through a stream comes out as it was.
    fn from(error: io::Error) -> Error {
        let inner = error.get_ref();
        if let Some(own) = inner.and_then(|inner| inner.downcast_ref::<Error>()) {
            return own.clone();
        }
        if let Some(image) = inner.and_then(|inner| inner.downcast_ref::<ImageError>()) {
            return image.clone().into();
        }
        let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        Error {
            text: error.to_string(),
            ..Error::from(errno)
        }
    }
}

impl From<Error> for Errno {
    fn from(error: Error) -> Errno {
        error.errno
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        let kind = io::Error::from_raw_os_error(error.errno.raw()).kind();
        io::Error::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_prints_its_cause() {
        let error = Error::from(Errno::ENOSPC).context("cannot write");
        assert_eq!(error.to_string(), "cannot write: no space left on device");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
    }

    #[test]
    fn error_survives_the_way_through_a_stream() {
        let error = Error::from(Errno::EROFS).context("cannot write");
        let through = io::Error::from(error.clone());
        assert_eq!(through.kind(), io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(Error::from(through), error);
        assert_eq!(Errno::from(error), Errno::EROFS);
    }

    #[test]
    fn held_lock_is_told_from_an_input_output_error() {
        let held = OpenError {
            errno: Errno::EAGAIN,
            reason: "write lock is held".to_owned(),
        };
        assert_eq!(Error::from(held).kind(), ErrorKind::Locked);
        let plain = Error::from(io::Error::other("torn"));
        assert_eq!((plain.kind(), plain.errno()), (ErrorKind::Io, Errno::EIO));
        assert_eq!(plain.to_string(), "torn");
    }
}
