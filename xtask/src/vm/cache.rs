//! Where built kernels are kept, and the folders of runs.
//!
//! Layout: `kernels/NAME/linux`, complete or not there, because a folder gets its name only when all
//! is in it; `apt`, the package index; `building-*` and `runs/*`, gone after use. A lock keeps
//! builders apart; each run holds a lock on its folder, so that what a killed run left can be told
//! from what is in use.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

static RUNS: AtomicU32 = AtomicU32::new(0);

/// The cache's folder.
#[derive(Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The folder that `GAUR_VM_CACHE` names, otherwise one in the user's cache.
    pub fn open() -> Result<Cache, String> {
        let named = std::env::var_os("GAUR_VM_CACHE").map(PathBuf::from);
        let of_user = || {
            let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
            let base =
                base.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
            base.map(|base| base.join("gaur/vm"))
        };
        let folder = named
            .or_else(of_user)
            .ok_or("no home folder: set GAUR_VM_CACHE to a folder for the kernel")?;
        make_folder(&folder.join("kernels"))?;
        make_folder(&folder.join("runs"))?;
        let folder = fs::canonicalize(&folder).map_err(|error| failed(&folder, &error))?;
        Ok(Cache { folder })
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Waits until nobody else builds; the lock ends with the file.
    pub fn lock(&self) -> Result<File, String> {
        let path = self.path("lock");
        let file = File::create(&path).map_err(|error| failed(&path, &error))?;
        file.lock().map_err(|error| failed(&path, &error))?;
        Ok(file)
    }

    /// Removes what builds that were killed have left. The lock must be held.
    pub fn clear_builds(&self) -> Result<(), String> {
        for entry in entries(&self.folder)? {
            let name = entry.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with("building-") {
                remove(&entry)?;
            }
        }
        Ok(())
    }

    /// A new folder for a run.
    pub fn run_folder(&self) -> Result<RunFolder, String> {
        let runs = self.path("runs");
        for entry in entries(&runs)? {
            clear_run(&entry)?;
        }
        let number = RUNS.fetch_add(1, Ordering::Relaxed);
        let folder = runs.join(format!("{}-{number}", std::process::id()));
        make_folder(&folder)?;
        let path = folder.join("lock");
        let lock = File::create(&path).map_err(|error| failed(&path, &error))?;
        lock.lock().map_err(|error| failed(&path, &error))?;
        Ok(RunFolder { folder, lock })
    }
}

/// Removes a run's folder if the run is over. One that is just being made has no lock yet.
fn clear_run(folder: &Path) -> Result<(), String> {
    let Ok(lock) = File::open(folder.join("lock")) else {
        return Ok(());
    };
    match lock.try_lock() {
        Ok(()) => remove(folder),
        Err(_) => Ok(()),
    }
}

/// The folder of a run, gone with the value.
#[derive(Debug)]
pub struct RunFolder {
    folder: PathBuf,
    lock: File,
}

impl RunFolder {
    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The folder itself.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if let Err(message) = remove(&self.folder) {
            eprintln!("vm: {message}");
        }
        // The folder's name is free only after that.
        let _ = self.lock.unlock();
    }
}

/// What is in a folder.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| failed(folder, &error))? {
        found.push(entry.map_err(|error| failed(folder, &error))?.path());
    }
    found.sort();
    Ok(found)
}

/// Makes a folder and those above it.
pub fn make_folder(folder: &Path) -> Result<(), String> {
    fs::create_dir_all(folder).map_err(|error| failed(folder, &error))
}

/// Removes a folder with all that is in it, or finds it gone.
pub fn remove(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed(folder, &error)),
        _ => Ok(()),
    }
}

/// Writes a file.
pub fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| failed(path, &error))
}

/// An error about a path, in a line.
pub fn failed(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}
