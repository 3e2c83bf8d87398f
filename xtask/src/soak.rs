//! `cargo xtask soak`: the interop tests for longer than in continuous integration; an environment
//! variable sets for how long.

use crate::ci::succeed;
use crate::workspace;

/// How long each of them goes on when no `--minutes` is given.
const DEFAULT_MINUTES: u32 = 5;

/// Runs the tests whose names start with `long_`, one after the other.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let minutes = match arguments {
        [] => DEFAULT_MINUTES,
        [flag, number] if flag == "--minutes" => number
            .parse()
            .map_err(|error| format!("--minutes {number}: {error}"))?,
        _ => return Err("usage: cargo xtask soak [--minutes N]".into()),
    };
    let mut command = workspace::cargo();
    command.env("GAUR_SOAK_SECONDS", (u64::from(minutes) * 60).to_string());
    command.args([
        "test",
        "--release",
        "--package",
        "gaur-interop",
        "--",
        "long_",
    ]);
    command.args(["--nocapture", "--test-threads", "1"]);
    succeed(&mut command)
}
