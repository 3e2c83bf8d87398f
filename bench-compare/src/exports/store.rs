//! Where the images are in the guest.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::image::succeed;

/// What is below the images. All of it is the guest's memory, so no disk is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Store {
    /// XFS on a loop device: page cache, direct requests and extents as on a disk
    Xfs,
    /// tmpfs, where io_uring has every request done by a worker thread
    Memory,
}

impl Store {
    /// As in a report.
    pub fn words(self) -> &'static str {
        match self {
            Store::Xfs => "XFS (a loop device in memory)",
            Store::Memory => "tmpfs",
        }
    }
}

/// A folder for images below `dir`, which is in memory.
pub fn folder(store: Store, dir: &Path, size_mib: u64) -> Result<PathBuf> {
    let folder = dir.join("images");
    std::fs::create_dir_all(&folder)?;
    if store == Store::Memory {
        return Ok(folder);
    }
    // Two full images, an empty one that fills, and what XFS needs.
    let device = dir.join("device");
    std::fs::File::create(&device)?.set_len((size_mib * 4 + 1024) << 20)?;
    succeed(Command::new("mkfs.xfs").arg("-q").arg(&device))?;
    succeed(
        Command::new("mount")
            .args(["-o", "loop"])
            .args([&device, &folder]),
    )?;
    // Dirty pages stay where they are for the time of a measurement: memory behind a loop device is no
    // disk to be measured.
    for (name, value) in [
        ("dirty_ratio", "80"),
        ("dirty_background_ratio", "70"),
        ("dirty_expire_centisecs", "360000"),
        ("dirty_writeback_centisecs", "0"),
    ] {
        std::fs::write(format!("/proc/sys/vm/{name}"), value)?;
    }
    Ok(folder)
}
