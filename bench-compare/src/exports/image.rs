//! The images that all contestants are measured on, made by QEMU.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::process;

/// The images of a run: those that are full of data are made on the host, and copied into the guest's
/// memory when they are needed first.
pub struct Images {
    /// The folder that the host shares.
    shared: PathBuf,
    /// Where contestants find them, in memory.
    dir: PathBuf,
    size_bytes: u64,
}

/// Makes the full images in a folder.
pub fn prepare(folder: &Path, size_mib: u64) -> Result<()> {
    let size_bytes = size_mib << 20;
    for raw in [false, true] {
        let path = folder.join(name("full", raw));
        let _ = std::fs::remove_file(&path);
        create(&path, raw, size_bytes)?;
        fill(&path, raw, size_bytes)?;
    }
    Ok(())
}

fn name(kind: &str, raw: bool) -> String {
    format!("{kind}.{}", if raw { "raw" } else { "qcow2" })
}

fn create(path: &Path, raw: bool, size_bytes: u64) -> Result<()> {
    if raw {
        std::fs::File::create(path)?.set_len(size_bytes)?;
        return Ok(());
    }
    let mut create = process::qemu_img(&["create", "-q", "-f", "qcow2"]);
    succeed(create.arg(path).arg(size_bytes.to_string()))
}

impl Images {
    /// The full images are in `shared`.
    pub fn new(shared: &Path, dir: &Path, size_mib: u64) -> Images {
        Images {
            shared: shared.to_owned(),
            dir: dir.to_owned(),
            size_bytes: size_mib << 20,
        }
    }

    /// Size of the disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The image a contestant works on: one that is full of data and stays, or an empty one made
    /// anew.
    pub fn ready(&self, kind: &str, raw: bool) -> Result<PathBuf> {
        let path = self.dir.join(name(kind, raw));
        if kind == "full" {
            if !path.exists() {
                std::fs::copy(self.shared.join(name(kind, raw)), &path)?;
            }
            return Ok(path);
        }
        let _ = std::fs::remove_file(&path);
        create(&path, raw, self.size_bytes)?;
        Ok(path)
    }
}

/// Fills an image with data in order.
fn fill(path: &Path, raw: bool, size_bytes: u64) -> Result<()> {
    const PIECE_BYTES: u64 = 512 << 20;
    let format = if raw { "raw" } else { "qcow2" };
    let mut command = Command::new("qemu-io");
    command.args(["-f", format, "-t", "writeback"]);
    let mut at = 0;
    while at < size_bytes {
        let len = PIECE_BYTES.min(size_bytes - at);
        command.arg("-c").arg(format!("write -q -P 90 {at} {len}"));
        at += len;
    }
    succeed(command.arg(path))
}

/// Runs a command that must go well, and soon: a device whose server hangs must not hold up the others.
pub fn succeed(command: &mut Command) -> Result<()> {
    let mut limited = Command::new("timeout");
    limited.args(["--signal=KILL", "60"]);
    limited.arg(command.get_program()).args(command.get_args());
    process::succeed(&mut limited).map(drop)
}
