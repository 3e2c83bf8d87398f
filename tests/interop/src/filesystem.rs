//! File systems on block devices: made, mounted, checked.

use crate::scratch::Scratch;
use crate::tool::{Run, run_for};

/// Seconds that a command on a file system may take.
const LIMIT_SECONDS: u32 = 200;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// ext4.
    Ext4,
    /// XFS.
    Xfs,
    /// btrfs.
    Btrfs,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
            Kind::Btrfs => "btrfs",
        }
    }

    /// Makes one on a device.
    #[track_caller]
    pub fn make(self, device: &str) {
        match self {
            Kind::Ext4 => tool("mkfs.ext4", &["-q", "-F", device]),
            Kind::Xfs => tool("mkfs.xfs", &["-q", "-f", device]),
            Kind::Btrfs => tool("mkfs.btrfs", &["-q", "-f", device]),
        }
        .ok();
    }

    /// Checks one that is not mounted; it must be without a fault.
    #[track_caller]
    pub fn check(self, device: &str) {
        match self {
            Kind::Ext4 => tool("e2fsck", &["-fn", device]),
            Kind::Xfs => tool("xfs_repair", &["-n", device]),
            Kind::Btrfs => tool("btrfs", &["check", "-q", device]),
        }
        .ok();
    }

    /// Mounts a device on a new folder of the scratch folder.
    #[track_caller]
    pub fn mount(self, device: &str, scratch: &Scratch) -> Mounted {
        self.mount_with(device, scratch, "rw")
    }

    /// Mounts a file, by way of a loop device.
    #[track_caller]
    pub fn mount_file(self, file: &str, scratch: &Scratch) -> Mounted {
        self.mount_with(file, scratch, "loop")
    }

    /// Mounts a device that cannot be written to, not even to replay a log.
    #[track_caller]
    pub fn mount_read_only(self, device: &str, scratch: &Scratch) -> Mounted {
        self.mount_with(device, scratch, "ro")
    }

    #[track_caller]
    fn mount_with(self, device: &str, scratch: &Scratch, options: &str) -> Mounted {
        let folder = scratch.path("mounted");
        std::fs::create_dir_all(&folder).expect("scratch is writable");
        tool(
            "mount",
            &["-t", self.name(), "-o", options, device, &folder],
        )
        .ok();
        Mounted {
            folder,
            is_mounted: true,
        }
    }
}

fn tool(program: &str, arguments: &[&str]) -> Run {
    run_for(program, arguments, LIMIT_SECONDS)
}

/// A mounted file system; unmounted on drop, at the latest.
#[derive(Debug)]
pub struct Mounted {
    folder: String,
    is_mounted: bool,
}

impl Mounted {
    /// Where it is mounted.
    pub fn folder(&self) -> &str {
        &self.folder
    }

    /// Runs lines of a shell in it, which must succeed.
    #[track_caller]
    pub fn shell(&self, script: &str, arguments: &[&str]) -> Run {
        let script = format!("set -eu -o pipefail\ncd \"$0\"\n{script}");
        let mut line = vec!["-c", &script, &self.folder];
        line.extend(arguments);
        tool("bash", &line).ok()
    }

    /// Unmounts it.
    #[track_caller]
    pub fn unmount(mut self) {
        self.is_mounted = false;
        tool("umount", &[&self.folder]).ok();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.is_mounted {
            let run = tool("umount", &["-l", &self.folder]);
            if run.code != 0 {
                eprintln!("{run}");
            }
        }
    }
}
