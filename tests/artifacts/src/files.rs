//! Files and folders, with errors that name them.

use std::path::{Path, PathBuf};

/// What is in a folder, sorted.
///
/// # Errors
/// Those of the file system.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|error| failed(folder, &error))? {
        found.push(entry.map_err(|error| failed(folder, &error))?.path());
    }
    found.sort();
    Ok(found)
}

/// Makes a folder and those above it.
///
/// # Errors
/// Those of the file system.
pub fn make_folder(folder: &Path) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, &error))
}

/// Removes a folder with all that is in it, or finds it gone.
///
/// # Errors
/// Those of the file system.
pub fn remove(folder: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed(folder, &error)),
        _ => Ok(()),
    }
}

/// An error about a path, in a line.
pub fn failed(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Writes a file.
///
/// # Errors
/// Those of the file system.
pub fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| failed(path, &error))
}
