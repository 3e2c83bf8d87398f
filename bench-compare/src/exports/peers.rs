//! Peers that no package of the system has.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Where peers are installed.
const ROOT: &str = "target/peers";

/// The rublk binary: the one given, or one that cargo installs. Building it needs libclang.
pub fn rublk(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let path = Path::new(ROOT).join("bin/rublk");
    if path.exists() {
        return Ok(path);
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["install", "--locked", "rublk", "--root", ROOT])
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("rublk cannot be installed (its build needs the package libclang-dev)");
    }
    Ok(path)
}
