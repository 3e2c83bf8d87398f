//! What users of the published crates rely on: that they can be packaged, that their documentation is whole,
//! and that they ask for no newer compiler than they say.

use serde_json::Value;

use crate::workspace::{self, succeed};

/// Packages every crate that may be published, in the order in which they depend on each other, without
/// building the packages.
pub fn run() -> Result<(), String> {
    let packages = workspace::packages(true)?;
    no_newer_compiler(&packages)?;
    let mut cargo = workspace::cargo();
    cargo.args([
        "package",
        "--quiet",
        "--no-verify",
        "--allow-dirty",
        "--offline",
    ]);
    for package in &packages {
        // `publish = false` is an empty list of registries.
        if is_ours(package) && package["publish"].is_null() {
            let name = package["name"].as_str().unwrap_or_default();
            cargo.args(["--package", name]);
        }
    }
    succeed(&mut cargo)
}

/// Makes the documentation of all libraries; a warning is an error.
pub fn document() -> Result<(), String> {
    let mut cargo = workspace::cargo();
    cargo.args(["doc", "--quiet", "--workspace", "--no-deps"]);
    succeed(cargo.env("RUSTDOCFLAGS", "--deny warnings"))
}

/// A dependency that needs a newer compiler than ours would change our own `rust-version`. The same of
/// functions of the standard library is a lint of clippy, `incompatible_msrv`.
fn no_newer_compiler(packages: &[Value]) -> Result<(), String> {
    let ours = packages.iter().filter(|package| is_ours(package));
    let ours = ours.map(version).max().unwrap_or_default();
    let newer = packages.iter().filter(|package| version(package) > ours);
    let newer: Vec<String> = newer
        .map(|package| format!("{} {}", package["name"], package["rust_version"]))
        .collect();
    match newer.as_slice() {
        [] => Ok(()),
        newer => Err(format!(
            "these need a newer Rust than we do: {}",
            newer.join(", ")
        )),
    }
}

/// Ours come from a path, all others from a registry.
fn is_ours(package: &Value) -> bool {
    package["source"].is_null()
}

/// The Rust that a package asks for.
fn version(package: &Value) -> Vec<u32> {
    let text = package["rust_version"].as_str().unwrap_or_default();
    text.split('.')
        .filter_map(|part| part.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn dependency_that_needs_a_newer_compiler_is_found() {
        let ours = json!({"name": "gaur", "source": null, "rust_version": "1.90"});
        let old = json!({"name": "old", "source": "registry", "rust_version": "1.85.1"});
        let silent = json!({"name": "silent", "source": "registry", "rust_version": null});
        let new = json!({"name": "new", "source": "registry", "rust_version": "1.91"});
        assert_eq!(no_newer_compiler(&[ours.clone(), old, silent]), Ok(()));
        let found = no_newer_compiler(&[ours, new]).expect_err("1.91 is newer");
        assert!(found.contains("new"), "{found}");
    }
}
