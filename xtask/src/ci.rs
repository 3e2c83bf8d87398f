//! `cargo xtask ci`: the steps of continuous integration, cheapest first.
//!
//! What fails before the tests, in the rules, the lints or the build, ends the run. A test that fails
//! does not: the others are run all the same, and the end says which steps have failed and why. The tests of the
//! workspace come last, so that the run ends with the test runner's own closing lines.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::workspace::succeed;
use crate::{iotests, model, packages, sim, tidy, vm, workspace};

/// Seeds of the crash simulator that are the same in every run.
const SEEDS: u64 = 300;
/// Seeds that no run had before: the others find nothing any more.
const FRESH_SEEDS: u64 = 1000;

/// Runs every check and test.
pub fn run() -> Result<(), String> {
    step("format", || cargo(&["fmt", "--all", "--check"]))?;
    step("tidy", tidy::run)?;
    step("packages", packages::run)?;
    // Beside what follows, which does not keep all processors busy.
    let kernel = std::thread::spawn(vm::prepare_once);
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
    step("static build", static_build)?;
    step("documentation", packages::document)?;
    let gaur = build_gaur()?;
    let mut failed = Vec::new();
    let mut test = |name, work: &dyn Fn() -> Result<(), String>| {
        if let Err(message) = step(name, work) {
            println!("== {name}: {message}");
            failed.push(format!("{name}: {message}"));
        }
    };
    test("crash simulator", &|| {
        let fixed = sim::run(&sim::Arguments::of_seeds(SEEDS, false));
        fixed.and(sim::run(&sim::Arguments::of_seeds(FRESH_SEEDS, true)))
    });
    test("models", &model::run_briefly);
    let built = step("guest kernel", || {
        let thread = kernel.join();
        thread.map_err(|_| "its thread has panicked")?
    });
    test("tests in guests", &|| {
        built.clone()?;
        vm::test_all()
    });
    test("tests of QEMU", &|| {
        iotests::run(&iotests::Arguments {
            once: true,
            gaur: Some(gaur.clone()),
            jobs: 2,
            tests: Vec::new(),
        })
    });
    test("tests", &|| tests(&gaur));
    match failed.as_slice() {
        [] => Ok(()),
        failed => Err(format!("failed:\n{}", failed.join("\n"))),
    }
}

/// Looks whether `gaur` compiles for a C library that can be linked statically, where there is one. Only
/// the types are looked at: a whole build takes as long as that of everything else.
fn static_build() -> Result<(), String> {
    const TARGET: &str = "x86_64-unknown-linux-musl";
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--print", "target-libdir", "--target", TARGET]);
    let folder = workspace::output(&mut rustc);
    let has_std = folder.is_ok_and(|folder| Path::new(folder.trim()).is_dir());
    let has_c = Command::new("musl-gcc").arg("--version").output().is_ok();
    if !has_std || !has_c {
        println!(
            "not looked at: `rustup target add {TARGET}` and the package musl-tools are missing"
        );
        return Ok(());
    }
    cargo(&["check", "--package", "gaur-cli", "--target", TARGET])
}

/// Builds the program that the interop tests run, once for all of them and under a name of its own:
/// the tests' build of the whole workspace has features in it that are there for tests only.
pub fn build_gaur() -> Result<PathBuf, String> {
    step("gaur", || cargo(&["build", "--package", "gaur-cli"]))?;
    let folder = workspace::target()?;
    let tested = folder.join("gaur-under-test");
    // By a rename: another process may be running the old file.
    let new = folder.join(format!("gaur-under-test-{}", std::process::id()));
    std::fs::copy(folder.join("debug/gaur"), &new)
        .and_then(|_| std::fs::rename(&new, &tested))
        .map_err(|error| format!("{}: {error}", tested.display()))?;
    Ok(tested)
}

fn step(name: &str, work: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    println!("== {name}");
    let start = Instant::now();
    let done = work();
    println!("== {name}: {:.0} s", start.elapsed().as_secs_f64());
    done
}

/// All tests, by nextest where it is installed (it runs test programs side by side), by cargo where
/// it is not.
fn tests(gaur: &Path) -> Result<(), String> {
    let all = |arguments: &[&str]| {
        let mut command = workspace::cargo();
        succeed(command.args(arguments).env("GAUR_BIN", gaur))
    };
    if nextest_is_installed() {
        let documented = all(&["test", "--workspace", "--doc", "--quiet"]);
        all(&["nextest", "run", "--workspace", "--no-fail-fast"]).and(documented)
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
