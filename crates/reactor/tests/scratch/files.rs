//! Files and devices that live as long as a test.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// A directory of its own, removed at the end.
pub struct Scratch(TempDir);

impl Scratch {
    /// On the file system that the build uses: a disk, most likely.
    pub fn on_disk() -> Scratch {
        Scratch::in_directory(Path::new(env!("CARGO_TARGET_TMPDIR")))
    }

    /// On tmpfs.
    pub fn in_memory() -> Scratch {
        Scratch::in_directory(Path::new("/dev/shm"))
    }

    fn in_directory(parent: &Path) -> Scratch {
        let directory = tempfile::Builder::new()
            .prefix("gaur-reactor-")
            .tempdir_in(parent);
        Scratch(directory.expect("a scratch directory can be made"))
    }

    /// The name of a file in it.
    pub fn file(&self, name: &str) -> String {
        self.0
            .path()
            .join(name)
            .to_str()
            .expect("the path is text")
            .to_owned()
    }

    /// A file with this content.
    pub fn file_with(&self, name: &str, content: &[u8]) -> String {
        let name = self.file(name);
        std::fs::write(&name, content).expect("a scratch file can be written");
        name
    }
}

/// A loop device over a scratch file, detached at the end.
pub struct LoopDevice {
    pub path: String,
}

impl LoopDevice {
    /// With sectors of `sector_bytes` over the file `backing`; `None` where loop devices cannot be
    /// made (no privilege, no module), which the caller says aloud.
    pub fn attach(backing: &str, sector_bytes: u32) -> Option<LoopDevice> {
        let sector = sector_bytes.to_string();
        let output = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector, backing])
            .output()
            .ok()?;
        if !output.status.success() {
            eprintln!(
                "no loop device: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
            return None;
        }
        let path = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        Some(LoopDevice { path })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .args(["--detach", &self.path])
            .status();
    }
}
