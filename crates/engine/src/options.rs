//! How an image is opened.

use std::path::PathBuf;
use std::sync::Arc;

use gaur_block::FileId;
use gaur_foreign::Format as ForeignFormat;
use gaur_format::{AllocationPolicy, ImageFormat};

use crate::cache_options::CacheOptions;
use crate::commit_log::CommitLog;
use crate::error::{ErrorKind, ImageError};
use crate::keys::Keys;
use crate::references::References;

/// What the bytes of a file mean: the formats that this engine knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// A qcow2 image, version 2 or 3.
    Qcow2,
    /// The disk's bytes as they are.
    Raw,
    /// A LUKS container, version 1.
    Luks,
    /// An image of another program, which can only be read.
    Foreign(ForeignFormat),
}

impl Format {
    /// The formats that can be written.
    pub const WRITABLE: [Format; 3] = [Format::Qcow2, Format::Raw, Format::Luks];

    /// Every format.
    pub fn all() -> impl Iterator<Item = Format> {
        let foreign = ForeignFormat::ALL.into_iter().map(Format::Foreign);
        Format::WRITABLE.into_iter().chain(foreign)
    }

    /// The name by which images and command lines call it.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Qcow2 => "qcow2",
            Format::Raw => "raw",
            Format::Luks => "luks",
            Format::Foreign(foreign) => foreign.name(),
        }
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<Format> {
        match name {
            "qcow2" => Some(Format::Qcow2),
            "raw" => Some(Format::Raw),
            "luks" => Some(Format::Luks),
            name => ForeignFormat::from_name(name).map(Format::Foreign),
        }
    }

    /// The format that a file was found to have ([`crate::probe`]).
    ///
    /// # Errors
    /// [`ErrorKind::ForeignFormat`] when this engine does not read it.
    pub fn supported(found: ImageFormat) -> Result<Format, ImageError> {
        if let Some(known) = Format::from_name(found.name()) {
            return Ok(known);
        }
        let text = format!(
            "looks like a {found} image, which is not supported; \
             'qemu-img convert -f {} -O qcow2' makes one that is",
            found.name()
        );
        Err(ImageError::new(ErrorKind::ForeignFormat, text))
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.name())
    }
}

/// What a caller says of a backing file; `None` is as the image above says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackingFile {
    /// How its bytes are read.
    pub format: Option<Format>,
    /// Where it is; wherever that may be.
    pub path: Option<PathBuf>,
}

/// What is done with writes of nothing but zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DetectZeroes {
    /// They are written like any other; nobody looks.
    #[default]
    Off,
    /// They become zeros by the mapping, and keep their space.
    On,
    /// The same, and their space is given back.
    Unmap,
}

/// Why clusters of an image were freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FreedBy {
    /// A discard, or zeros written over them.
    Request,
    /// A change of the internal snapshots.
    Snapshot,
    /// Anything else.
    Other,
}

/// Whether freed space is given back to the host file, by what has freed it; `None` is as
/// [`OpenOptions::discard`] says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PassDiscard {
    /// Discards, and zeros written over data.
    pub request: Option<bool>,
    /// Snapshots that were deleted or applied.
    pub snapshot: Option<bool>,
    /// Everything else: clusters that were compressed and are not any more, tables that have moved.
    pub other: Option<bool>,
}

/// One of the write-order rules, broken on purpose so that the crash simulator can show that it
/// would notice. The rules are in `docs/ordering.md`.
#[cfg(feature = "broken-order")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BrokenRule {
    /// References become durable before the refcounts that cover them.
    O1,
    /// Mappings become durable before the data they map.
    O2,
    /// Refcounts go down, and clusters are handed out again, before the reference is gone.
    O3,
    /// A flush returns before everything that completed before it is durable.
    O4,
    /// A switch of the whole image is made before what it switches to is durable.
    O5,
    /// The data file is not flushed with the image file.
    DataFlush,
    /// Space is given back although the guest has data there again.
    O7,
    /// The disk changes although its bitmaps are not marked in use.
    O8,
    /// A region of the disk changes before its mark in the write-intent map is durable.
    O9,
    /// A copy-on-read does not look again whether the guest has written there since.
    Copy,
    /// A check of the open image is not told what changes meanwhile. Nothing is damaged; it finds what is not there.
    Watch,
}

/// How an image is opened. Made by [`OpenOptions::new`] and changed field by field.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// What the top file holds; `None` looks at its first and last bytes. A guest can make a raw disk
    /// look like qcow2, so that a raw file is only opened for writing when it is called so here.
    pub format: Option<Format>,
    /// Refuse writes, and allow others to have the image open.
    pub read_only: bool,
    /// Bypass the host's page cache.
    pub direct: bool,
    /// The same for the files below the top one; `None` is as for the top one.
    pub backing_direct: Option<bool>,
    /// Take the locks by which QEMU keeps two programs from writing one image.
    pub lock: bool,
    /// Open even if another process is writing; only together with `read_only`.
    pub force_share: bool,
    /// Which files the image may have opened by naming them. There is no default: who opens an image knows
    /// who made it.
    pub references: References,
    /// What opens the layers that are encrypted.
    pub keys: Keys,
    /// The external data file of the top image, instead of the one that it names.
    pub data_file: Option<PathBuf>,
    /// What the caller says of the backing files, from that of the top on, instead of what the images say.
    pub backing_files: Vec<BackingFile>,
    /// Open the chain of backing files; without it what the top image does not have reads as zeros.
    pub backing: bool,
    /// The chain ends above this file: what lies from it on down reads as zeros, and was not written. Opening fails
    /// if the chain has no such file below its top.
    pub stop_at: Option<FileId>,
    /// Memory for metadata of the top image; those below have the defaults.
    pub cache: CacheOptions,
    /// Freed space is given back to the host file.
    pub discard: bool,
    /// The same by what has freed it.
    pub pass_discard: PassDiscard,
    /// What is discarded keeps its place in the image, and only its space is given back: the file does not become
    /// fragmented. Needs version 3.
    pub discard_no_unref: bool,
    /// What is done with writes of zeros.
    pub detect_zeroes: DetectZeroes,
    /// Zeros that are written are marked in the image also where it reads as zeros already and has nothing below, as
    /// QEMU does; else that changes nothing and costs nothing. Needs version 3.
    pub mark_zeros: bool,
    /// What a read finds as data below the top image is left in it. Only for an image that is written to.
    pub copy_on_read: bool,
    /// What is done with the host's space; `None` as the image says, else compact.
    pub allocation: Option<AllocationPolicy>,
    /// Show the disk as it was when this internal snapshot (an id or a name) of the top image was made;
    /// only together with `read_only`.
    pub snapshot: Option<String>,
    /// The same for the backing file of the top image, which may be written to then: an overlay over
    /// a snapshot.
    pub backing_snapshot: Option<String>,
    /// Remove the persistent bitmaps of the top image with the first change to it, instead of keeping them.
    pub drop_bitmaps: bool,
    /// Note commits of the top image here, for a process that takes over when this one is killed.
    pub commit_log: Option<Arc<dyn CommitLog>>,
    /// Break one rule of the write order, for tests of the tests.
    #[cfg(feature = "broken-order")]
    pub broken: Option<BrokenRule>,
}

impl OpenOptions {
    /// For reading and writing the image as it says itself, which may refer to these files.
    pub fn new(references: References) -> OpenOptions {
        OpenOptions {
            references,
            format: None,
            read_only: false,
            direct: false,
            backing_direct: None,
            lock: true,
            force_share: false,
            keys: Keys::default(),
            data_file: None,
            backing_files: Vec::new(),
            backing: true,
            stop_at: None,
            cache: CacheOptions::default(),
            discard: true,
            pass_discard: PassDiscard::default(),
            discard_no_unref: false,
            detect_zeroes: DetectZeroes::Off,
            mark_zeros: false,
            copy_on_read: false,
            allocation: None,
            snapshot: None,
            backing_snapshot: None,
            drop_bitmaps: false,
            commit_log: None,
            #[cfg(feature = "broken-order")]
            broken: None,
        }
    }

    /// Whether space is given back that was freed in this way.
    pub(crate) fn gives_back(&self, freed: FreedBy) -> bool {
        let told = match freed {
            FreedBy::Request => self.pass_discard.request,
            FreedBy::Snapshot => self.pass_discard.snapshot,
            FreedBy::Other => self.pass_discard.other,
        };
        told.unwrap_or(self.discard)
    }

    /// Whether what a request has freed has to be told from what else is free.
    pub(crate) fn tells_requests(&self) -> bool {
        self.gives_back(FreedBy::Request) != self.gives_back(FreedBy::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_formats_map_both_ways() {
        for format in Format::all() {
            assert_eq!(Format::from_name(format.name()), Some(format));
        }
        for known in ImageFormat::all() {
            let supported = Format::supported(known);
            assert_eq!(Format::from_name(known.name()), supported.ok());
        }
        assert_eq!(Format::from_name("qed"), None);
        assert_eq!(Format::from_name("QCOW2"), None);
    }
}
