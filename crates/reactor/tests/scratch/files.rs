//! Files and devices that live as long as a test.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory of its own, removed at the end.
pub struct Scratch {
    path: PathBuf,
}

static NEXT: AtomicU32 = AtomicU32::new(0);

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
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("gaur-reactor-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a scratch directory can be made");
        Scratch { path }
    }

    /// The name of a file in it.
    pub fn file(&self, name: &str) -> String {
        self.path
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

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
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
