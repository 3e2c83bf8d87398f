//! A program outside the workspace gets by with this crate alone.

use std::fs;
use std::path::Path;
use std::process::Command;

const PROGRAM: &str = include_str!("outside/program.rs");
const LINES_MAX: usize = 60;

/// It is built with the versions that the workspace has, which are there without a network.
#[test]
fn program_outside_the_workspace_needs_one_dependency_and_sixty_lines() {
    let lines = PROGRAM.lines().count();
    assert!(lines < LINES_MAX, "{lines} lines");
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let project = tempfile::tempdir().expect("a folder");
    let manifest = format!(
        "[package]\nname = \"outside\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
         [dependencies]\ngaur = {{ path = {crate_folder:?} }}\n\
         [profile.dev]\ndebug = false\n[workspace]\n"
    );
    fs::create_dir(project.path().join("src")).expect("a folder");
    fs::write(project.path().join("Cargo.toml"), manifest).expect("a manifest");
    fs::write(project.path().join("src/main.rs"), PROGRAM).expect("a program");
    let lock = crate_folder.join("../../Cargo.lock");
    fs::copy(lock, project.path().join("Cargo.lock")).expect("the workspace's versions");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--quiet", "--offline", "--target-dir"]);
    cargo.arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("outside"));
    let output = cargo
        .current_dir(project.path())
        .output()
        .expect("cargo starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
}
