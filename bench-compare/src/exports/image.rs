//! The images that everybody is measured on, made by QEMU.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The images of a run, in a folder in memory.
pub struct Images {
    dir: PathBuf,
    size_bytes: u64,
}

impl Images {
    /// Makes what `full` needs.
    pub fn new(dir: &Path, size_mib: u64) -> Result<Images> {
        Ok(Images {
            dir: dir.to_owned(),
            size_bytes: size_mib << 20,
        })
    }

    /// Size of the disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The image a contestant works on: one that is full of data and stays, or an empty one made
    /// anew. Memory for one at a time is enough.
    pub fn ready(&self, kind: &str, raw: bool) -> Result<PathBuf> {
        let path = self
            .dir
            .join(format!("{kind}.{}", if raw { "raw" } else { "qcow2" }));
        if kind == "full" && path.exists() {
            return Ok(path);
        }
        self.clear()?;
        if raw {
            let file = std::fs::File::create(&path)?;
            file.set_len(self.size_bytes)?;
        } else {
            let size = self.size_bytes.to_string();
            let path = path.to_str().context("a path of odd characters")?;
            qemu_img(&["create", "-q", "-f", "qcow2", path, &size])?;
        }
        if kind == "full" {
            fill(&path, raw, self.size_bytes)?;
        }
        Ok(path)
    }

    fn clear(&self) -> Result<()> {
        for entry in std::fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if matches!(
                path.extension().and_then(|e| e.to_str()),
                Some("raw" | "qcow2")
            ) {
                std::fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

/// Fills an image with data in order.
fn fill(path: &Path, raw: bool, size_bytes: u64) -> Result<()> {
    let format = if raw { "raw" } else { "qcow2" };
    let write = format!("write -q -P 90 0 {size_bytes}");
    let piece = 512_u64 << 20;
    let mut command = Command::new("qemu-io");
    command.args(["-f", format, "-t", "writeback"]);
    if size_bytes <= piece {
        command.arg("-c").arg(write);
    } else {
        let mut at = 0;
        while at < size_bytes {
            let len = piece.min(size_bytes - at);
            command.arg("-c").arg(format!("write -q -P 90 {at} {len}"));
            at += len;
        }
    }
    succeed(command.arg(path))
}

fn qemu_img(arguments: &[&str]) -> Result<()> {
    succeed(Command::new("qemu-img").args(arguments))
}

/// Runs a command that must go well, and soon.
pub fn succeed(command: &mut Command) -> Result<()> {
    let mut limited = Command::new("timeout");
    limited
        .args(["--signal=KILL", "60"])
        .arg(command.get_program());
    limited.args(command.get_args());
    let command = &mut limited;
    let output = command
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        bail!("{command:?}: {text}");
    }
    Ok(())
}
