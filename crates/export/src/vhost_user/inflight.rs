//! Memory for the log of requests in flight, which a client keeps when its server is killed.
//!
//! It may be a file. Then the client, which is handed the open file, holds a lock on it until it ends or
//! has no more use for it, whatever becomes of the server: locks of this kind (`flock`) belong to what
//! was opened, not to a process. So the next server can tell whether the client is there yet.

use std::fs::{File, TryLockError};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{MemfdFlags, memfd_create};

/// New memory, in the file at `path` if there can be one.
pub(super) fn memory(len: usize, path: Option<&Path>) -> Result<OwnedFd, String> {
    let refuse =
        |error: std::io::Error| format!("cannot make a log of requests in flight: {error}");
    let named = path.and_then(|path| named(path).ok());
    let file = match named {
        Some(file) => file,
        None => memfd_create("gaur-inflight", MemfdFlags::CLOEXEC)
            .map_err(|errno| refuse(errno.into()))?
            .into(),
    };
    file.set_len(len as u64).map_err(refuse)?;
    Ok(file.into())
}

/// Whether a client lives that was given the file at `path` by a server that has ended.
pub fn is_held(path: &Path) -> bool {
    let Ok(file) = File::options().read(true).open(path) else {
        return false;
    };
    matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

fn named(path: &Path) -> std::io::Result<File> {
    // The client before may hold that one, for all it likes.
    let _ = std::fs::remove_file(path);
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    let file = options.open(path)?;
    file.lock_shared()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inflight_file_is_locked_while_a_client_has_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("inflight");
        assert!(!is_held(&path), "nobody has made it");
        let server = memory(4096, Some(&path)).expect("a file");
        let client = server.try_clone().expect("the same open file");
        drop(server);
        assert!(is_held(&path));
        let next = memory(4096, Some(&path)).expect("another file");
        drop(client);
        assert!(is_held(&path), "the next one has");
        drop(next);
        assert!(!is_held(&path));
    }

    #[test]
    fn memory_needs_no_file() {
        let missing = Path::new("/nonexistent/folder/inflight");
        assert!(memory(64, Some(missing)).is_ok());
        assert!(memory(64, None).is_ok());
    }
}
