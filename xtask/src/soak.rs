//! `cargo xtask soak`: the interop tests for longer than in continuous integration; an environment
//! variable sets for how long.

use crate::workspace::{self, succeed};

/// Run the long forms of the interop tests
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// How long each of them goes on
    #[arg(long, value_name = "N", default_value_t = 5)]
    minutes: u32,
}

/// Runs the tests whose names start with `long_`, one after the other.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let mut command = workspace::cargo();
    let seconds = u64::from(arguments.minutes) * 60;
    command.env("GAUR_SOAK_SECONDS", seconds.to_string());
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
