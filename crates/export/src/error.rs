//! Why a server could not start or did not end well.

use core::fmt;

use gaur_block::Errno;

/// One line that says what went wrong and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ServeError {
    message: String,
}

impl ServeError {
    pub(crate) fn new(message: impl Into<String>) -> ServeError {
        ServeError {
            message: message.into(),
        }
    }

    pub(crate) fn because(what: impl fmt::Display, errno: Errno) -> ServeError {
        ServeError {
            message: format!("{what}: {errno}"),
        }
    }
}

/// The number of a system's error, `EIO` where it has none.
#[cfg(any(
    feature = "fuse",
    feature = "ublk",
    feature = "vduse",
    feature = "vhost-user"
))]
pub(crate) fn errno_of(error: impl Into<std::io::Error>) -> Errno {
    Errno::from_raw(error.into().raw_os_error().unwrap_or(libc::EIO))
}
