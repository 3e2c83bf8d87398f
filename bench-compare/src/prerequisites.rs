//! What a benchmark needs of the machine beside Rust, looked at before anything is built: a benchmark that
//! finds out after minutes of building that a peer cannot be started has wasted them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Programs and the packages of Debian's that have them.
const PACKAGES: &[(&str, &str)] = &[
    ("fio", "fio"),
    ("fusermount3", "fuse3"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("nbd-client", "nbd-client"),
    ("nbdfuse", "libnbd-bin"),
    ("qemu-img", "qemu-utils"),
    ("qemu-io", "qemu-utils"),
    ("qemu-nbd", "qemu-utils"),
    ("qemu-storage-daemon", "qemu-utils"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("taskset", "util-linux"),
    ("vdpa", "iproute2"),
];
/// Where programs are beside the folders of PATH.
const SYSTEM_FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];
/// Where libclang is, or a folder of each version that has it in `lib`.
const LIBRARY_FOLDERS: [&str; 5] = [
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/lib64",
    "/usr/lib/x86_64-linux-gnu",
];

/// Asserts that these programs can be started.
pub fn check(programs: &[&'static str]) -> Result<()> {
    check_with(programs, None)
}

/// Asserts that these programs can be started, and that one more package is there if it is `lacking`.
pub fn check_with(programs: &[&'static str], lacking: Option<&'static str>) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let missing = missing(programs, &path);
    let mut packages: Vec<&str> = missing.iter().map(|name| package(name)).collect();
    packages.extend(lacking);
    packages.sort_unstable();
    packages.dedup();
    if packages.is_empty() {
        return Ok(());
    }
    bail!(
        "packages are missing: `apt-get install {}` installs them",
        packages.join(" ")
    );
}

/// The package without which a program that uses clang's parser cannot be built, if it is not there.
pub fn lacking_libclang() -> Option<&'static str> {
    let is_named = ["LIBCLANG_PATH", "LLVM_CONFIG_PATH"]
        .iter()
        .any(|name| std::env::var_os(name).is_some());
    let folders = LIBRARY_FOLDERS.map(PathBuf::from);
    (!is_named && !folders.iter().any(|folder| has_libclang(folder))).then_some("libclang-dev")
}

/// Whether a folder, or `lib` of one in it, has libclang as programs are linked to it. (The library alone,
/// `libclang.so.1`, comes without clang's headers.)
fn has_libclang(folder: &Path) -> bool {
    let entries = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_library = |name: &OsStr| {
        let name = name.to_string_lossy();
        name.starts_with("libclang") && !name.starts_with("libclang-cpp") && name.ends_with(".so")
    };
    let holds = |folder: &Path| entries(folder).any(|entry| is_library(&entry.file_name()));
    let of_version = |name: &OsStr| name.to_string_lossy().starts_with("llvm");
    let mut versions = entries(folder).filter(|entry| of_version(&entry.file_name()));
    holds(folder) || versions.any(|entry| holds(&entry.path().join("lib")))
}

/// Those of the programs that are in no folder of the path.
fn missing<'a>(programs: &[&'a str], path: &OsStr) -> Vec<&'a str> {
    let folders = || std::env::split_paths(path).chain(SYSTEM_FOLDERS.map(PathBuf::from));
    let is_there = |name: &str| folders().any(|folder| folder.join(name).is_file());
    let missing = programs.iter().filter(|name| !is_there(name));
    missing.copied().collect()
}

fn package(program: &'static str) -> &'static str {
    let found = PACKAGES.iter().find(|(name, _)| *name == program);
    found.map_or(program, |(_, package)| package)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_by_its_package() {
        assert_eq!(missing(&["sh"], OsStr::new("/usr/bin:/bin")), [""; 0]);
        let none = "a-program-that-is-nowhere";
        assert_eq!(missing(&["sh", none], OsStr::new("/usr/bin:/bin")), [none]);
        assert_eq!(package("qemu-nbd"), "qemu-utils");
    }

    /// `bench-compare exports` built Gaur and then most of rublk before it failed for want of libclang.
    #[test]
    fn libclang_counts_only_as_it_is_linked_to() {
        let folder = std::env::temp_dir().join(format!("gaur-libclang-{}", std::process::id()));
        let of_version = folder.join("llvm-14/lib");
        std::fs::create_dir_all(&of_version).unwrap();
        for name in ["libclang.so.1", "libclang-cpp.so", "libclangBasic.a"] {
            std::fs::write(of_version.join(name), "").unwrap();
        }
        assert!(!has_libclang(&folder));
        std::fs::write(of_version.join("libclang.so"), "").unwrap();
        assert!(has_libclang(&folder));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
