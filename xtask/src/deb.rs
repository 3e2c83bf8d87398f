//! `cargo xtask deb`: the Debian packages, of a release build. `packaging/build-deb` makes them.

use std::path::PathBuf;
use std::process::Command;

use crate::workspace::{self, succeed};

/// Build the Debian packages gaur and gaur-qemu-utils
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Folder for the packages [default: packages in the build folder]
    #[arg(long, value_name = "FOLDER")]
    to: Option<PathBuf>,
}

/// Builds the program and the packages, and prints where they are.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let mut build = workspace::cargo();
    succeed(build.args(["build", "--locked", "--release", "--package", "gaur-cli"]))?;
    let target = workspace::target()?;
    let to = arguments.to.clone();
    let mut pack = Command::new(workspace::root().join("packaging/build-deb"));
    pack.arg(target.join("release/gaur"));
    succeed(pack.arg(to.unwrap_or_else(|| target.join("packages"))))
}
