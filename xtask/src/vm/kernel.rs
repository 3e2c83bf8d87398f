//! The guest's kernel: found in the cache, or built into it.
//!
//! A kernel's folder is named after the source package and a hash of the configuration, and appears
//! with a rename, after the kernel has booted once. So what is there is whole and works, whatever
//! happened to the build before it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::ci::succeed;
use crate::vm::cache::{Cache, entries, failed, make_folder, write};
use crate::vm::guest::{Guest, Output};
use crate::vm::source::{Index, Package, numbers};

/// On top of `make allnoconfig`.
const CONFIGURATION: &str = include_str!("kernel.config");
/// Grows when the way of building changes.
const RECIPE: &str = "1";
/// What a new kernel has to show before it counts.
const TRIAL: &str =
    "test -c /dev/ublk-control && test -b /dev/nbd0 && test -c /dev/vduse/control &&
    test -c /dev/fuse && grep -qw xfs /proc/filesystems && mountpoint -q /scratch";

/// The kernel to boot: the one that `GAUR_VM_KERNEL` names, or the cache's, built now if it is not
/// there yet.
pub fn find(cache: &Cache) -> Result<PathBuf, String> {
    if let Some(kernel) = std::env::var_os("GAUR_VM_KERNEL") {
        let kernel = PathBuf::from(kernel);
        return match kernel.is_file() {
            true => Ok(kernel),
            false => Err(format!(
                "GAUR_VM_KERNEL: {}: no such file",
                kernel.display()
            )),
        };
    }
    match newest(cache)? {
        Some(kernel) => Ok(kernel),
        None => prepare(cache, false),
    }
}

/// Sees to it that there is a kernel, for whoever runs tests with it later.
pub fn prepare_once() -> Result<(), String> {
    let kernel = find(&Cache::open()?)?;
    println!("kernel: {}", kernel.display());
    Ok(())
}

/// Builds the kernel if the cache has none of this configuration; if `update`, also if the suite has
/// a newer source.
pub fn prepare(cache: &Cache, update: bool) -> Result<PathBuf, String> {
    let _lock = cache.lock()?;
    if let Some(kernel) = newest(cache)?.filter(|_| !update) {
        return Ok(kernel);
    }
    let index = Index::fetch(cache)?;
    let package = index.newest()?;
    let complete = cache.path("kernels").join(folder_name(&package));
    if complete.exists() {
        return Ok(complete.join("linux"));
    }
    cache.clear_builds()?;
    let building = cache.path(&format!("building-{}", std::process::id()));
    make_folder(&building)?;
    let start = Instant::now();
    let built = build(cache, &index, &package, &building)?;
    std::fs::rename(&built, &complete).map_err(|error| failed(&complete, &error))?;
    cache.clear_builds()?;
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    println!("{} built in {minutes:.1} minutes", complete.display());
    Ok(complete.join("linux"))
}

/// The newest kernel in the cache that has this configuration.
fn newest(cache: &Cache) -> Result<Option<PathBuf>, String> {
    let ending = format!("-{}", fingerprint());
    let mut found = entries(&cache.path("kernels"))?;
    found.retain(|path| path.to_string_lossy().ends_with(&ending));
    let newest = found.into_iter().max_by_key(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        numbers(name.trim_end_matches(&ending))
    });
    Ok(newest.map(|folder| folder.join("linux")))
}

fn folder_name(package: &Package) -> String {
    format!("{}-{}", package.shown(), fingerprint())
}

/// A hash (FNV-1a) of everything that decides about the kernel beside its source.
fn fingerprint() -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in RECIPE.bytes().chain(wanted().flat_map(str::bytes)) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    format!("{hash:016x}")
}

/// The lines of the configuration, without comments.
fn wanted() -> impl Iterator<Item = &'static str> {
    CONFIGURATION
        .lines()
        .filter(|line| line.starts_with("CONFIG_"))
}

/// Builds in a folder; returns the folder in it that holds the kernel and its configuration.
fn build(
    cache: &Cache,
    index: &Index,
    package: &Package,
    folder: &Path,
) -> Result<PathBuf, String> {
    let [source, objects, result] = ["source", "objects", "result"].map(|name| folder.join(name));
    println!("unpacking {}", package.shown());
    index.unpack(package, &source)?;
    make_folder(&objects)?;
    make_folder(&result)?;
    let minimal = folder.join("minimal");
    write(&minimal, CONFIGURATION)?;
    let make = || {
        let mut make = Command::new("make");
        make.arg("-s").arg("-C").arg(&source).arg("ARCH=um");
        make.arg(format!("O={}", objects.display()));
        // What cargo tells the programs it starts is not meant for this make.
        make.env_remove("MAKEFLAGS").env_remove("CARGO_MAKEFLAGS");
        make
    };
    succeed(make().arg("allnoconfig").env("KCONFIG_ALLCONFIG", &minimal))?;
    let taken = std::fs::read_to_string(objects.join(".config"));
    let taken = taken.map_err(|error| failed(&objects, &error))?;
    let missing = missing(&taken);
    if !missing.is_empty() {
        return Err(format!(
            "{} does not take {}",
            package.shown(),
            missing.join(" ")
        ));
    }
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    println!("building the kernel, once: some minutes");
    succeed(make().arg(format!("-j{jobs}")).arg("linux"))?;
    for (from, to) in [("linux", "linux"), (".config", "config")] {
        let from = objects.join(from);
        std::fs::copy(&from, result.join(to)).map_err(|error| failed(&from, &error))?;
    }
    try_out(cache, &result.join("linux"))?;
    Ok(result)
}

/// The wanted lines that a configuration lacks.
fn missing(taken: &str) -> Vec<&'static str> {
    let has = |wanted: &&str| taken.lines().any(|line| line == *wanted);
    wanted().filter(|line| !has(line)).collect()
}

/// Boots a new kernel once.
fn try_out(cache: &Cache, kernel: &Path) -> Result<(), String> {
    let guest = Guest::new(
        kernel.to_path_buf(),
        vec!["sh".into(), "-c".into(), TRIAL.into()],
    );
    let ended = guest.run(cache, Output::Kept)?;
    match ended.code {
        0 => Ok(()),
        code => Err(format!(
            "the new kernel does not do ({code}): {}{}",
            ended.stderr, ended.kernel_log
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_the_kernel_did_not_take_is_named() {
        let taken: Vec<&str> = wanted().filter(|line| !line.contains("UBLK=")).collect();
        assert_eq!(missing(&taken.join("\n")), ["CONFIG_BLK_DEV_UBLK=y"]);
    }

    #[test]
    fn the_fingerprint_is_the_same_in_every_build_and_for_other_comments() {
        assert_eq!(fingerprint(), fingerprint());
        assert_eq!(fingerprint().len(), 16);
        assert!(wanted().all(|line| !line.contains('#')));
    }
}
