//! Errors: what is wrong in an image, in which structure, at which offset.
//!
//! [`Error`] is for whole structures (header, snapshot table, options of a new image): it says what
//! is wrong, in which structure and at which byte, what was found and what is allowed. [`Corruption`]
//! is for single table entries on the data path: it is `Copy`, needs no memory, and the caller who
//! knows where the entry came from adds that.

use alloc::borrow::Cow;
use alloc::boxed::Box;
use alloc::string::String;
use core::fmt;

/// What sort of failure an [`Error`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The bytes are not a qcow2 image at all.
    NotQcow2,
    /// The image breaks the format.
    Malformed,
    /// Bytes that must be there are missing.
    Truncated,
    /// The format allows it, this crate does not know it.
    Unsupported,
    /// The format may allow it, a limit of this crate does not.
    TooLarge,
    /// What the caller asked for (a new image, a name) makes no sense.
    InvalidInput,
}

/// What is wrong, where, and what would have been right. Prints as one line.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Inner>);

#[derive(Clone, PartialEq, Eq)]
struct Inner {
    kind: ErrorKind,
    structure: &'static str,
    offset: Option<u64>,
    what: Cow<'static, str>,
    found: Option<String>,
    allowed: Option<Cow<'static, str>>,
}

impl Error {
    /// `what` is wrong in `structure`.
    pub(crate) fn new(
        kind: ErrorKind,
        structure: &'static str,
        what: impl Into<Cow<'static, str>>,
    ) -> Error {
        Error(Box::new(Inner {
            kind,
            structure,
            offset: None,
            what: what.into(),
            found: None,
            allowed: None,
        }))
    }

    /// Adds the byte of the structure at which it was seen.
    pub(crate) fn at(mut self, offset: u64) -> Error {
        self.0.offset = Some(offset);
        self
    }

    /// Adds what was found.
    pub(crate) fn found(mut self, found: impl fmt::Display) -> Error {
        self.0.found = Some(alloc::format!("{found}"));
        self
    }

    /// Adds what would have been right.
    pub(crate) fn allowed(mut self, allowed: impl Into<Cow<'static, str>>) -> Error {
        self.0.allowed = Some(allowed.into());
        self
    }

    /// The same fault, seen as one of what the caller asked for.
    pub(crate) fn into_invalid_input(mut self) -> Error {
        self.0.kind = ErrorKind::InvalidInput;
        self
    }

    /// What sort of failure it is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The structure it was found in: `"header"`, `"snapshot table"`, `"options"`.
    pub fn structure(&self) -> &'static str {
        self.0.structure
    }

    /// The byte, counted from the start of the structure, where that is known.
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        write!(out, "{}", inner.structure)?;
        if let Some(offset) = inner.offset {
            write!(out, " byte {offset}")?;
        }
        write!(out, ": {}", inner.what)?;
        match (&inner.found, &inner.allowed) {
            (Some(found), Some(allowed)) => write!(out, " (found {found}, allowed {allowed})"),
            (Some(found), None) => write!(out, " (found {found})"),
            (None, Some(allowed)) => write!(out, " (allowed {allowed})"),
            (None, None) => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?}: {self}", self.0.kind)
    }
}

impl core::error::Error for Error {}

/// How a table entry is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
#[non_exhaustive]
pub enum CorruptionKind {
    /// L1 entry: the L2 table is not at a cluster boundary.
    #[error("l1 entry points to an l2 table that is not cluster aligned")]
    L2TableUnaligned,
    /// L1 entry: reserved bits are set.
    #[error("l1 entry has reserved bits set")]
    L1Reserved,
    /// L1 entry: the copied flag, and no L2 table.
    #[error("l1 entry has the copied flag and no l2 table")]
    CopiedWithoutTable,
    /// L2 entry: the data cluster is not at a cluster boundary.
    #[error("l2 entry points to a data cluster that is not cluster aligned")]
    DataUnaligned,
    /// L2 entry: the zero flag in an image of version 2.
    #[error("l2 entry has the zero flag in a version 2 image")]
    ZeroFlagInV2,
    /// L2 entry: a subcluster is both allocated and zero.
    #[error("l2 entry has subclusters that are both allocated and zero")]
    SubclusterBothSet,
    /// L2 entry: allocated subclusters without a cluster.
    #[error("l2 entry has allocated subclusters but no cluster")]
    SubclusterWithoutCluster,
    /// L2 entry: compressed data beyond what a host offset can say.
    #[error("l2 entry points to compressed data beyond 2^56 bytes")]
    CompressedOutside,
    /// L2 entry: reserved bits are set.
    #[error("l2 entry has reserved bits set")]
    L2Reserved,
    /// Extended L2 entry: bit 0, which only standard entries use.
    #[error("extended l2 entry has bit 0 set, which is reserved there")]
    ZeroFlagInExtended,
    /// Compressed L2 entry with the copied flag.
    #[error("compressed l2 entry has the copied flag")]
    CompressedCopied,
    /// Compressed L2 entry with a subcluster bitmap.
    #[error("compressed l2 entry has a subcluster bitmap")]
    CompressedBitmap,
    /// Compressed L2 entry in an image with an external data file.
    #[error("l2 entry is compressed although the image has an external data file")]
    CompressedInDataFile,
    /// L2 entry: a cluster of the data file elsewhere than at its guest offset.
    #[error("l2 entry maps a cluster of the data file to another guest offset than its own")]
    DataFileOffset,
    /// Refcount table entry: reserved bits are set.
    #[error("refcount table entry has reserved bits set")]
    RefcountTableReserved,
    /// Refcount table entry: the block is not at a cluster boundary.
    #[error("refcount table entry points to a block that is not cluster aligned")]
    RefcountBlockUnaligned,
    /// Refcount table entry: the block lies beyond what a host offset can say.
    #[error("refcount table entry points to a block beyond 2^56 bytes")]
    RefcountBlockOutside,
    /// Bitmap table entry: reserved bits are set.
    #[error("bitmap table entry has reserved bits set")]
    BitmapReserved,
    /// Bitmap table entry: the data is not at a cluster boundary.
    #[error("bitmap table entry points to a cluster that is not cluster aligned")]
    BitmapUnaligned,
}

/// A table entry that cannot be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{kind} ({raw:#018x})")]
pub struct Corruption {
    /// How it is wrong.
    pub kind: CorruptionKind,
    /// The entry as it stands in the table; for a fault of a subcluster bitmap, the bitmap.
    pub raw: u64,
}

impl Corruption {
    /// An entry `raw` that is wrong as `kind` says.
    #[inline]
    pub(crate) const fn new(kind: CorruptionKind, raw: u64) -> Corruption {
        Corruption { kind, raw }
    }
}
