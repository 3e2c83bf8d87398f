//! `gaur snapshot create`, `apply`, `delete` and `rename`: change the snapshots of an image.

use std::ffi::OsString;
use std::io::Write;

use super::metadata::MetadataArgs;
use super::operation::{self, Operation};
use super::target::{ChangeArgs, TargetArgs};
use crate::failure::Failure;

/// The command line of `apply` and `delete`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    act: ChangeArgs,
    /// The image, and the snapshot's id or name
    #[arg(required = true, value_name = "IMAGE SNAPSHOT")]
    words: Vec<OsString>,
}

impl Args {
    /// Does it to the snapshot.
    pub fn run(
        &self,
        operation: impl FnOnce(String) -> Operation,
        out: &mut dyn Write,
    ) -> Result<u8, Failure> {
        let (target, [snapshot]) = self.target.split(&self.words, ["the snapshot"])?;
        operation::perform(operation(snapshot), &target, &self.act, out)
    }
}

/// The command line of `create`.
#[derive(Debug, clap::Args)]
pub struct CreateArgs {
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

impl CreateArgs {
    /// Makes the snapshot.
    pub fn run(&self, out: &mut dyn Write) -> Result<u8, Failure> {
        let (target, [name]) = self.target.split(&self.words, ["the name"])?;
        let new = self.metadata.snapshot(&name)?;
        operation::perform(Operation::Create(new.into()), &target, &self.act, out)
    }
}

/// The command line of `rename`.
#[derive(Debug, clap::Args)]
pub struct RenameArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    act: ChangeArgs,
    /// The image, the snapshot's id or name, and its new name
    #[arg(required = true, value_name = "IMAGE SNAPSHOT NAME")]
    words: Vec<OsString>,
}

impl RenameArgs {
    /// Renames the snapshot.
    pub fn run(&self, out: &mut dyn Write) -> Result<u8, Failure> {
        let wanted = ["the snapshot", "the new name"];
        let (target, [snapshot, name]) = self.target.split(&self.words, wanted)?;
        let operation = Operation::Rename { snapshot, name };
        operation::perform(operation, &target, &self.act, out)
    }
}
