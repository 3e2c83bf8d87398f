//! Directories for tests.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that goes away with the value.
pub struct Scratch(PathBuf);

static NEXT: AtomicU32 = AtomicU32::new(0);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let id = std::process::id();
        let path = std::env::temp_dir().join(format!("gaur-format-{name}-{id}-{number}"));
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().into()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
