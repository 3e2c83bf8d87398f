//! What the two sides agreed on.

use super::wire::{PAYLOAD_MAX_BYTES, export_flag};

/// What a server says about one of its exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Several connections see each other's writes, and a flush on one covers all.
    pub multi_conn: bool,
    /// Requests of this size and alignment run at full speed (bytes, a power of two).
    pub preferred_block: u32,
}

impl ExportInfo {
    /// Transmission flags; some exist only with structured replies or extended headers.
    pub fn flags(&self, style: Style) -> u16 {
        let mut flags = export_flag::HAS_FLAGS
            | export_flag::SEND_FLUSH
            | export_flag::SEND_FUA
            | export_flag::SEND_CACHE;
        if self.read_only {
            flags |= export_flag::READ_ONLY;
        } else {
            flags |= export_flag::SEND_TRIM
                | export_flag::SEND_WRITE_ZEROES
                | export_flag::SEND_FAST_ZERO;
        }
        if style >= Style::Structured {
            flags |= export_flag::SEND_DF;
        }
        if style == Style::Extended {
            flags |= export_flag::BLOCK_STAT_PAYLOAD;
        }
        if self.multi_conn {
            flags |= export_flag::CAN_MULTI_CONN;
        }
        flags
    }

    /// Minimum, preferred and maximum block size. Any offset and length is served, so the minimum
    /// is 1; the preferred size is what the protocol allows, 512 bytes to 32 MiB.
    pub fn block_sizes(&self) -> [u32; 3] {
        [
            1,
            self.preferred_block.clamp(512, PAYLOAD_MAX_BYTES),
            PAYLOAD_MAX_BYTES,
        ]
    }
}

/// How requests and replies are written, in the order of what they can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Style {
    /// Compact requests, simple replies.
    Simple,
    /// Compact requests, structured replies where they say more.
    Structured,
    /// Extended requests and replies with 64-bit lengths. (An extension of the protocol, which
    /// QEMU's and libnbd's clients ask for.)
    Extended,
}

/// What the transmission phase works with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Number of the export.
    pub export: usize,
    /// Its size in bytes when the client was told.
    pub size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// How both sides write.
    pub style: Style,
    /// The metadata contexts that were chosen for this export.
    pub contexts: Contexts,
}

/// A set of metadata contexts, by their numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contexts(u128);

impl Contexts {
    /// These, each below 128.
    pub const fn of(ids: &[u32]) -> Contexts {
        let (mut bits, mut at) = (0, 0);
        while at < ids.len() {
            bits |= 1 << ids[at];
            at += 1;
        }
        Contexts(bits)
    }

    /// Adds one.
    pub fn insert(&mut self, id: u32) {
        self.0 |= 1_u128.checked_shl(id).unwrap_or_default();
    }

    /// Whether one is among them.
    pub fn contains(self, id: u32) -> bool {
        self.0 & 1_u128.checked_shl(id).unwrap_or_default() != 0
    }

    /// How many there are.
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Their numbers, lowest first.
    pub fn ids(self) -> impl Iterator<Item = u32> {
        (0..u128::BITS).filter(move |id| self.contains(*id))
    }
}

impl FromIterator<u32> for Contexts {
    fn from_iter<T: IntoIterator<Item = u32>>(ids: T) -> Contexts {
        let mut contexts = Contexts::default();
        ids.into_iter().for_each(|id| contexts.insert(id));
        contexts
    }
}
