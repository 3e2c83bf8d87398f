//! `cargo xtask model`: runs the models of the code that threads share, under loom.
//!
//! They are tests in modules called `loom_model`, built with `--cfg loom` in a build folder of their
//! own, so that neither build disturbs the other. Only what has models is built.

use crate::ci::succeed;
use crate::workspace;

const USAGE: &str = "\
usage: cargo xtask model [--preemptions N] [--seconds S] [FILTER]

  --preemptions N  switch at most N times from a thread that could go on (default 3)
  --seconds S      end a model after so many seconds, although there is more to explore (default 120)
  FILTER           run the models whose names contain this";

/// Preemptions and seconds for continuous integration: some seconds for all models together.
const CI: (&str, &str) = ("2", "30");

struct Arguments {
    preemptions: String,
    seconds: String,
    filter: String,
}

/// Runs the task.
pub fn run(arguments: &[String]) -> Result<(), String> {
    if arguments
        .iter()
        .any(|argument| argument == "--help" || argument == "-h")
    {
        println!("{USAGE}");
        return Ok(());
    }
    explore(&parse(arguments)?, true)
}

/// Runs all models as far as there is time for in continuous integration.
pub fn run_briefly() -> Result<(), String> {
    let (preemptions, seconds) = CI;
    let arguments = ["--preemptions", preemptions, "--seconds", seconds].map(str::to_owned);
    explore(&parse(&arguments)?, false)
}

fn parse(arguments: &[String]) -> Result<Arguments, String> {
    let mut parsed = Arguments {
        preemptions: "3".into(),
        seconds: "120".into(),
        filter: "loom_model".into(),
    };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut number = || {
            let value = rest
                .next()
                .ok_or_else(|| format!("{argument} needs a value\n{USAGE}"))?;
            match value.parse::<u8>() {
                Ok(_) => Ok(value.clone()),
                Err(error) => Err(format!("{argument} {value}: {error}")),
            }
        };
        match argument.as_str() {
            "--preemptions" => parsed.preemptions = number()?,
            "--seconds" => parsed.seconds = number()?,
            flag if flag.starts_with('-') => {
                return Err(format!("unknown argument '{flag}'\n{USAGE}"));
            }
            filter => parsed.filter = filter.into(),
        }
    }
    Ok(parsed)
}

fn explore(arguments: &Arguments, count_runs: bool) -> Result<(), String> {
    let mut flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" --cfg loom");
    let mut command = workspace::cargo();
    command
        .env("RUSTFLAGS", flags)
        .env("CARGO_TARGET_DIR", workspace::target()?.join("loom"))
        .env("LOOM_MAX_PREEMPTIONS", &arguments.preemptions)
        .env("LOOM_MAX_DURATION", &arguments.seconds)
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
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Arguments, String> {
        let arguments: Vec<String> = arguments.iter().map(|text| (*text).into()).collect();
        parse(&arguments)
    }

    #[test]
    fn numbers_and_a_filter_are_understood_and_nothing_else() {
        let deep = parsed(&["--preemptions", "4", "epochs"]).unwrap();
        assert_eq!(
            (deep.preemptions.as_str(), deep.filter.as_str()),
            ("4", "epochs")
        );
        assert!(parsed(&["--preemptions"]).is_err());
        assert!(parsed(&["--seconds", "many"]).is_err());
        assert!(parsed(&["--depth", "4"]).is_err());
    }
}
