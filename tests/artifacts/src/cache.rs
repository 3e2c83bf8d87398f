//! The cache, and the lock under which an artifact is made.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::files::{failed, make_folder, remove};

/// Longest wait for another process that makes the same artifact.
const PATIENCE: Duration = Duration::from_secs(3600);
/// Between two looks at a lock that another process holds.
const PAUSE: Duration = Duration::from_millis(100);

/// The cache's folder.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The folder that `GAUR_CACHE` names, otherwise `gaur` in the user's cache.
    ///
    /// # Errors
    /// When there is no home folder, or the cache cannot be written to.
    pub fn open() -> Result<Cache, String> {
        let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let base = || {
            let of_user = named("XDG_CACHE_HOME").map(PathBuf::from);
            of_user.or_else(|| Some(PathBuf::from(named("HOME")?).join(".cache")))
        };
        let folder = match named("GAUR_CACHE") {
            Some(folder) => PathBuf::from(folder),
            None => base()
                .ok_or("no home folder: set GAUR_CACHE to a folder for what is built once")?
                .join("gaur"),
        };
        Cache::at(&folder)
    }

    /// A cache in this folder, made if it is not there.
    ///
    /// # Errors
    /// When it cannot be written to.
    pub fn at(folder: &Path) -> Result<Cache, String> {
        for name in ["making", "locks"] {
            make_folder(&folder.join(name))?;
        }
        let folder = std::fs::canonicalize(folder).map_err(|error| failed(folder, &error))?;
        Ok(Cache { folder })
    }

    /// The folder itself.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The artifact of this name; `make` makes it, a file or a folder, at the path that it is given,
    /// unless it is there.
    ///
    /// # Errors
    /// Those of `make`, and those of the file system.
    pub fn get(
        &self,
        name: &str,
        make: impl FnOnce(&Path) -> Result<(), String>,
    ) -> Result<PathBuf, String> {
        let finished = self.folder.join(name);
        if finished.exists() {
            return Ok(finished);
        }
        let workshop = self.lock(name)?;
        if finished.exists() {
            return Ok(finished);
        }
        let new = workshop.folder().join("new");
        make(&new)?;
        workshop.publish(&new, name)
    }

    /// Waits until no other process holds the lock of this name.
    ///
    /// # Errors
    /// When another process holds it for an hour, and those of the file system.
    pub fn lock(&self, name: &str) -> Result<BuildLock, String> {
        let path = self.folder.join("locks").join(name);
        let lock = File::create(&path).map_err(|error| failed(&path, &error))?;
        let start = Instant::now();
        let mut told = false;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::Error(error)) => return Err(failed(&path, &error)),
                Err(TryLockError::WouldBlock) => {}
            }
            if start.elapsed() > PATIENCE {
                let minutes = PATIENCE.as_secs() / 60;
                return Err(format!(
                    "{name}: another process has been making it for {minutes} minutes"
                ));
            }
            // What is over in a moment is not worth a line.
            if !told && start.elapsed() > 20 * PAUSE {
                eprintln!("{name}: waiting for another process that makes it");
                told = true;
            }
            std::thread::sleep(PAUSE);
        }
        // What a holder that was killed has left.
        let folder = self.folder.join("making").join(name);
        remove(&folder)?;
        make_folder(&folder)?;
        Ok(BuildLock {
            folder,
            finished: self.folder.clone(),
            _lock: lock,
        })
    }
}

/// A lock that is held, and an empty folder for its holder. Dropped, both are gone.
#[derive(Debug)]
pub struct BuildLock {
    folder: PathBuf,
    finished: PathBuf,
    _lock: File,
}

impl BuildLock {
    /// The folder, on the file system of the cache.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Gives a file or folder, made below [`BuildLock::folder`], its name in the cache.
    ///
    /// # Errors
    /// Those of the file system; when it was not made.
    pub fn publish(&self, made: &Path, name: &str) -> Result<PathBuf, String> {
        let finished = self.finished.join(name);
        std::fs::rename(made, &finished).map_err(|error| failed(made, &error))?;
        Ok(finished)
    }
}

impl Drop for BuildLock {
    fn drop(&mut self) {
        // Before the lock is released, which is a field.
        if let Err(message) = remove(&self.folder) {
            eprintln!("{message}");
        }
    }
}
