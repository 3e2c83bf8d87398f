//! `gaur completions`: shell completions, generated from the definition of the command line.

use std::io::Write;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::command::Gaur;
use crate::failure::Failure;

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell
    shell: Shell,
}

/// Prints the completion script.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Gaur::command(), "gaur", &mut script);
    out.write_all(&script)?;
    Ok(0)
}
