//! The workspace: its folder, its files, and how its programs are started.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The workspace's folder: the one around the current folder, else the one this program was built in.
/// Working copies that share a build folder share this program as well.
pub fn root() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let around = std::env::current_dir().ok();
    let around = around.as_deref().and_then(root_around);
    let root = around.or(built);
    root.expect("xtask lies in the workspace's folder")
        .to_path_buf()
}

/// The closest workspace of this kind around a folder.
fn root_around(folder: &Path) -> Option<&Path> {
    let is_root = |folder: &&Path| folder.join("xtask/Cargo.toml").is_file();
    folder.ancestors().find(is_root)
}

/// The cargo that started this program, at the workspace's folder.
pub fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(root());
    command
}

/// Runs a command to its end; an exit status other than 0 is an error that names the command.
pub fn succeed(command: &mut Command) -> Result<(), String> {
    let status = command.status();
    let status = status.map_err(|error| format!("cannot start {command:?}: {error}"))?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {status}")),
    }
}

/// What a command prints, if it goes well.
pub fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output();
    let output = output.map_err(|error| format!("cannot start {command:?}: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{command:?}: {}\n{said}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The packages that cargo knows: ours, and with `all` those that they depend on here. Cargo has not loaded those of other
/// systems.
pub fn packages(all: bool) -> Result<Vec<Value>, String> {
    let mut command = cargo();
    command.args(["metadata", "--format-version=1", "--offline"]);
    let here = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    command.args(["--filter-platform", &here]);
    command.args((!all).then_some("--no-deps"));
    let mut metadata: Value = serde_json::from_str(&output(&mut command)?)
        .map_err(|error| format!("cargo metadata: {error}"))?;
    match metadata["packages"].take() {
        Value::Array(packages) => Ok(packages),
        _ => Err("cargo metadata lists no packages".to_owned()),
    }
}

/// The build folder: this program lies in it, below the folder of its profile.
pub fn target() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| format!("no path to itself: {error}"))?;
    let folder = program.ancestors().nth(2);
    folder
        .map(Path::to_path_buf)
        .ok_or_else(|| "lies in no build folder".into())
}

/// Every file below the workspace's folder with one of the extensions, sorted, without build
/// folders and version control.
pub fn files(extensions: &[&str]) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        let entries =
            std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        for entry in entries {
            let entry = entry.map_err(|error| format!("{}: {error}", folder.display()))?;
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if name == ".git" {
                // A file where the folder is one of several working copies.
                continue;
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let skipped = name == "target" || name.starts_with("target-");
                if !skipped {
                    folders.push(path);
                }
            } else if extensions
                .iter()
                .any(|extension| has_extension(&path, extension))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

fn has_extension(path: &Path, extension: &str) -> bool {
    match path.extension() {
        Some(found) => found == extension,
        None => extension.is_empty(),
    }
}

/// The path as it is written in messages: relative to the workspace's folder.
pub fn shown(path: &Path) -> String {
    path.strip_prefix(root())
        .unwrap_or(path)
        .display()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_the_one_around_the_current_folder() {
        let built = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = built.parent();
        assert_eq!(root_around(&built.join("src/vm")), root);
        assert_eq!(root_around(root.unwrap()), root);
        assert_eq!(root_around(Path::new("/")), None);
    }
}
