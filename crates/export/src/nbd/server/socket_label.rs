//! SELinux labels of listening sockets.

use gaur_block::Errno;

use crate::error::ServeError;

/// Of the calling thread; a label written here is that of the sockets it makes from then on. See `proc_pid_attr(5)`.
const SOCKET_LABEL: &str = "/proc/thread-self/attr/sockcreate";

/// While it lives, sockets of the calling thread get a label.
pub(super) struct SocketLabel<'l>(Option<&'l str>);

impl<'l> SocketLabel<'l> {
    /// Without a label nothing changes.
    pub(super) fn set(label: Option<&'l str>) -> Result<SocketLabel<'l>, ServeError> {
        if let Some(label) = label {
            std::fs::write(SOCKET_LABEL, label).map_err(|error| {
                let what = "cannot set SELinux socket create context to";
                let errno = Errno::from_raw(error.raw_os_error().unwrap_or_default());
                ServeError::because(format!("{what} {label}"), errno)
            })?;
        }
        Ok(SocketLabel(label))
    }
}

impl Drop for SocketLabel<'_> {
    fn drop(&mut self) {
        if self.0.is_some() {
            // An empty label is the usual one. It was possible to set one.
            let _ = std::fs::write(SOCKET_LABEL, "\n");
        }
    }
}
