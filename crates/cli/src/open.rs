//! Opening images for the verbs, and the options they share.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use gaur_block::{Errno, OpenError};
use gaur_engine::{AllocationPolicy, ErrorKind, Format, OpenOptions, Opened};
use gaur_reactor::{BlockingFile, BlockingHost, block_on};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Reads a format's name; the allowed ones are listed when it is none of them.
pub fn format_parser() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["qcow2", "raw"])
        .map(|name| Format::from_name(&name).unwrap_or(Format::Raw))
}

/// Names of the policies for space.
pub const ALLOCATION_POLICIES: [&str; 2] = [
    AllocationPolicy::Compact.name(),
    AllocationPolicy::Contiguous.name(),
];

/// Reads the name of a policy for space.
pub fn allocation_parser() -> impl TypedValueParser<Value = AllocationPolicy> {
    PossibleValuesParser::new(ALLOCATION_POLICIES)
        .map(|name| AllocationPolicy::from_name(&name).unwrap_or_default())
}

/// How a verb prints what it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people
    Human,
    /// For programs
    Json,
}

/// How the host's cache is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheMode {
    /// Bypass it (O_DIRECT)
    #[value(alias = "off")]
    None,
    /// Use it; a flush reaches the disk
    #[default]
    Writeback,
    /// Use it; every write reaches the disk before it is done
    Writethrough,
    /// Bypass it; every write reaches the disk before it is done
    Directsync,
    /// Use it; a flush does nothing
    Unsafe,
}

impl CacheMode {
    /// Whether the host's page cache is bypassed.
    pub fn direct(self) -> bool {
        matches!(self, CacheMode::None | CacheMode::Directsync)
    }

    /// Whether every write is durable before it completes.
    pub fn writethrough(self) -> bool {
        matches!(self, CacheMode::Writethrough | CacheMode::Directsync)
    }
}

/// Options for reading `format` (probed if `None`) without changing anything.
pub fn reading(format: Option<Format>, force_share: bool) -> OpenOptions {
    OpenOptions {
        format,
        read_only: true,
        force_share,
        ..OpenOptions::default()
    }
}

/// Opens an image and its chain for calls that block.
pub fn open(name: &str, options: &OpenOptions) -> Result<Opened<BlockingFile>, Failure> {
    block_on(gaur_engine::open(&BlockingHost, name, options)).map_err(|error| {
        let failure = Failure::image(name, &error);
        match error.kind() {
            ErrorKind::Locked if options.read_only => failure.hint(LOCKED_HINT),
            _ => failure,
        }
    })
}

/// The failure to open a file, with advice where there is some.
pub fn file_failed(name: &str, error: &OpenError) -> Failure {
    let failure = Failure::about(name, error.reason.clone());
    match error.errno {
        Errno::EAGAIN => failure.kind(ErrorKind::Locked).hint(LOCKED_HINT),
        _ => failure,
    }
}

const LOCKED_HINT: &str = "-U reads it all the same";

/// Where the backing file `backing` of the image `overlay` is, as far as its name tells: a relative
/// path counts from the directory of the overlay; a name with a protocol is left alone.
pub fn full_backing_name(overlay: &str, backing: &str) -> String {
    let protocol = backing
        .split_once(':')
        .is_some_and(|(before, _)| !before.contains('/'));
    if protocol || backing.starts_with('/') {
        return backing.to_owned();
    }
    let directory = overlay.rfind('/').map_or("", |slash| &overlay[..=slash]);
    format!("{directory}{backing}")
}

/// The path to open for it.
pub fn backing_path(overlay: &str, backing: &str) -> String {
    let name = full_backing_name(overlay, backing);
    match name.strip_prefix("file:") {
        Some(path) => path.to_owned(),
        None => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backing_files_are_found_from_the_directory_of_the_overlay() {
        assert_eq!(full_backing_name("d/o", "../b"), "d/../b");
        assert_eq!(full_backing_name("o", "b"), "b");
        assert_eq!(full_backing_name("d/o", "/b"), "/b");
        assert_eq!(full_backing_name("d/o", "nbd://x/y"), "nbd://x/y");
        assert_eq!(full_backing_name("d/o", "./a:b"), "d/./a:b");
        assert_eq!(backing_path("d/o", "file:b"), "b");
    }
}
