//! Opening images for the verbs, and the options they share.

use std::path::{Path, PathBuf};

#[cfg(feature = "clap")]
use clap::builder::{PossibleValuesParser, TypedValueParser};
use gaur_block::{Access, Errno, Host, OpenError, Within};
use gaur_engine::{
    AllocationPolicy, DetectZeroes, ErrorKind, Format, Image, ImageError, OpenOptions, Opened,
    References,
};
use gaur_format::header::CryptMethod;
use gaur_reactor::{BlockingFile, BlockingHost, OpenFile, Window, block_on};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::references;

/// Reads a format's name; the allowed ones are listed when it is none of them.
#[cfg(feature = "clap")]
pub fn format_parser() -> impl TypedValueParser<Value = Format> {
    parser_of(Format::all())
}

/// The same for an image that is written.
#[cfg(feature = "clap")]
pub fn target_format_parser() -> impl TypedValueParser<Value = Format> {
    parser_of(Format::WRITABLE.into_iter())
}

/// Names of what is done with writes of zeros.
pub const DETECT_ZEROES: [(&str, DetectZeroes); 3] = [
    ("off", DetectZeroes::Off),
    ("on", DetectZeroes::On),
    ("unmap", DetectZeroes::Unmap),
];

/// The names of all formats, for people.
pub fn known_formats() -> String {
    let names: Vec<&str> = Format::all().map(Format::name).collect();
    names.join(", ")
}

#[cfg(feature = "clap")]
fn parser_of(formats: impl Iterator<Item = Format>) -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(formats.map(Format::name))
        .map(|name| Format::from_name(&name).unwrap_or(Format::Raw))
}

/// Reads the name of a policy for space.
#[cfg(feature = "clap")]
pub fn allocation_parser() -> impl TypedValueParser<Value = AllocationPolicy> {
    PossibleValuesParser::new(ALLOCATION_POLICIES.map(|(name, _)| name))
        .map(|name| AllocationPolicy::from_name(&name).unwrap_or_default())
}

/// The policies for space, by name.
pub const ALLOCATION_POLICIES: [(&str, AllocationPolicy); 2] = [
    (AllocationPolicy::Compact.name(), AllocationPolicy::Compact),
    (
        AllocationPolicy::Contiguous.name(),
        AllocationPolicy::Contiguous,
    ),
];

/// How the host's cache is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum CacheMode {
    /// Bypass it (O_DIRECT)
    #[cfg_attr(feature = "clap", value(alias = "off"))]
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
pub fn reading(format: Option<Format>, force_share: bool, references: References) -> OpenOptions {
    OpenOptions {
        format,
        read_only: true,
        force_share,
        ..OpenOptions::new(references)
    }
}

/// The backing chains that the images of a process may share.
pub type Bases = gaur_engine::Bases<BlockingFile>;

/// Opens an image and its chain for calls that block.
pub fn open(path: &Path, options: &OpenOptions) -> Result<Opened<BlockingFile>, Failure> {
    open_sharing(path, options, &Bases::default())
}

/// The same; its backing chain may be shared with images that were opened with the same `bases`.
pub fn open_sharing(
    path: &Path,
    options: &OpenOptions,
    bases: &Bases,
) -> Result<Opened<BlockingFile>, Failure> {
    explained(path, options, |path| {
        block_on(gaur_engine::open_sharing(
            &BlockingHost,
            path,
            options,
            bases,
        ))
    })
}

/// What an image is in place of a file as a whole.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// A part of its file.
    Window(Window),
    /// So many bytes of zeros, which are nowhere.
    Zeros(u64),
}

impl Place {
    /// Opens the file at a path in this way.
    pub(crate) fn open(
        self,
        path: &Path,
        within: Within<'_>,
        access: Access,
    ) -> Result<OpenFile, OpenError> {
        match self {
            Place::Window(window) => OpenFile::open_within(path, within, access)?.in_window(window),
            Place::Zeros(len_bytes) => OpenFile::zeros(len_bytes, access),
        }
    }
}

/// The same with an image in another place than a file as a whole. None of its chain is.
pub fn open_in_place(
    path: &Path,
    place: Place,
    options: &OpenOptions,
    bases: &Bases,
) -> Result<Opened<BlockingFile>, Failure> {
    let host = PlaceHost { path, place };
    explained(path, options, |path| {
        block_on(gaur_engine::open_sharing(&host, path, options, bases))
    })
}

/// Opens one file in a way of its own, and others as they are.
struct PlaceHost<'a> {
    path: &'a Path,
    place: Place,
}

impl Host for PlaceHost<'_> {
    type File = BlockingFile;

    async fn open_within(
        &self,
        name: &Path,
        within: Within<'_>,
        access: Access,
    ) -> Result<BlockingFile, OpenError> {
        let file = match name == self.path {
            true => self.place.open(name, within, access),
            false => OpenFile::open_within(name, within, access),
        };
        file.map(BlockingFile::new)
    }
}

/// Opens an image, with advice when that fails.
fn explained(
    path: &Path,
    options: &OpenOptions,
    open: impl FnOnce(&Path) -> Result<Opened<BlockingFile>, ImageError>,
) -> Result<Opened<BlockingFile>, Failure> {
    open(path).map_err(|error| {
        let failure = Failure::image(&path.to_string_lossy(), &error);
        match error.kind() {
            ErrorKind::Locked if options.read_only => failure.hint(LOCKED_HINT),
            ErrorKind::NotFound => hint_at_protocol(failure, &path.to_string_lossy()),
            ErrorKind::KeyMissing => failure.hint(KEY_HINT),
            ErrorKind::WrongKey => {
                failure.hint("all bytes of a key file count, a newline at its end too")
            }
            ErrorKind::ReferenceRefused => failure.hint(references::hint(&options.references)),
            _ => failure,
        }
    })
}

/// Refuses images that are encrypted in another way than the options say, by depth in the chain.
pub(crate) fn check_encryption(
    name: &str,
    told: &[(usize, CryptMethod)],
    image: &Image,
) -> Result<(), Failure> {
    for (depth, told) in told {
        let header = image.layers().get(*depth).and_then(|layer| layer.header());
        let found = header.map_or(CryptMethod::None, |header| header.crypt_method);
        if found != *told {
            let what = match found {
                CryptMethod::None => "is not encrypted".to_owned(),
                found => format!("has {}", found.name()),
            };
            let told = told.name();
            let message = format!("the options say encrypt.format={told}, but the image {what}");
            return Err(Failure::about(name, message));
        }
    }
    Ok(())
}

/// Whether a name is of an NBD export or of an object in a store, and no path.
fn is_elsewhere(name: &Path) -> bool {
    gaur_reactor::nbd::file_id(name).is_some() || gaur_block::is_remote(name)
}

/// The same file for a process that may run in another directory. What is elsewhere keeps its name.
pub fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    match is_elsewhere(path) {
        true => Ok(path.to_owned()),
        false => std::path::absolute(path).map_err(|error| Failure::io(path, &error)),
    }
}

/// The failure to open a file, with advice where there is some.
pub fn file_failed(name: &str, error: &OpenError) -> Failure {
    let failure = Failure::about(name, error.reason.clone());
    match error.errno {
        Errno::EAGAIN => failure.kind(ErrorKind::Locked).hint(LOCKED_HINT),
        Errno::ENOENT => hint_at_protocol(failure.kind(ErrorKind::NotFound), name),
        _ => failure,
    }
}

/// What QEMU would take for a protocol is a path here, and there is seldom such a file.
fn hint_at_protocol(failure: Failure, name: &str) -> Failure {
    match name.split_once(':') {
        _ if is_elsewhere(Path::new(name)) => failure,
        Some(("file", _)) => failure.hint("leave 'file:' out, an image is named by its path"),
        Some((protocol, rest)) if rest.starts_with("//") && !protocol.contains('/') => failure
            .hint(format!(
                "files, NBD exports and objects in stores are opened, '{protocol}' is not supported"
            )),
        _ => failure,
    }
}

const KEY_HINT: &str = "--key-file PATH gives it, or --object secret,id=ID,file=PATH with encrypt.key-secret=ID (of luks: key-secret=ID) among \
                        the image's options";

const LOCKED_HINT: &str = "-U reads it all the same";
