//! Default path of a server's socket: in a directory that only this user can enter.

use std::fs::{DirBuilder, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use gaur_reactor::SOCKET_PATH_MAX;

use crate::failure::Failure;

/// A path for the socket of the image `stem`; its directory is there and private.
pub fn choose(stem: &str) -> Result<PathBuf, Failure> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let user = rustix::process::geteuid().as_raw();
    choose_in(runtime.as_deref(), Path::new("/tmp"), user, stem)
}

fn choose_in(
    runtime: Option<&Path>,
    fallback: &Path,
    user: u32,
    stem: &str,
) -> Result<PathBuf, Failure> {
    let usable = |path: &&Path| path.is_absolute() && path.is_dir();
    let directory = match runtime.filter(usable) {
        Some(runtime) => runtime.join("gaur"),
        None => fallback.join(format!("gaur-{user}")),
    };
    make_private(&directory, user)?;
    let process = std::process::id();
    let path = directory.join(format!("{}-{process}.sock", file_name(stem)));
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        let path = directory.join(format!("{process}.sock"));
        if path.as_os_str().len() > SOCKET_PATH_MAX {
            let message = "the path of a socket in it would be too long";
            return Err(Failure::about(&directory, message).hint("choose another with -k"));
        }
        return Ok(path);
    }
    Ok(path)
}

/// A short file name without surprises for shells and URIs.
fn file_name(stem: &str) -> String {
    let plain = |letter: char| match letter {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' | '-' => letter,
        _ => '_',
    };
    stem.chars().take(40).map(plain).collect()
}

/// Makes the directory, or checks that the one that is there belongs to the user and no other user
/// can look into it. Another user could have put it there.
fn make_private(directory: &Path, user: u32) -> Result<(), Failure> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => {
            return Err(Failure::io(directory, &error).hint("choose a path for the socket with -k"));
        }
    }
    let facts: Metadata = directory
        .symlink_metadata()
        .map_err(|error| Failure::io(directory, &error))?;
    let private = facts.permissions().mode() & 0o077 == 0;
    if facts.is_dir() && facts.uid() == user && private {
        return Ok(());
    }
    let message = "is not a directory of this user alone, so no socket is put there";
    Err(Failure::about(directory, message).hint("choose a path with -k"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;

    fn user() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    #[test]
    fn the_runtime_directory_comes_first_and_the_socket_is_private() {
        let base = tempfile::tempdir().expect("a directory");
        let path = choose_in(Some(base.path()), base.path(), user(), "my disk").expect("a path");
        assert!(path.starts_with(base.path().join("gaur")));
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .expect("a name");
        assert!(name.starts_with("my_disk-"), "{name}");
        let mode = base
            .path()
            .join("gaur")
            .metadata()
            .expect("there")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o700);
        // The second server of the user finds the directory there.
        assert!(choose_in(Some(base.path()), base.path(), user(), "other").is_ok());
    }

    #[test]
    fn without_a_runtime_directory_the_user_has_one_of_its_own() {
        let base = tempfile::tempdir().expect("a directory");
        let missing = base.path().join("missing");
        let path = choose_in(Some(&missing), base.path(), user(), "disk").expect("a path");
        assert!(path.starts_with(base.path().join(format!("gaur-{}", user()))));
    }

    #[test]
    fn a_directory_that_others_can_enter_or_that_is_a_link_is_refused() {
        let base = tempfile::tempdir().expect("a directory");
        let open = base.path().join("gaur");
        std::fs::create_dir(&open).expect("made");
        std::fs::set_permissions(&open, Permissions::from_mode(0o755)).expect("changed");
        assert!(choose_in(Some(base.path()), base.path(), user(), "disk").is_err());

        let link = base.path().join(format!("gaur-{}", user()));
        let private = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink(private.path(), link).expect("linked");
        assert!(choose_in(None, base.path(), user(), "disk").is_err());
    }

    #[test]
    fn long_names_still_fit_a_socket_address() {
        let base = tempfile::tempdir().expect("a directory");
        let deep = base.path().join("d".repeat(60));
        std::fs::create_dir(&deep).expect("made");
        let path = choose_in(Some(&deep), base.path(), user(), &"x".repeat(300)).expect("a path");
        assert!(path.as_os_str().len() <= SOCKET_PATH_MAX);
        let deeper = base.path().join("d".repeat(120));
        std::fs::create_dir(&deeper).expect("made");
        assert!(choose_in(Some(&deeper), base.path(), user(), "x").is_err());
    }
}
