//! The command line: its verbs, their dispatch, and the printing of errors.

use std::ffi::OsString;
use std::io::{BufWriter, Write};
use std::path::Path;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::failure::Failure;
use crate::{
    amend, bench, bitmap, check, commit, compare, completions, convert, create, dd, export, info,
    man, map, measure, notice, rebase, resize, serve, snapshot, ublk, usage,
};

/// Work with qcow2 and raw disk images, and serve them as block devices
#[derive(Debug, Parser)]
#[command(
    name = "gaur",
    version,
    infer_long_args = true,
    disable_help_subcommand = false,
    max_term_width = 100
)]
pub struct Gaur {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
#[command(infer_long_args = true)]
enum Verb {
    Serve(serve::Args),
    Export(export::Args),
    Ublk(ublk::Args),
    Create(create::Args),
    Info(info::Args),
    Check(check::Args),
    Map(map::Args),
    Measure(measure::Args),
    Convert(convert::Args),
    Compare(compare::Args),
    Dd(dd::Args),
    Commit(commit::Args),
    Rebase(rebase::Args),
    Resize(resize::Args),
    Amend(amend::Args),
    Snapshot(snapshot::Args),
    Bitmap(bitmap::Args),
    Bench(bench::Args),
    Completions(completions::Args),
    Man(man::Args),
}

impl Verb {
    fn run(&self, out: &mut dyn Write) -> Result<u8, Failure> {
        match self {
            Verb::Serve(args) => serve::run(args, out),
            Verb::Export(args) => export::run(args, out),
            Verb::Ublk(args) => ublk::run(args, out),
            Verb::Create(args) => create::run(args, out),
            Verb::Info(args) => info::run(args, out),
            Verb::Check(args) => check::run(args, out),
            Verb::Map(args) => map::run(args, out),
            Verb::Measure(args) => measure::run(args, out),
            Verb::Convert(args) => convert::run(args, out),
            Verb::Dd(args) => dd::run(args, out),
            Verb::Compare(args) => compare::run(args, out),
            Verb::Commit(args) => commit::run(args, out),
            Verb::Rebase(args) => rebase::run(args),
            Verb::Resize(args) => resize::run(args, out),
            Verb::Amend(args) => amend::run(args, out),
            Verb::Snapshot(args) => snapshot::run(args, out),
            Verb::Bitmap(args) => bitmap::run(args, out),
            Verb::Bench(args) => bench::run(args, out),
            Verb::Completions(args) => completions::run(args, out),
            Verb::Man(args) => man::run(args, out),
        }
    }
}

/// Runs the command with these arguments (the first is the program) and returns its exit code.
pub fn run(args: Vec<OsString>) -> u8 {
    let program = program_name(args.first());
    let parsed = Gaur::command()
        .bin_name(program.clone())
        .try_get_matches_from(&args)
        .and_then(|matches| Gaur::from_arg_matches(&matches));
    let gaur = match parsed {
        Ok(gaur) => gaur,
        Err(error) => return usage::report(&program, &args, &error),
    };
    let mut out = BufWriter::new(std::io::stdout());
    let outcome = gaur.verb.run(&mut out).and_then(|code| {
        out.flush()?;
        Ok(code)
    });
    let failure = match outcome {
        Ok(code) => return code,
        Err(failure) => failure,
    };
    // What was printed before the failure belongs before its message.
    let _ = out.flush();
    if !failure.silent {
        notice::say_as(&program, &failure);
    }
    failure.code
}

/// The name to speak under: `qemu-img` when called so, otherwise `gaur`.
fn program_name(first: Option<&OsString>) -> String {
    let name = first
        .map(Path::new)
        .and_then(Path::file_name)
        .and_then(|name| name.to_str());
    match name {
        Some(name) if name.ends_with("qemu-img") => name.to_owned(),
        _ => "gaur".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_consistent() {
        Gaur::command().debug_assert();
    }

    #[test]
    fn every_option_has_help() {
        let mut left: Vec<clap::Command> = Gaur::command().get_subcommands().cloned().collect();
        while let Some(verb) = left.pop() {
            assert!(verb.get_about().is_some(), "{}", verb.get_name());
            for argument in verb.get_arguments() {
                assert!(
                    argument.get_help().is_some() || argument.is_hide_set(),
                    "{} {}",
                    verb.get_name(),
                    argument.get_id()
                );
            }
            left.extend(verb.get_subcommands().cloned());
        }
    }

    #[test]
    fn error_prefix_is_the_name_the_program_was_called_by() {
        let name = |text: &str| program_name(Some(&OsString::from(text)));
        assert_eq!(name("/usr/bin/gaur"), "gaur");
        assert_eq!(name("./renamed"), "gaur");
        assert_eq!(name("/opt/bin/my-qemu-img"), "my-qemu-img");
        assert_eq!(program_name(None), "gaur");
    }
}
