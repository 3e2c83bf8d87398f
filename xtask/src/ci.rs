//! Everything that continuous integration runs, in the order in which a failure is cheapest.
//!
//! The tests come last, so that the run ends with the test runner's own closing lines. A step that
//! fails ends the run: what comes after it would only hide the first message.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::{model, sim, tidy, vm, workspace};

/// Seeds of the crash simulator: a minute or two.
const SEEDS: &str = "1000";

/// Runs every check and test.
pub fn run(arguments: &[String]) -> Result<(), String> {
    if !arguments.is_empty() {
        return Err("takes no arguments".into());
    }
    step("format", || cargo(&["fmt", "--all", "--check"]))?;
    step("tidy", || tidy::run(&[]))?;
    step("clippy", || {
        cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "--deny",
            "warnings",
        ])
    })?;
    step("build", || cargo(&["test", "--workspace", "--no-run"]))?;
    step("crash simulator", || {
        sim::run(&["--seeds".into(), SEEDS.into()])
    })?;
    step("models", model::run_briefly)?;
    let gaur = build_gaur()?;
    step("guest kernel", vm::prepare_once)?;
    step("tests in guests", vm::test_all)?;
    step("tests", || tests(&gaur))
}

/// Builds the program that the interop tests run, once for all of them and under a name of its own:
/// the tests' build of the whole workspace has features in it that are there for tests only.
pub fn build_gaur() -> Result<PathBuf, String> {
    step("gaur", || cargo(&["build", "--package", "gaur-cli"]))?;
    let folder = workspace::target()?;
    let tested = folder.join("gaur-under-test");
    std::fs::copy(folder.join("debug/gaur"), &tested)
        .map_err(|error| format!("{}: {error}", tested.display()))?;
    Ok(tested)
}

fn step(name: &str, work: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    println!("== {name}");
    let start = Instant::now();
    work()?;
    println!("== {name}: {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// All tests, by nextest where it is installed (it runs test programs side by side), by cargo where
/// it is not.
fn tests(gaur: &Path) -> Result<(), String> {
    let all = |arguments: &[&str]| {
        let mut command = workspace::cargo();
        succeed(command.args(arguments).env("GAUR_BIN", gaur))
    };
    if nextest_is_installed() {
        all(&["test", "--workspace", "--doc", "--quiet"])?;
        all(&["nextest", "run", "--workspace", "--no-fail-fast"])
    } else {
        all(&["test", "--workspace", "--no-fail-fast"])
    }
}

fn nextest_is_installed() -> bool {
    let version = workspace::cargo().args(["nextest", "--version"]).output();
    version.is_ok_and(|output| output.status.success())
}

fn cargo(arguments: &[&str]) -> Result<(), String> {
    succeed(workspace::cargo().args(arguments))
}

/// Runs a command to its end; an exit status other than 0 is an error that names the command.
pub fn succeed(command: &mut Command) -> Result<(), String> {
    let shown = format!("{command:?}");
    let status = command
        .status()
        .map_err(|error| format!("cannot start {shown}: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{shown}: {status}"))
    }
}
