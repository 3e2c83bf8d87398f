//! Directories for tests.

use tempfile::TempDir;

/// A directory that goes away with the value.
pub struct Scratch(TempDir);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let prefix = format!("gaur-format-{name}-");
        let directory = tempfile::Builder::new().prefix(&prefix).tempdir();
        Scratch(directory.unwrap())
    }

    pub fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().into()
    }
}
