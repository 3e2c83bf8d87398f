//! A folder of a test's own, gone afterwards unless the test failed.

use std::path::Path;

use tempfile::TempDir;

/// A folder with a short path (it holds Unix sockets), removed on drop unless the test panics.
#[derive(Debug)]
pub struct Scratch(TempDir);

impl Scratch {
    /// Makes a folder; `name` is for a developer who looks at what a failed test left.
    pub fn new(name: &str) -> Scratch {
        let prefix = format!("gaur-{name}-");
        let folder = tempfile::Builder::new().prefix(&prefix).tempdir();
        Scratch(folder.expect("the folder for temporary files is writable"))
    }

    /// The folder itself.
    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    /// The path of a file in it, as text, for command lines.
    pub fn path(&self, name: &str) -> String {
        self.folder()
            .join(name)
            .to_str()
            .expect("temporary folders have UTF-8 names")
            .to_owned()
    }

    /// A sparse file of that many zeros.
    pub fn zeros(&self, name: &str, len_bytes: u64) -> String {
        let path = self.path(name);
        let file = std::fs::File::create(&path).expect("scratch is writable");
        file.set_len(len_bytes).expect("scratch holds sparse files");
        path
    }

    /// A file with these bytes.
    pub fn file(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("scratch is writable");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.disable_cleanup(true);
            let folder = self.folder().display();
            eprintln!("what the test worked on is kept in {folder}");
        }
    }
}
