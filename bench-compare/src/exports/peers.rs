//! Peers that no package of the system has.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, anyhow};
use gaur_artifacts::Cache;

use crate::prerequisites;

/// The name in the cache of what cargo installs.
const RUBLK: &str = "rublk";
/// The program in it.
const PROGRAM: &str = "bin/rublk";
/// Programs of the system that are measured, or that make and load the devices of others.
const PROGRAMS: [&str; 9] = [
    "fio",
    "mkfs.xfs",
    "nbd-client",
    "qemu-img",
    "qemu-io",
    "qemu-nbd",
    "qemu-storage-daemon",
    "taskset",
    "vdpa",
];

/// Looks whether all peers are there or can be made, before anything is built.
pub fn check(rublk: Option<&Path>) -> Result<()> {
    let cache = cache()?;
    let is_there = rublk.is_some() || cache.folder().join(RUBLK).join(PROGRAM).exists();
    let lacking = match is_there {
        true => None,
        false => prerequisites::lacking_libclang(),
    };
    prerequisites::check_with(&PROGRAMS, lacking)
}

/// The rublk binary: the one given, or one that cargo installs, once.
pub fn rublk(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let install = |root: &Path| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut install = Command::new(cargo);
        install.args(["install", "--locked", "rublk", "--root"]);
        let status = install.arg(root).status();
        let status = status.map_err(|error| format!("cannot start cargo: {error}"))?;
        match status.success() {
            true => Ok(()),
            false => Err(format!("rublk cannot be installed: {status}")),
        }
    };
    let folder = cache()?.get(RUBLK, install);
    Ok(folder.map_err(|message| anyhow!(message))?.join(PROGRAM))
}

fn cache() -> Result<Cache> {
    Cache::open().map_err(|message| anyhow!(message))
}
