//! `gaur snapshot`: internal snapshots, by sub-verbs or by the switches of qemu-img.

use std::ffi::OsString;
use std::io::Write;

use clap::Subcommand;
use gaur_engine::{Format, NewSnapshot};

use crate::failure::Failure;
use crate::open::{Output, ReferenceOptions, format_parser};

mod change;
mod extract;
mod list;
mod metadata;
mod operation;
mod save;
mod target;

pub use operation::Operation;
pub use target::Server;
use target::{ChangeArgs, TargetArgs};

/// Make, apply, delete and list the snapshots in an image, with or without the state of a machine
///
/// The switches -l, -c, -a and -d are those of qemu-img.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    override_usage = "gaur snapshot COMMAND [OPTIONS] IMAGE ..\n       \
                      gaur snapshot [-l | -c NAME | -a SNAPSHOT | -d SNAPSHOT] [OPTIONS] IMAGE"
)]
pub struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    /// List the snapshots (the default)
    #[arg(short, long, group = "what")]
    list: bool,
    /// Make a snapshot
    #[arg(short, long, value_name = "NAME", group = "what")]
    create: Option<String>,
    /// Make the disk what it was
    #[arg(short, long, value_name = "SNAPSHOT", group = "what")]
    apply: Option<String>,
    /// Delete a snapshot
    #[arg(short, long, value_name = "SNAPSHOT", group = "what")]
    delete: Option<String>,
    /// Format of the image (probed by default)
    #[arg(short, long, value_name = "FMT", value_parser = format_parser())]
    format: Option<Format>,
    /// IMAGE is a list of options, driver=qcow2,file.filename=PATH,..
    #[arg(long, conflicts_with = "format")]
    image_opts: bool,
    /// List even if another program is writing
    #[arg(short = 'U', long, conflicts_with_all = ["create", "apply", "delete"])]
    force_share: bool,
    #[command(flatten)]
    references: ReferenceOptions,
    /// Remove the image's persistent bitmaps with the first change instead of keeping them
    #[arg(long)]
    drop_bitmaps: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// The image
    image: Option<OsString>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    List(list::Args),
    Info(list::InfoArgs),
    /// Make a snapshot of the disk as it is
    #[command(override_usage = "gaur snapshot create [OPTIONS] IMAGE NAME")]
    Create(change::CreateArgs),
    /// Make the disk what it was when a snapshot was made; what it is now is lost
    #[command(override_usage = "gaur snapshot apply [OPTIONS] IMAGE SNAPSHOT")]
    Apply(change::Args),
    /// Delete a snapshot
    #[command(alias = "remove", alias = "del")]
    #[command(override_usage = "gaur snapshot delete [OPTIONS] IMAGE SNAPSHOT")]
    Delete(change::Args),
    /// Give a snapshot another name
    #[command(override_usage = "gaur snapshot rename [OPTIONS] IMAGE SNAPSHOT NAME")]
    Rename(change::RenameArgs),
    Save(save::Args),
    Extract(extract::Args),
}

/// Does what is asked for.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    match &args.verb {
        Some(Verb::List(args)) => list::run(args, out),
        Some(Verb::Info(args)) => list::info(args, out),
        Some(Verb::Create(args)) => args.run(out),
        Some(Verb::Apply(args)) => args.run(|snapshot| Operation::Apply { snapshot }, out),
        Some(Verb::Delete(args)) => args.run(|snapshot| Operation::Delete { snapshot }, out),
        Some(Verb::Rename(args)) => args.run(out),
        Some(Verb::Save(args)) => save::run(args, out),
        Some(Verb::Extract(args)) => extract::run(args, out),
        None => run_switches(args, out),
    }
}

fn run_switches(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let Some(image) = &args.image else {
        let failure = Failure::new("an image is needed");
        return Err(failure.hint("see 'gaur snapshot --help'"));
    };
    let place = TargetArgs {
        format: args.format,
        image_opts: args.image_opts,
        ..TargetArgs::default()
    };
    let (target, []) = place.split(std::slice::from_ref(image), [])?;
    match operation(args)? {
        Some(operation) => operation::perform(
            operation,
            &target,
            &ChangeArgs {
                references: args.references.clone(),
                drop_bitmaps: args.drop_bitmaps,
                quiet: args.quiet,
                ..ChangeArgs::default()
            },
            out,
        ),
        None => list::print(&target, args.force_share, Output::Human, out),
    }
}

/// The change that the switches ask for, if they ask for one.
fn operation(args: &Args) -> Result<Option<Operation>, Failure> {
    if let Some(name) = &args.create {
        let (date_sec, date_nsec) = metadata::now()?;
        let new = NewSnapshot {
            name: name.clone(),
            date_sec,
            date_nsec,
            ..NewSnapshot::default()
        };
        return Ok(Some(Operation::Create(new.into())));
    }
    let apply = args.apply.clone();
    let delete = args.delete.clone();
    Ok(apply
        .map(|snapshot| Operation::Apply { snapshot })
        .or(delete.map(|snapshot| Operation::Delete { snapshot })))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(words: &[&str]) -> Result<Args, clap::Error> {
        Line::try_parse_from([&["snapshot"], words].concat()).map(|line| line.args)
    }

    fn asked(words: &[&str]) -> Option<Operation> {
        let args = parse(words).expect("a valid command line");
        assert!(args.verb.is_none() && args.image == Some("a.qcow2".into()));
        operation(&args).expect("a clock")
    }

    #[test]
    fn the_switches_are_those_of_qemu_img() {
        assert_eq!(asked(&["a.qcow2"]), None);
        assert_eq!(asked(&["-l", "a.qcow2"]), None);
        let snapshot = || "monday".to_owned();
        assert_eq!(
            asked(&["-a", "monday", "a.qcow2"]),
            Some(Operation::Apply {
                snapshot: snapshot()
            })
        );
        assert_eq!(
            asked(&["-q", "-f", "qcow2", "a.qcow2", "-d", "monday"]),
            Some(Operation::Delete {
                snapshot: snapshot()
            })
        );
        let Some(Operation::Create(new)) = asked(&["-c", "monday", "a.qcow2"]) else {
            panic!("a snapshot is made");
        };
        let new = new.snapshot((0, 0));
        assert_eq!(
            (new.name.as_str(), new.id, new.icount),
            ("monday", None, None)
        );
        assert!(new.date_sec > 1_700_000_000, "now");
    }

    #[test]
    fn snapshot_switches_exclude_each_other() {
        for words in [
            &["-l", "-c", "x", "a.qcow2"][..],
            &["-a", "x", "-d", "x", "a.qcow2"],
            &["-U", "-c", "x", "a.qcow2"],
            &["-f", "raw", "--image-opts", "a.qcow2"],
            &["-q", "list", "a.qcow2"],
            &["a.qcow2", "b.qcow2"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn every_verb_takes_its_options() {
        for words in [
            &["list", "--output=json", "-U", "i"][..],
            &["list", "--control", "sock", "-x", "export"],
            &["info", "i", "s"],
            &["create", "-t", "none", "-p", "i", "s"],
            &[
                "create",
                "--date",
                "1",
                "--vm-clock",
                "2",
                "--icount=3",
                "--id=7",
                "i",
                "s",
            ],
            &["apply", "-f", "qcow2", "i", "s"],
            &[
                "delete",
                "--image-opts",
                "driver=qcow2,file.filename=i",
                "s",
            ],
            &["rename", "-q", "i", "s", "t"],
            &["save", "i", "s", "--state", "-"],
            &["extract", "--control", "sock", "s", "--to", "file"],
        ] {
            assert!(parse(words).expect("valid").verb.is_some(), "{words:?}");
        }
        for words in [
            &["create"][..],
            &["list", "-x", "export", "i"],
            &["list", "--control", "sock", "-f", "qcow2"],
            &["save", "--date", "-1", "i", "s"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
