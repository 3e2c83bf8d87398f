//! `cargo xtask model`: runs the models of the code that threads share, under loom.
//!
//! They are tests in modules called `loom_model`, built with `--cfg loom` in a build folder of their
//! own, so that neither build disturbs the other. Only what has models is built.

use crate::workspace::{self, succeed};

/// Run the models of what threads share
#[derive(Debug, clap::Parser)]
pub struct Arguments {
    /// Switch at most N times from a thread that could go on
    #[arg(long, value_name = "N", default_value_t = 3)]
    preemptions: u8,
    /// End a model after so many seconds, although there is more to explore
    #[arg(long, value_name = "S", default_value_t = 120)]
    seconds: u8,
    /// Run the models whose names contain this
    #[arg(default_value = "loom_model")]
    filter: String,
}

/// Runs the task.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    explore(arguments, true)
}

/// Runs all models as far as there is time for in continuous integration: some seconds for all together.
pub fn run_briefly() -> Result<(), String> {
    let arguments = Arguments {
        preemptions: 2,
        seconds: 30,
        filter: "loom_model".to_owned(),
    };
    explore(&arguments, false)
}

fn explore(arguments: &Arguments, count_runs: bool) -> Result<(), String> {
    let mut flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" --cfg loom");
    let mut command = workspace::cargo();
    command
        .env("RUSTFLAGS", flags)
        .env("CARGO_TARGET_DIR", workspace::target()?.join("loom"))
        .env("LOOM_MAX_PREEMPTIONS", arguments.preemptions.to_string())
        .env("LOOM_MAX_DURATION", arguments.seconds.to_string())
        // How often loom looks at the time, in runs.
        .env("LOOM_CHECKPOINT_INTERVAL", "500");
    if count_runs {
        command.env("GAUR_COUNT_RUNS", "1");
    }
    command.args(["test", "--profile", "model", "--lib"]);
    for package in ["gaur-engine", "gaur-reactor"] {
        command.args(["--package", package]);
    }
    succeed(command.arg("--").arg(&arguments.filter))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn numbers_and_a_filter_are_understood_and_nothing_else() {
        let parsed = |line: &str| Arguments::try_parse_from(line.split(' '));
        let deep = parsed("model --preemptions 4 epochs").unwrap();
        assert_eq!((deep.preemptions, deep.filter.as_str()), (4, "epochs"));
        assert!(parsed("model --preemptions").is_err());
        assert!(parsed("model --seconds many").is_err());
        assert!(parsed("model --depth 4").is_err());
    }
}
