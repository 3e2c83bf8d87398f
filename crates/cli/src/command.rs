//! The command line: its verbs, their dispatch, and the printing of errors.

use std::ffi::{OsStr, OsString};
use std::io::{BufWriter, Write};
use std::path::Path;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use gaur_server::tls_objects;

use crate::failure::Failure;
use crate::{
    amend, bench, bitmap, check, commit, compare, completions, convert, create, dd, export, gc,
    info, man, map, measure, notice, publish, pull, qemu_io, qemu_nbd, rebase, resize, serve,
    snapshot, stream, ublk, usage,
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
    Publish(publish::Args),
    Pull(pull::Args),
    Gc(gc::Args),
    Commit(commit::Args),
    Rebase(rebase::Args),
    Stream(stream::Args),
    Resize(resize::Args),
    Amend(amend::Args),
    Snapshot(snapshot::Args),
    Bitmap(bitmap::Args),
    Bench(bench::Args),
    QemuIo(qemu_io::Args),
    QemuNbd(qemu_nbd::Args),
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
            Verb::Publish(args) => publish::run(args, out),
            Verb::Pull(args) => pull::run(args, out),
            Verb::Gc(args) => gc::run(args, out),
            Verb::Commit(args) => commit::run(args, out),
            Verb::Rebase(args) => rebase::run(args),
            Verb::Stream(args) => stream::run(args, out),
            Verb::Resize(args) => resize::run(args, out),
            Verb::Amend(args) => amend::run(args, out),
            Verb::Snapshot(args) => snapshot::run(args, out),
            Verb::Bitmap(args) => bitmap::run(args, out),
            Verb::Bench(args) => bench::run(args, out),
            Verb::QemuIo(args) => qemu_io::run(args, out),
            Verb::QemuNbd(args) => qemu_nbd::run(args, out),
            Verb::Completions(args) => completions::run(args, out),
            Verb::Man(args) => man::run(args, out),
        }
    }
}

/// Runs the command with these arguments (the first is the program) and returns its exit code.
pub fn run(mut args: Vec<OsString>) -> u8 {
    let program = program_name(&mut args);
    notice::speak_as(&program);
    let mut command = Gaur::command();
    if notice::is_qemu() {
        command = command.mut_subcommands(|verb| verb.args_override_self(true));
        drop_trace(&mut args);
        last_format_counts(&mut args);
        allow_as_qemu(&command, &mut args);
    }
    let parsed = command
        .bin_name(program.clone())
        .try_get_matches_from(&args)
        .and_then(|matches| Ok((Gaur::from_arg_matches(&matches)?, objects(&matches))));
    let (gaur, objects) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return usage::report(&program, &args, &error),
    };
    let mut out = BufWriter::with_capacity(OUT_BYTES, std::io::stdout());
    let named = tls_objects::name(&objects);
    let outcome = named.and_then(|()| gaur.verb.run(&mut out));
    let outcome = outcome.and_then(|code| {
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
        notice::say(&failure);
    }
    failure.code
}

/// The objects that the verb was given.
fn objects(matches: &clap::ArgMatches) -> Vec<String> {
    let mut verb = matches;
    while let Some((_, below)) = verb.subcommand() {
        verb = below;
    }
    let objects = verb.try_get_many::<String>("objects").ok().flatten();
    objects.into_iter().flatten().cloned().collect()
}

/// Bytes of output that are collected before they are written: as many as C's library does for a pipe, so that lines of
/// both outputs come in the order that scripts know.
const OUT_BYTES: usize = 4096;

/// The name to speak under: that of a program of QEMU when called so, by a link or as the first word, otherwise
/// `gaur`. The verb that is such a program becomes a word of the command line.
fn program_name(args: &mut Vec<OsString>) -> String {
    let name = args
        .first()
        .map(Path::new)
        .and_then(Path::file_name)
        .and_then(|name| name.to_str())
        .unwrap_or_default()
        .to_owned();
    if name.ends_with("qemu-img") {
        return name;
    }
    for verb in [QEMU_IO, QEMU_NBD] {
        if name.ends_with(verb) {
            args.insert(1, verb.into());
            return name;
        }
    }
    match args.get(1).and_then(|word| word.to_str()) {
        Some("qemu-img") => {
            args.remove(1);
            "qemu-img".to_owned()
        }
        Some(verb @ (QEMU_IO | QEMU_NBD)) => verb.to_owned(),
        _ => notice::OWN_NAME.to_owned(),
    }
}

const QEMU_IO: &str = "qemu-io";
const QEMU_NBD: &str = "qemu-nbd";

/// Whether a program that is called so is `qemu-nbd`.
pub fn is_qemu_nbd(called_by: &OsStr) -> bool {
    let name = Path::new(called_by).file_name().unwrap_or_default();
    name.as_encoded_bytes().ends_with(QEMU_NBD.as_bytes())
}

/// Drops what QEMU's program is told to trace, before its verb: its events are not ours.
fn drop_trace(args: &mut Vec<OsString>) {
    while let Some(word) = args.get(1).and_then(|word| word.to_str()) {
        let words = match word {
            "-T" | "--trace" => 2,
            _ if word.starts_with("--trace=") => 1,
            _ => return,
        };
        args.drain(1..args.len().min(1 + words));
    }
}

/// Drops formats that a later one overrides: QEMU's programs do not look whether they know those.
fn last_format_counts(args: &mut Vec<OsString>) {
    for option in ["-f", "-O"] {
        let places: Vec<usize> = (1..args.len()).filter(|&at| args[at] == option).collect();
        if let Some((_, earlier)) = places.split_last() {
            for &at in earlier.iter().rev() {
                args.drain(at..at + 2);
            }
        }
    }
}

/// Under the name of a program of QEMU an image may refer to any file, unless an option says otherwise, and secrets may
/// stand on the command line, as there.
fn allow_as_qemu(command: &clap::Command, args: &mut Vec<OsString>) {
    let said = |option: &str| {
        args.iter()
            .any(|word| word.as_encoded_bytes().starts_with(option.as_bytes()))
    };
    let limited = said("--allow") || said("--untrusted");
    let verb = args.get(1).and_then(|word| command.find_subcommand(word));
    let knows =
        |id: &str| verb.is_some_and(|verb| verb.get_arguments().any(|one| one.get_id() == id));
    let (any, inline) = (!limited && knows("allow_any"), knows("inline_secrets"));
    if any {
        args.insert(2, "--allow-any".into());
    }
    if inline {
        args.insert(2, "--inline-secrets".into());
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
        let called = |line: &[&str]| {
            let mut args: Vec<OsString> = line.iter().map(OsString::from).collect();
            let name = program_name(&mut args);
            let words: Vec<_> = args
                .iter()
                .skip(1)
                .map(|word| word.to_string_lossy())
                .collect();
            (name, words.join(" "))
        };
        let expect = |name: &str, words: &str| (name.to_owned(), words.to_owned());
        assert_eq!(called(&["/usr/bin/gaur", "info"]), expect("gaur", "info"));
        assert_eq!(called(&["./renamed"]), expect("gaur", ""));
        assert_eq!(
            called(&["/opt/bin/my-qemu-img", "map"]),
            expect("my-qemu-img", "map")
        );
        assert_eq!(
            called(&["gaur", "qemu-img", "map"]),
            expect("qemu-img", "map")
        );
        assert_eq!(
            called(&["qemu-io", "-c", "q"]),
            expect("qemu-io", "qemu-io -c q")
        );
        assert_eq!(
            called(&["gaur", "qemu-io", "x"]),
            expect("qemu-io", "qemu-io x")
        );
        assert_eq!(
            called(&["/usr/bin/qemu-nbd", "-t", "x"]),
            expect("qemu-nbd", "qemu-nbd -t x")
        );
        assert_eq!(
            called(&["gaur", "qemu-nbd", "x"]),
            expect("qemu-nbd", "qemu-nbd x")
        );
        assert_eq!(called(&[]), expect("gaur", ""));
    }
}
