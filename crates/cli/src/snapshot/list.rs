//! `gaur snapshot list` and `info`: show the snapshots of an image.

use std::ffi::OsString;
use std::io::Write;

use gaur_engine::{Format, References};

use super::target::{self, Target, TargetArgs};
use crate::control::client::Client;
use crate::control::protocol::Command;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::json;
use crate::open::{self, Output, ReferenceOptions};
use crate::progress::Progress;
use crate::snapshot_report::{self, SnapshotInfo};
use crate::snapshot_table;

/// Whose snapshots, and how they are shown.
#[derive(Debug, clap::Args)]
struct LookArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Without effect: nothing that the image refers to is opened.
    #[command(flatten)]
    _references: ReferenceOptions,
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
}

/// List the snapshots of an image
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur snapshot list [OPTIONS] IMAGE")]
pub struct Args {
    #[command(flatten)]
    look: LookArgs,
    /// The image
    #[arg(value_name = "IMAGE")]
    words: Vec<OsString>,
}

/// Lists them.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let look = &args.look;
    let (target, []) = look.target.split(&args.words, [])?;
    print(&target, look.force_share, look.output, out)
}

/// Show what a snapshot is
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur snapshot info [OPTIONS] IMAGE SNAPSHOT")]
pub struct InfoArgs {
    #[command(flatten)]
    look: LookArgs,
    /// The image, and the snapshot's id or name
    #[arg(required = true, value_name = "IMAGE SNAPSHOT")]
    words: Vec<OsString>,
}

/// Prints one.
pub fn info(args: &InfoArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    let (target, [which]) = args.look.target.split(&args.words, ["the snapshot"])?;
    let all = details(&target, args.look.force_share)?;
    let found = find(&all, &which).ok_or_else(|| {
        let message = format!("no snapshot has the name or id {which:?}");
        match &target {
            Target::Image(spec) => Failure::about(spec.path(), message),
            Target::Server(server) => Failure::about(&server.socket, message),
        }
    })?;
    match args.look.output {
        Output::Json => json::write(out, found)?,
        Output::Human => snapshot_report::print(found, out)?,
    }
    Ok(0)
}

/// The one with this id, else the first with this name.
pub fn find<'a>(all: &'a [SnapshotInfo], which: &str) -> Option<&'a SnapshotInfo> {
    let by_id = all.iter().find(|one| one.id == which);
    by_id.or_else(|| all.iter().find(|one| one.name == which))
}

/// Prints the snapshots of the target.
pub fn print(
    target: &Target,
    force_share: bool,
    output: Output,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    let details = details(target, force_share)?;
    let list: Vec<SnapshotInfo> = details.into_iter().map(SnapshotInfo::of_qemu).collect();
    match output {
        Output::Json => json::write(out, &list)?,
        Output::Human => snapshot_report::print_table(&list, out)?,
    }
    Ok(0)
}

/// What is known of each snapshot of the target, oldest first.
pub fn details(target: &Target, force_share: bool) -> Result<Vec<SnapshotInfo>, Failure> {
    match target {
        Target::Image(spec) => read(spec, force_share).map_err(target::explain_lock),
        Target::Server(server) => {
            Client::connect(server)?.call(Command::List {}, &mut Progress::Quiet)
        }
    }
}

/// Only the table is read, so that images whose data cannot be read here can be looked at, too.
fn read(spec: &ImageSpec, force_share: bool) -> Result<Vec<SnapshotInfo>, Failure> {
    let file = spec.open_file(&open::reading(None, force_share, References::Nothing))?;
    if spec.format_of(&file)? != Format::Qcow2 {
        return Ok(Vec::new());
    }
    let snapshots = snapshot_table::read(&file, &file.header()?)?;
    Ok(snapshots.iter().map(SnapshotInfo::new).collect())
}
