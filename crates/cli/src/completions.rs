//! `gaur completions SHELL` and `gaur man`: made from the definition of the command line itself.

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

/// Print the manual page, or that of one verb
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// The verb
    verb: Option<String>,
}

/// Prints the completion script.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Gaur::command(), "gaur", &mut script);
    out.write_all(&script)?;
    Ok(0)
}

/// Prints the manual page.
pub fn run_man(args: &ManArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    let mut command = Gaur::command();
    command.build();
    let page = match &args.verb {
        None => command,
        Some(verb) => match command.find_subcommand(verb) {
            Some(found) => found.clone(),
            None => return Err(Failure::new(format!("there is no verb '{verb}'"))),
        },
    };
    clap_mangen::Man::new(page).render(out)?;
    Ok(0)
}
