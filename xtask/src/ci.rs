//! Everything that continuous integration runs, in the order in which a failure is cheapest.
//!
//! The tests come last, so that the run ends with the test runner's own closing lines. A step that
//! fails ends the run: what comes after it would only hide the first message.

use std::ffi::OsString;
use std::process::Command;
use std::time::Instant;

use crate::{tidy, workspace};

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
    step("build", || {
        cargo(&["build", "--workspace", "--all-targets"])
    })?;
    step("tests", tests)
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
fn tests() -> Result<(), String> {
    if nextest_is_installed() {
        cargo(&["test", "--workspace", "--doc", "--quiet"])?;
        cargo(&["nextest", "run", "--workspace", "--no-fail-fast"])
    } else {
        cargo(&["test", "--workspace", "--no-fail-fast"])
    }
}

fn nextest_is_installed() -> bool {
    let version = workspace::cargo().args(["nextest", "--version"]).output();
    version.is_ok_and(|output| output.status.success())
}

fn cargo(arguments: &[&str]) -> Result<(), String> {
    let mut command = workspace::cargo();
    command.args(arguments);
    // Warnings are errors for the project's own code, in documentation too.
    command.env("RUSTDOCFLAGS", joined("RUSTDOCFLAGS", "-D warnings"));
    succeed(&mut command)
}

/// The variable's value with `more` behind it.
fn joined(variable: &str, more: &str) -> OsString {
    let mut value = std::env::var_os(variable).unwrap_or_default();
    if !value.is_empty() {
        value.push(" ");
    }
    value.push(more);
    value
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
