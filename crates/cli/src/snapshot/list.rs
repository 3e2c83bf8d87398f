//! `gaur snapshot list`: list the snapshots of an image.

use std::ffi::OsString;
use std::io::Write;

use gaur_engine::Format;

use super::target::{self, Target, TargetArgs};
use crate::control::client::Client;
use crate::control::protocol::Command;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::json;
use crate::open::{self, Output};
use crate::progress::Progress;
use crate::snapshot_report::{self, SnapshotInfo};
use crate::snapshot_table;

/// List the snapshots of an image
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur snapshot list [OPTIONS] IMAGE")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The image
    #[arg(value_name = "IMAGE")]
    words: Vec<OsString>,
}

/// Lists them.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let (target, []) = args.target.split(&args.words, [])?;
    print(&target, args.force_share, args.output, out)
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
    let file = spec.open_file(&open::reading(None, force_share))?;
    if spec.format_of(&file)? == Format::Raw {
        return Ok(Vec::new());
    }
    let snapshots = snapshot_table::read(&file, &file.header()?)?;
    Ok(snapshots.iter().map(SnapshotInfo::new).collect())
}
