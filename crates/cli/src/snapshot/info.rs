//! `gaur snapshot info`: show one snapshot in detail.

use std::ffi::OsString;
use std::io::Write;

use super::list;
use super::target::{Target, TargetArgs};
use crate::failure::Failure;
use crate::json;
use crate::open::Output;
use crate::snapshot_report::{self, SnapshotInfo};

/// Show what a snapshot is
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur snapshot info [OPTIONS] IMAGE SNAPSHOT")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The image, and the snapshot's id or name
    #[arg(required = true, value_name = "IMAGE SNAPSHOT")]
    words: Vec<OsString>,
}

/// Prints it.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let (target, [which]) = args.target.split(&args.words, ["the snapshot"])?;
    let all = list::details(&target, args.force_share)?;
    let found = find(&all, &which).ok_or_else(|| {
        let message = format!("no snapshot has the name or id {which:?}");
        match &target {
            Target::Image(spec) => Failure::about(spec.path(), message),
            Target::Server(server) => Failure::about(&server.socket, message),
        }
    })?;
    match args.output {
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
