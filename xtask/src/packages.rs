//! What users of the published crates rely on: that they can be packaged, that their documentation is whole,
//! and that they ask for no newer compiler than they say.

use std::process::Command;

use serde_json::Value;

use crate::ci::succeed;
use crate::workspace;

/// Packages every crate that may be published, in the order in which they depend on each other, without
/// building the packages.
pub fn run() -> Result<(), String> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array();
    let packages: Vec<&Value> = packages.into_iter().flatten().collect();
    no_newer_compiler(&packages)?;
    let mut cargo = workspace::cargo();
    cargo.args([
        "package",
        "--quiet",
        "--no-verify",
        "--allow-dirty",
        "--offline",
    ]);
    for package in packages {
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
fn no_newer_compiler(packages: &[&Value]) -> Result<(), String> {
    let ours = packages.iter().filter(|package| is_ours(package));
    let ours = ours
        .map(|package| version(package))
        .max()
        .unwrap_or_default();
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

fn metadata() -> Result<Value, String> {
    let mut cargo: Command = workspace::cargo();
    cargo.args(["metadata", "--format-version=1", "--offline"]);
    let output = cargo
        .output()
        .map_err(|error| format!("cannot start cargo metadata: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("cargo metadata: {text}"));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))
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
        assert_eq!(no_newer_compiler(&[&ours, &old, &silent]), Ok(()));
        let found = no_newer_compiler(&[&ours, &new]).expect_err("1.91 is newer");
        assert!(found.contains("new"), "{found}");
    }
}
