//! The command line of `cargo xtask vm`.

use std::path::PathBuf;
use std::time::Duration;

use gaur_artifacts::Cache;

use crate::vm::console::Output;
use crate::vm::guest::{CODE_DIED, CODE_TIME, Guest};
use crate::vm::{kernel, suite};

const USAGE: &str = "\
usage: cargo xtask vm prepare [--update]
       cargo xtask vm run [--share DIR] [--see DIR] [--timeout S] [--mem MIB] [--cpus N] [--scratch GIB]
                          [--env NAME] [--append WORD] [--log FILE] -- CMD [ARG..]
       cargo xtask vm test [--jobs N] [--long] [--verbose] [FILTER..]

  prepare  build the guest's kernel, unless it is there; --update: unless the newest is there
  run      run a command in a fresh guest. It sees this machine's files and may write to none of
           them but those in --share; /scratch is an empty disk. It has a /tmp, /run and /dev of its
           own: of the machine's it sees its own folder, the working folder, and those in --share
           and --see. Exit status: the command's, 124 after the time limit (600 s), 125 if the guest
           died
             --env NAME     hand on this environment variable (NAME=VALUE: set it)
             --append WORD  an argument for the kernel
             --log FILE     write the kernel's log there
  test     build gaur and the tests that need a guest, and run them, each in a guest of its own;
           FILTER: those whose names contain one of these; --long: their long forms

The kernel is kept in ~/.cache/gaur, or where GAUR_CACHE says. GAUR_VM_KERNEL names another.";

/// Runs the task.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let (verb, rest) = match arguments.split_first() {
        Some((verb, rest)) => (verb.as_str(), rest),
        None => ("--help", arguments),
    };
    match (verb, rest) {
        ("--help" | "-h", _) => {
            println!("{USAGE}");
            Ok(())
        }
        ("prepare", []) => kernel::prepare_once(),
        ("prepare", [flag]) if flag == "--update" => {
            let kernel = kernel::prepare(&Cache::open()?, true)?;
            println!("kernel: {}", kernel.display());
            Ok(())
        }
        ("run", rest) => run_command(rest),
        ("test", rest) => suite::run_with(&suite_plan(rest)?),
        _ => Err(format!("not understood\n{USAGE}")),
    }
}

/// Runs a command and ends this program with the command's exit status.
fn run_command(arguments: &[String]) -> Result<(), String> {
    let cache = Cache::open()?;
    let (mut guest, log) = parse(arguments)?;
    guest.kernel = kernel::find(&cache)?;
    let ended = guest.run(&cache, Output::Streamed)?;
    if let Some(log) = log {
        let shown = log.display();
        std::fs::write(&log, &ended.kernel_log).map_err(|error| format!("{shown}: {error}"))?;
    }
    match ended.code {
        CODE_TIME => eprintln!("vm: not done within {} s", guest.limit.as_secs()),
        CODE_DIED => eprintln!("{}\nvm: the guest died", ended.kernel_log),
        _ => {}
    }
    std::process::exit(ended.code)
}

/// A guest as the command line describes it, without a kernel, and where its log goes.
fn parse(arguments: &[String]) -> Result<(Guest, Option<PathBuf>), String> {
    let split = arguments.iter().position(|argument| argument == "--");
    let split = split.ok_or_else(|| format!("no '--' and command\n{USAGE}"))?;
    let (options, command) = arguments.split_at(split);
    let command = &command[1..];
    if command.is_empty() {
        return Err(format!("no command\n{USAGE}"));
    }
    let mut guest = Guest::new(PathBuf::new(), command.to_vec());
    let mut log = None;
    let mut rest = options.iter();
    while let Some(option) = rest.next() {
        let value = rest
            .next()
            .ok_or_else(|| format!("{option} needs a value\n{USAGE}"))?;
        let number = || {
            let number = value.parse::<u64>().ok().filter(|number| *number > 0);
            number.ok_or_else(|| format!("{option}: '{value}' is not a number above 0"))
        };
        match option.as_str() {
            "--share" => guest.shares.push(value.into()),
            "--see" => guest.seen.push(absolute(value)?),
            "--timeout" => guest.limit = Duration::from_secs(number()?),
            "--mem" => guest.memory_mib = number()?,
            "--cpus" => guest.cpus = number()? as usize,
            "--scratch" => guest.scratch_gib = number()?,
            "--env" => guest.environment.push(variable(value)?),
            "--append" => guest.kernel_arguments.push(value.clone()),
            "--log" => log = Some(value.into()),
            _ => return Err(format!("unknown argument '{option}'\n{USAGE}")),
        }
    }
    Ok((guest, log))
}

fn absolute(folder: &str) -> Result<PathBuf, String> {
    std::path::absolute(folder).map_err(|error| format!("--see {folder}: {error}"))
}

/// A variable, set here or of this program's own environment.
fn variable(text: &str) -> Result<(String, String), String> {
    if let Some((name, value)) = text.split_once('=') {
        return Ok((name.into(), value.into()));
    }
    match std::env::var(text) {
        Ok(value) => Ok((text.into(), value)),
        Err(error) => Err(format!("--env {text}: {error}")),
    }
}

fn suite_plan(arguments: &[String]) -> Result<suite::SuiteOptions, String> {
    let mut plan = suite::SuiteOptions::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--long" => plan.long = true,
            "--verbose" => plan.verbose = true,
            "--jobs" => {
                let number = rest.next().and_then(|number| number.parse().ok());
                let number = number.filter(|number| (1..=64).contains(number));
                plan.jobs = number.ok_or("--jobs needs a number from 1 to 64")?;
            }
            flag if flag.starts_with('-') => {
                return Err(format!("unknown argument '{flag}'\n{USAGE}"));
            }
            filter => plan.filters.push(filter.into()),
        }
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_run_is_understood_and_what_follows_the_dashes_is_the_commands() {
        let line = "--mem 512 --timeout 9 --env A=b=c --share . -- ls --mem 1";
        let (guest, log) = parse(&words(line)).unwrap();
        assert_eq!((guest.memory_mib, guest.limit.as_secs()), (512, 9));
        assert_eq!(guest.environment, [("A".to_owned(), "b=c".to_owned())]);
        assert_eq!(guest.command, words("ls --mem 1"));
        assert!(log.is_none());
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for line in [
            "ls",
            "--mem 1 --",
            "--mem x -- ls",
            "--cpus 0 -- ls",
            "--new 1 -- ls",
        ] {
            assert!(parse(&words(line)).is_err(), "{line}");
        }
        assert!(suite_plan(&words("--jobs 0")).is_err());
        assert!(suite_plan(&words("--long ext4 xfs")).is_ok_and(|plan| plan.long));
    }
}
