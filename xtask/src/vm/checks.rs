//! Tests of the guest itself, from outside. They run before those that run in guests.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gaur_artifacts::{Cache, make_folder, remove, write};

use crate::vm::console::Output;
use crate::vm::guest::{CODE_TIME, Guest, RunResult};

/// A check of a kernel, with a folder to work in.
type Check = fn(kernel: &Path, folder: &Path) -> Result<(), String>;

/// Names and checks.
pub const ALL: [(&str, Check); 2] = [
    (
        "guest::folders_are_seen_wherever_they_are",
        folders_are_seen_wherever_they_are,
    ),
    (
        "guest::limit_ends_whatever_runs_in_it",
        limit_ends_whatever_runs_in_it,
    ),
];

/// Runs a check.
pub fn run(check: Check, kernel: &Path) -> Result<(), String> {
    // Not where TMPDIR says: the guest has a /tmp of its own.
    let folder = Path::new("/tmp").join(format!("gaur-check-{}", std::process::id()));
    make_folder(&folder)?;
    let outcome = check(kernel, &folder);
    remove(&folder)?;
    outcome
}

fn shell(kernel: &Path, line: &str) -> Guest {
    let words = ["sh", "-c", line].map(str::to_owned);
    Guest::new(kernel.to_path_buf(), words.to_vec())
}

fn expect(holds: bool, ended: &RunResult) -> Result<(), String> {
    match holds {
        true => Ok(()),
        false => Err(format!(
            "exit status {}\n{}{}the kernel's log:\n{}",
            ended.code, ended.stdout, ended.stderr, ended.kernel_log
        )),
    }
}

/// With the checkout below /tmp, which the guest has one of its own of, the programs of all tests were
/// `not found`; with a space in the cache's path the kernel did not start.
fn folders_are_seen_wherever_they_are(kernel: &Path, folder: &Path) -> Result<(), String> {
    let odd = folder.join("a folder, it's: \"$x\" %s\\");
    let [seen, share] = &["seen", "share"].map(|name| odd.join(name));
    make_folder(share)?;
    make_folder(seen)?;
    write(&seen.join("file"), "the machine's\n")?;
    write(&folder.join("hidden"), "")?;
    let cache = Cache::at(&odd.join("cache"))?;
    let line = "set -e; cat \"$1/file\"; echo changed >\"$1/file\"; cat \"$1/file\" >\"$2/file\"; ls -N \"$3\"";
    let mut guest = shell(kernel, line);
    guest.command.push("sh".into());
    for path in [seen.as_path(), share, folder] {
        guest.command.push(path.display().to_string());
    }
    guest.seen = vec![seen.clone()];
    guest.shares = vec![share.clone()];
    let ended = guest.run(&cache, Output::Kept)?;
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let name = odd.file_name().unwrap_or_default().to_string_lossy();
    // What lies beside them is hidden, and what the guest wrote is in the share only.
    expect(ended.stdout == format!("the machine's\n{name}\n"), &ended)?;
    expect(read(share.join("file")) == "changed\n", &ended)?;
    expect(read(seen.join("file")) == "the machine's\n", &ended)
}

/// A failed test left a loop in its background, and nothing ended the guest.
fn limit_ends_whatever_runs_in_it(kernel: &Path, folder: &Path) -> Result<(), String> {
    let cache = Cache::at(folder)?;
    let line = "trap '' TERM HUP INT; echo started; while :; do :; done & sleep 1000";
    let mut guest = shell(kernel, line);
    guest.limit = Duration::from_secs(10);
    let start = Instant::now();
    let ended = guest.run(&cache, Output::Kept)?;
    let in_time = start.elapsed() < guest.limit * 3;
    expect(in_time && ended.code == CODE_TIME, &ended)?;
    expect(ended.stdout == "started\n", &ended)
}
