//! Working folder of a guest run, `runs/*` in the cache, removed with the run. Each run holds a lock on its
//! folder, so that what a killed run has left can be told from what is in use.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use gaur_artifacts::{Cache, entries, failed, make_folder, remove};

/// The lock that keeps those apart who make folders of runs and remove what was left.
const LOCK: &str = "runs";

/// A run's folder.
#[derive(Debug)]
pub struct RunFolder {
    folder: PathBuf,
    cache: Cache,
    _lock: File,
}

impl RunFolder {
    /// A new folder. Removes what killed runs have left.
    pub fn make(cache: &Cache) -> Result<RunFolder, String> {
        let _others = cache.lock(LOCK)?;
        let runs = cache.folder().join("runs");
        make_folder(&runs)?;
        for entry in entries(&runs)? {
            if is_over(&entry) {
                remove(&entry)?;
            }
        }
        let mut number = 0;
        let folder = loop {
            let folder = runs.join(format!("{}-{number}", std::process::id()));
            match std::fs::create_dir(&folder) {
                Ok(()) => break folder,
                // Another thread's, or of a process with the same number on another machine.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(failed(&folder, &error)),
            }
        };
        let path = folder.join("lock");
        let lock = File::create(&path).map_err(|error| failed(&path, &error))?;
        lock.lock().map_err(|error| failed(&path, &error))?;
        Ok(RunFolder {
            folder,
            cache: cache.clone(),
            _lock: lock,
        })
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The folder itself.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Whether the lock of a folder is free. The lock of all must be held.
fn is_over(folder: &Path) -> bool {
    match File::open(folder.join("lock")) {
        Ok(lock) => lock.try_lock().is_ok(),
        Err(error) => error.kind() == ErrorKind::NotFound,
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        // Under the lock: another run would take the folder for a killed run's, half gone as it is.
        let others = self.cache.lock(LOCK);
        if let Err(message) = others.and_then(|_others| remove(&self.folder)) {
            eprintln!("vm: {message}");
        }
    }
}
