//! What kernel and server agree on before anything else.

use super::wire::{Fields, MAJOR, MINOR, MINOR_MIN, PAGES_MAX, PAYLOAD_MAX, init_flag};

/// What is of use here, if the kernel has it.
const WANTED: u64 = init_flag::ASYNC_READ
    | init_flag::BIG_WRITES
    | init_flag::ASYNC_DIO
    | init_flag::MAX_PAGES
    | init_flag::HANDLE_KILLPRIV_V2
    | init_flag::INIT_EXT
    | init_flag::DIRECT_IO_ALLOW_MMAP;

/// What the kernel offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The protocol it speaks.
    pub major: u32,
    /// The same, the finer part.
    pub minor: u32,
    /// The most it reads ahead, in bytes.
    pub max_readahead: u32,
    /// What it can do ([`init_flag`]).
    pub flags: u64,
}

impl Offer {
    pub(super) fn read(fields: &mut Fields<'_>) -> Offer {
        let (major, minor) = (fields.u32(), fields.u32());
        // What follows came with later versions, and a kernel of another major one may differ.
        let mut later = Fields::of(fields.rest());
        let max_readahead = later.u32();
        let low = u64::from(later.u32());
        let extended = low & init_flag::INIT_EXT != 0;
        let high = if extended { u64::from(later.u32()) } else { 0 };
        Offer {
            major,
            minor,
            max_readahead,
            flags: low | high << 32,
        }
    }
}

/// Why a kernel cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the kernel speaks version {major}.{minor} of FUSE, {MAJOR}.{MINOR_MIN} is needed at least"
)]
pub struct Unusable {
    /// The version it speaks.
    pub major: u32,
    /// The same, the finer part.
    pub minor: u32,
}

/// What holds between kernel and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The finer part of the version.
    pub minor: u32,
    /// What both can do ([`init_flag`]).
    pub flags: u64,
    /// The most the kernel reads ahead, in bytes.
    pub max_readahead: u32,
    /// The most requests that no program waits for, as asynchronous ones are.
    pub max_background: u16,
}

/// Bytes of `struct fuse_init_out`.
pub(super) const LEN: usize = 64;

impl Terms {
    /// The answer to an offer; `None` when the kernel has to ask again in the version that the answer
    /// names.
    ///
    /// # Errors
    /// When the kernel is too old.
    pub fn agree(offer: &Offer, max_background: u16) -> Result<Option<Terms>, Unusable> {
        if offer.major > MAJOR {
            return Ok(None);
        }
        let needed = init_flag::MAX_PAGES | init_flag::BIG_WRITES;
        if offer.major < MAJOR || offer.minor < MINOR_MIN || offer.flags & needed != needed {
            return Err(Unusable {
                major: offer.major,
                minor: offer.minor,
            });
        }
        Ok(Some(Terms {
            minor: offer.minor.min(MINOR),
            flags: offer.flags & WANTED,
            max_readahead: offer.max_readahead.min(PAYLOAD_MAX as u32),
            max_background: max_background.max(1),
        }))
    }

    /// What a kernel of a later major version is told.
    pub(super) fn put_version_only(put: &mut impl FnMut(&[u8])) {
        put(&MAJOR.to_ne_bytes());
        put(&MINOR.to_ne_bytes());
        put(&[0; LEN - 8]);
    }

    pub(super) fn put(&self, put: &mut impl FnMut(&[u8])) {
        // Reads ahead stop when so many are under way; all others may go on.
        let congestion = self.max_background - self.max_background / 4;
        let time_granularity_ns = 1_u32;
        put(&MAJOR.to_ne_bytes());
        put(&self.minor.to_ne_bytes());
        put(&self.max_readahead.to_ne_bytes());
        put(&(self.flags as u32).to_ne_bytes());
        put(&self.max_background.to_ne_bytes());
        put(&congestion.to_ne_bytes());
        put(&(PAYLOAD_MAX as u32).to_ne_bytes());
        put(&time_granularity_ns.to_ne_bytes());
        put(&PAGES_MAX.to_ne_bytes());
        let map_alignment = 0_u16;
        put(&map_alignment.to_ne_bytes());
        put(&((self.flags >> 32) as u32).to_ne_bytes());
        // Stack depth, time limit and what is not in use yet.
        put(&[0; LEN - 36]);
    }
}
