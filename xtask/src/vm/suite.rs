//! The guest test suite: all tests of programs called `guest_*` that are marked `ignore`.
//!
//! Each runs in a guest of its own, some guests side by side: a test that hangs or crashes its kernel
//! disturbs no other, and what the kernel said belongs to one test. A test fails when its program
//! fails, when the guest does not end in time, or when the kernel complained.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::Value;

use gaur_artifacts::Cache;

use crate::ci;
use crate::vm::checks;
use crate::vm::console::Output;
use crate::vm::guest::{CODE_DIED, CODE_TIME, Guest, RunResult};
use crate::vm::kernel;
use crate::workspace;

/// What the kernel says when something is wrong with it, or with who uses it.
const COMPLAINTS: [&str; 7] = [
    "WARNING:",
    "BUG:",
    "blocked for more than",
    "Oops",
    "rcu_sched self-detected stall",
    "general protection fault",
    "segfault at",
];
/// A line that the guest puts into the log before the command starts.
const STARTS: &str = "gaur: the command starts";
/// Longest time of one test, and of one in its long form.
const LIMIT: Duration = Duration::from_secs(600);
const LIMIT_LONG: Duration = Duration::from_secs(3600);
/// A test program that wants less memory than the others, and how much, in MiB. Its guests have one
/// processor: User-Mode Linux takes a page from a process on another processor without stopping that, so
/// that it goes on with another process's memory until it enters the kernel.
const LITTLE_MEMORY: (&str, u64) = ("guest_reclaim::", 384);
/// A crate that every build has and whose package holds a C project of some size: zstd. Tests unpack
/// and compile it.
const C_PROJECT: (&str, &str) = ("zstd-sys", "zstd");

/// Which tests to run and how.
#[derive(Debug, clap::Parser)]
pub struct SuiteOptions {
    /// Tests whose names contain one of these (all by default)
    filters: Vec<String>,
    /// Guests at a time (one for each processor, up to 4)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    jobs: Option<u8>,
    /// The long forms of the tests
    #[arg(long)]
    pub long: bool,
    /// Show the output of tests that pass, too
    #[arg(long)]
    verbose: bool,
    /// Of tests for every shape of an image, only those at the corners.
    #[arg(skip)]
    corners: bool,
}

impl SuiteOptions {
    /// Whether a test of this name is to be run.
    fn wants(&self, name: &str) -> bool {
        let filters = &self.filters;
        filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()))
    }

    fn jobs(&self) -> usize {
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        self.jobs.map_or_else(|| processors().min(4), usize::from)
    }
}

/// One test of one test program.
#[derive(Debug)]
struct Test {
    program: PathBuf,
    /// The program's name and the test's, as it is shown.
    shown: String,
    name: String,
}

/// Builds everything and runs the tests that every change is worth, in their short forms.
pub fn test_all() -> Result<(), String> {
    let options = SuiteOptions {
        corners: true,
        ..SuiteOptions::parse_from(["test"])
    };
    run_with(&options)
}

/// Two of the four shapes of an image have between them all that the four have.
fn is_corner(shown: &str) -> bool {
    !["::standard_with_backing", "::extended"]
        .iter()
        .any(|shape| shown.ends_with(shape))
}

/// Builds everything and runs the tests of a plan.
pub fn run_with(plan: &SuiteOptions) -> Result<(), String> {
    let cache = Cache::open()?;
    let kernel = kernel::find(&cache)?;
    let gaur = ci::build_gaur()?;
    let mut tests = tests()?;
    tests.retain(|test| plan.wants(&test.shown) && (!plan.corners || is_corner(&test.shown)));
    let is_wanted = |(name, _): &&(&str, _)| plan.wants(name);
    let checks: Vec<_> = checks::ALL.iter().filter(is_wanted).collect();
    if tests.is_empty() && checks.is_empty() {
        return Err("no test has such a name".into());
    }
    let mut guest = Guest::new(kernel, Vec::new());
    guest.limit = if plan.long { LIMIT_LONG } else { LIMIT };
    let c_project = c_project()?;
    guest.seen = vec![workspace::root(), workspace::target()?, c_project.clone()];
    guest.environment = vec![
        ("GAUR_BIN".into(), gaur.display().to_string()),
        ("GAUR_C_PROJECT".into(), c_project.display().to_string()),
        ("RUST_BACKTRACE".into(), "1".into()),
    ];
    if plan.long {
        guest
            .environment
            .push(("GAUR_GUEST_LONG".into(), "1".into()));
    }
    let start = Instant::now();
    let mut failed = Vec::new();
    for (name, check) in &checks {
        match checks::run(*check, &guest.kernel) {
            Ok(()) => println!("PASS {name}"),
            Err(message) => {
                println!("FAIL {name}: {message}");
                failed.push((*name).to_owned());
            }
        }
    }
    failed.extend(run_all(plan, &cache, &guest, &tests)?);
    let count = tests.len() + checks.len();
    println!(
        "{count} tests in guests: {} passed, {} failed; {:.0} s",
        count - failed.len(),
        failed.len(),
        start.elapsed().as_secs_f64()
    );
    match failed.as_slice() {
        [] => Ok(()),
        failed => Err(format!("failed: {}", failed.join(" "))),
    }
}

/// Runs tests side by side; returns the names of those that failed.
fn run_all(
    plan: &SuiteOptions,
    cache: &Cache,
    guest: &Guest,
    tests: &[Test],
) -> Result<Vec<String>, String> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    let work = || -> Result<(), String> {
        while let Some(test) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let mut guest = guest.clone();
            let (program, memory_mib) = LITTLE_MEMORY;
            if test.shown.starts_with(program) {
                guest.memory_mib = memory_mib;
                guest.cpus = 1;
            }
            guest.command = vec![test.program.display().to_string(), test.name.clone()];
            let options = ["--exact", "--ignored", "--nocapture", "--color=never"];
            guest.command.extend(options.map(str::to_owned));
            let ended = guest.run(cache, Output::Kept);
            let mut failed = failed.lock().map_err(|_| "a thread has panicked")?;
            let passed = match ended {
                Ok(ended) => report(test, &ended, start.elapsed(), plan.verbose),
                // The others are run all the same.
                Err(message) => {
                    println!("FAIL {}: {message}", test.shown);
                    false
                }
            };
            if !passed {
                failed.push(test.shown.clone());
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.jobs()).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().map_err(|_| "a thread has panicked")??;
        }
        Ok::<(), String>(())
    })?;
    failed
        .into_inner()
        .map_err(|_| "a thread has panicked".into())
}

/// Says how a test went.
fn report(test: &Test, ended: &RunResult, took: Duration, verbose: bool) -> bool {
    let complaints = complaints(&ended.kernel_log);
    let passed = ended.code == 0 && complaints.is_empty();
    let verdict = if passed { "PASS" } else { "FAIL" };
    println!("{verdict} [{:7.3}s] {}", took.as_secs_f64(), test.shown);
    if verbose || !passed {
        println!("{}{}", ended.stdout, ended.stderr);
    }
    if passed {
        return true;
    }
    match ended.code {
        CODE_TIME => println!("not done in time"),
        CODE_DIED => println!("the guest died"),
        code => println!("exit status {code}; the kernel complained: {complaints:?}"),
    }
    println!("the kernel's log:\n{}", clip(&ended.kernel_log));
    false
}

/// The lines of a kernel's log that tell of trouble, once the command runs.
fn complaints(log: &str) -> Vec<&str> {
    let log = log.split_once(STARTS).map_or("", |(_, log)| log);
    let complains = |line: &&str| COMPLAINTS.iter().any(|word| line.contains(word));
    log.lines().filter(complains).collect()
}

/// The end of a log that is too long to show.
fn clip(log: &str) -> &str {
    let mut start = log.len().saturating_sub(12_000);
    while !log.is_char_boundary(start) {
        start += 1;
    }
    &log[start..]
}

/// Builds the test programs and asks them for their tests.
fn tests() -> Result<Vec<Test>, String> {
    let mut build = workspace::cargo();
    build.args(["test", "--workspace", "--test", "guest_*", "--no-run"]);
    build.arg("--message-format=json-render-diagnostics");
    let messages = workspace::output(build.stderr(Stdio::inherit()))?;
    let mut tests = Vec::new();
    for line in messages.lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let (Some(program), Some(name)) = (
            message["executable"].as_str(),
            message["target"]["name"].as_str(),
        ) else {
            continue;
        };
        tests.extend(tests_of(program.into(), name)?);
    }
    tests.sort_by(|one, other| one.shown.cmp(&other.shown));
    Ok(tests)
}

/// The ignored tests of a program.
fn tests_of(program: PathBuf, program_name: &str) -> Result<Vec<Test>, String> {
    let mut list = Command::new(&program);
    let listed = workspace::output(list.args(["--list", "--ignored", "--format=terse"]))?;
    let names = listed
        .lines()
        .filter_map(|line| line.strip_suffix(": test"));
    let test = |name: &str| Test {
        program: program.clone(),
        shown: format!("{program_name}::{name}"),
        name: name.to_owned(),
    };
    Ok(names.map(test).collect())
}

/// The folder of the C project.
fn c_project() -> Result<PathBuf, String> {
    let packages = workspace::packages(true)?;
    let (package, folder) = C_PROJECT;
    let manifest = packages
        .iter()
        .find(|found| found["name"] == package)
        .and_then(|found| found["manifest_path"].as_str())
        .ok_or_else(|| format!("no build here has {package}"))?;
    Ok(PathBuf::from(manifest).with_file_name(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_of_the_kernel_are_found() {
        let log = "[ 0.1] WARNING: of the boot\n[ 0.2] gaur: the command starts\n\
                   [ 1.0] nbd0: detected\n[ 2.0] WARNING: CPU: 0 PID: 1 at block/x.c:1\n\
                   [ 3.0] INFO: task fio:9 blocked for more than 20 seconds.\n";
        assert_eq!(complaints(log).len(), 2);
        assert_eq!(complaints("[ 1.0] EXT4-fs (nbd0): mounted").len(), 0);
    }
}
