//! `--host`: whether a verb with threads of its own uses io_uring or blocking calls.

use crate::failure::Failure;
use crate::notice::say;

/// The ways to reach files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum HostKind {
    /// io_uring where it is allowed
    #[default]
    Auto,
    /// io_uring
    Uring,
    /// pread and pwrite
    Blocking,
}

impl HostKind {
    /// The same, but nothing else than io_uring if that is `required` and no choice was made.
    pub fn required_if(self, required: bool) -> HostKind {
        match self {
            HostKind::Auto if required => HostKind::Uring,
            kind => kind,
        }
    }

    /// Whether io_uring is used. Says so once when it would be, and is not allowed.
    pub fn choose(self) -> Result<HostKind, Failure> {
        let unavailable = match self {
            HostKind::Blocking => return Ok(HostKind::Blocking),
            _ => gaur_reactor::uring::available().err(),
        };
        match (unavailable, self) {
            (None, _) => Ok(HostKind::Uring),
            (Some(reason), HostKind::Uring) => Err(Failure::new(reason.to_string())),
            (Some(reason), _) => {
                say(format!(
                    "{reason}; using blocking calls instead, which is slower"
                ));
                Ok(HostKind::Blocking)
            }
        }
    }
}
