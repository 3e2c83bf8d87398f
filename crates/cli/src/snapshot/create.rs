//! `gaur snapshot create`: make a snapshot of the disk.

use std::ffi::OsString;
use std::io::Write;

use super::metadata::MetadataArgs;
use super::operation::{self, Operation};
use super::target::{ChangeArgs, TargetArgs};
use crate::failure::Failure;

/// Make a snapshot of the disk as it is
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur snapshot create [OPTIONS] IMAGE NAME")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    act: ChangeArgs,
    #[command(flatten)]
    metadata: MetadataArgs,
    /// The image, and the name of the new snapshot
    #[arg(required = true, value_name = "IMAGE NAME")]
    words: Vec<OsString>,
}

/// Makes it.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let (target, [name]) = args.target.split(&args.words, ["the name"])?;
    let new = args.metadata.snapshot(&name)?;
    operation::perform(Operation::Create(new), &target, &args.act, out)
}
