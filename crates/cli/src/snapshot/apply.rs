//! `gaur snapshot apply`: revert the disk to a snapshot.

use std::ffi::OsString;
use std::io::Write;

use super::operation::{self, Operation};
use super::target::{ChangeArgs, TargetArgs};
use crate::failure::Failure;

/// Make the disk what it was when a snapshot was made; what it is now is lost
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur snapshot apply [OPTIONS] IMAGE SNAPSHOT")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    act: ChangeArgs,
    /// The image, and the snapshot's id or name
    #[arg(required = true, value_name = "IMAGE SNAPSHOT")]
    words: Vec<OsString>,
}

/// Does it.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let (target, [snapshot]) = args.target.split(&args.words, ["the snapshot"])?;
    operation::perform(Operation::Apply { snapshot }, &target, &args.act, out)
}
