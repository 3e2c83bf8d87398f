//! Options about opening images that verbs share.

use std::ffi::{OsStr, OsString};

use gaur_engine::{Format, Keys, References};
pub use gaur_server::keys::KeyOptions;
pub use gaur_server::open::*;
pub use gaur_server::references::ReferenceOptions;

use crate::failure::Failure;
use crate::image_spec::ImageSpec;

/// The image that a verb is about.
#[derive(Debug, clap::Args)]
pub struct SourceArgs {
    #[command(flatten)]
    how: SourceOptions,
    /// The image
    file: OsString,
}

impl SourceArgs {
    /// Which files it may refer to.
    pub fn references(&self) -> References {
        self.how.references()
    }

    /// What opens it if it is encrypted.
    pub fn keys(&self) -> Result<Keys, Failure> {
        self.how.keys()
    }

    /// Whether it may be an attacker's.
    pub fn is_untrusted(&self) -> bool {
        self.how.is_untrusted()
    }

    /// The image, not open yet.
    pub fn spec(&self) -> Result<ImageSpec, Failure> {
        self.how.spec(&self.file)
    }
}

/// How the image that a verb is about is named and opened.
#[derive(Debug, clap::Args)]
pub struct SourceOptions {
    /// Format of the image (probed by default)
    #[arg(short, long, value_name = "FMT", value_parser = format_parser())]
    pub format: Option<Format>,
    /// FILE is a list of options, driver=qcow2,file.filename=PATH,..
    #[arg(long, conflicts_with = "format")]
    image_opts: bool,
    #[command(flatten)]
    references: ReferenceOptions,
    #[command(flatten)]
    keys: KeyOptions,
}

impl SourceOptions {
    /// Which files it may refer to.
    pub fn references(&self) -> References {
        self.references.references()
    }

    /// What opens it if it is encrypted.
    pub fn keys(&self) -> Result<Keys, Failure> {
        self.keys.keys()
    }

    /// Whether the image may be an attacker's.
    pub fn is_untrusted(&self) -> bool {
        self.references.untrusted
    }

    /// Whether images are named by lists of options.
    pub fn is_options(&self) -> bool {
        self.image_opts
    }

    /// The image that `file` names, not open yet.
    pub fn spec(&self, file: &OsStr) -> Result<ImageSpec, Failure> {
        ImageSpec::parse(file, self.image_opts, self.format)
    }
}

/// How a verb prints what it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people
    Human,
    /// For programs
    Json,
}
