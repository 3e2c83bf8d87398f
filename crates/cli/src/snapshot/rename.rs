//! `gaur snapshot rename`: rename a snapshot.

use std::ffi::OsString;
use std::io::Write;

use super::operation::{self, Operation};
use super::target::{ChangeArgs, TargetArgs};
use crate::failure::Failure;

/// Give a snapshot another name
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur snapshot rename [OPTIONS] IMAGE SNAPSHOT NAME")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    act: ChangeArgs,
    /// The image, the snapshot's id or name, and its new name
    #[arg(required = true, value_name = "IMAGE SNAPSHOT NAME")]
    words: Vec<OsString>,
}

/// Renames it.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let wanted = ["the snapshot", "the new name"];
    let (target, [snapshot, name]) = args.target.split(&args.words, wanted)?;
    operation::perform(
        Operation::Rename { snapshot, name },
        &target,
        &args.act,
        out,
    )
}
