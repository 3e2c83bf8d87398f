//! The command line of `cargo xtask vm`.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use gaur_artifacts::{Cache, write};

use crate::vm::console::Output;
use crate::vm::guest::{CODE_DIED, CODE_TIME, Guest};
use crate::vm::{kernel, suite};

/// A Linux kernel for tests that need what the machine's own kernel may lack
///
/// The kernel is kept in ~/.cache/gaur, or where GAUR_CACHE says. GAUR_VM_KERNEL names another.
#[derive(Debug, clap::Parser)]
pub enum Task {
    /// Build the guest's kernel, unless it is there
    Prepare {
        /// Unless the newest is there
        #[arg(long)]
        update: bool,
    },
    Run(RunArguments),
    /// Build gaur and the tests that need a guest, and run them, each in a guest of its own
    Test(suite::SuiteOptions),
}

/// Run a command in a fresh guest
///
/// It sees this machine's files and may write to none of them but those in --share; /scratch is an
/// empty disk. It has a /tmp, /run and /dev of its own: of the machine's it sees its own folder, the
/// working folder, and those in --share and --see. Exit status: the command's, 124 after the time
/// limit, 125 if the guest died.
#[derive(Debug, clap::Args)]
pub struct RunArguments {
    /// A folder that the guest may write to
    #[arg(long, value_name = "DIR")]
    share: Vec<PathBuf>,
    /// A folder that the guest sees
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    see: Vec<PathBuf>,
    /// Time limit in seconds
    #[arg(long, value_name = "S", default_value = "600")]
    timeout: NonZeroU32,
    /// Memory in MiB (2048)
    #[arg(long, value_name = "MIB")]
    mem: Option<NonZeroU32>,
    /// Processors (as many as here, up to 8)
    #[arg(long, value_name = "N")]
    cpus: Option<NonZeroU32>,
    /// Size of /scratch in GiB (16)
    #[arg(long, value_name = "GIB")]
    scratch: Option<NonZeroU32>,
    /// Hand on this environment variable (NAME=VALUE: set it)
    #[arg(long, value_name = "NAME", value_parser = variable)]
    env: Vec<(String, String)>,
    /// An argument for the kernel
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    append: Vec<String>,
    /// Write the kernel's log there
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// The command and its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Runs the task.
pub fn run(task: Task) -> Result<(), String> {
    match task {
        Task::Prepare { update: false } => kernel::prepare_once(),
        Task::Prepare { update: true } => {
            let kernel = kernel::prepare(&Cache::open()?, true)?;
            println!("kernel: {}", kernel.display());
            Ok(())
        }
        Task::Run(arguments) => run_command(&arguments),
        Task::Test(options) => suite::run_with(&options),
    }
}

/// Runs a command and ends this program with the command's exit status.
fn run_command(arguments: &RunArguments) -> Result<(), String> {
    let cache = Cache::open()?;
    let guest = guest(arguments, kernel::find(&cache)?);
    let ended = guest.run(&cache, Output::Streamed)?;
    if let Some(log) = &arguments.log {
        write(log, &ended.kernel_log)?;
    }
    match ended.code {
        CODE_TIME => eprintln!("vm: not done within {} s", guest.limit.as_secs()),
        CODE_DIED => eprintln!("{}\nvm: the guest died", ended.kernel_log),
        _ => {}
    }
    std::process::exit(ended.code)
}

/// A guest as the command line describes it.
fn guest(arguments: &RunArguments, kernel: PathBuf) -> Guest {
    let default = Guest::new(kernel, arguments.command.clone());
    let or = |given: Option<NonZeroU32>, other| given.map_or(other, |given| given.get().into());
    Guest {
        shares: arguments.share.clone(),
        seen: arguments.see.clone(),
        limit: Duration::from_secs(arguments.timeout.get().into()),
        memory_mib: or(arguments.mem, default.memory_mib),
        cpus: or(arguments.cpus, default.cpus as u64) as usize,
        scratch_gib: or(arguments.scratch, default.scratch_gib),
        environment: arguments.env.clone(),
        kernel_arguments: arguments.append.clone(),
        ..default
    }
}

fn absolute(folder: &str) -> std::io::Result<PathBuf> {
    std::path::absolute(folder)
}

/// A variable, set here or of this program's own environment.
fn variable(text: &str) -> Result<(String, String), String> {
    if let Some((name, value)) = text.split_once('=') {
        return Ok((name.into(), value.into()));
    }
    match std::env::var(text) {
        Ok(value) => Ok((text.into(), value)),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn parse(line: &str) -> Result<Task, clap::Error> {
        Task::try_parse_from(["vm"].into_iter().chain(line.split(' ')))
    }

    #[test]
    fn a_run_is_understood_and_what_follows_the_dashes_is_the_commands() {
        let line = "run --mem 512 --timeout 9 --env A=b=c --share . -- ls --mem 1";
        let Ok(Task::Run(arguments)) = parse(line) else {
            panic!("a run");
        };
        let guest = guest(&arguments, PathBuf::new());
        assert_eq!((guest.memory_mib, guest.limit.as_secs()), (512, 9));
        assert_eq!(guest.environment, [("A".to_owned(), "b=c".to_owned())]);
        assert_eq!(guest.command, ["ls", "--mem", "1"]);
        assert!(arguments.log.is_none());
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for line in [
            "run ls",
            "run --mem 1 --",
            "run --mem x -- ls",
            "run --cpus 0 -- ls",
            "run --new 1 -- ls",
            "test --jobs 0",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert!(matches!(parse("test --long ext4 xfs"), Ok(Task::Test(options)) if options.long));
    }
}
