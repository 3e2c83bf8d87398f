//! What becomes of a wrong L1 or L2 entry. No entry changes what a read returns today, apart from entries
//! that fail every read: of these a part is made readable (`docs/format.md`).

use crate::addr::HostOffset;
use crate::check::tally::Tally;
use crate::geometry::Version;
use crate::l1::{COPIED, OFFSET_MASK};
use crate::l2::{COMPRESSED, ZERO};

/// Reserved bits of an L1 entry.
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
/// Reserved bits of an L2 entry that is not compressed.
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// What a walk does to entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Aim {
    /// Change what is wrong, and clear copied flags that will not be true.
    Fix,
    /// Set the copied flags that are missing.
    Copied,
}

/// What is known about the tables of entries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    pub(super) tally: &'a Tally,
    pub(super) aim: Aim,
    /// They map the disk of today: copied flags mean something.
    pub(super) active: bool,
}

impl Rules<'_> {
    fn outside(&self, raw: u64) -> bool {
        raw & OFFSET_MASK >= self.tally.file_len
    }

    /// The entry with the copied flag as it is to be; `raw` has a host cluster.
    fn with_copied(&self, raw: u64, in_data_file: bool) -> u64 {
        if !self.active {
            return raw;
        }
        let cluster = self
            .tally
            .geometry
            .cluster_of(HostOffset(raw & OFFSET_MASK));
        let references = self.tally.references_to(cluster);
        let refcount = self.tally.refcount_of(cluster).unwrap_or(0);
        match self.aim {
            Aim::Fix if in_data_file => raw,
            Aim::Fix if self.final_count(refcount, references) != 1 => raw & !COPIED,
            Aim::Fix => raw,
            _ if in_data_file => raw | COPIED,
            // Two users of one cluster may be hidden where not everything could be followed.
            _ if refcount == 1 && references == 1 && self.tally.all_followed() => raw | COPIED,
            _ => raw,
        }
    }

    /// The refcount when the repair is over.
    fn final_count(&self, refcount: u64, references: u64) -> u64 {
        match self.tally.all_followed() {
            true => references,
            false => references.max(refcount),
        }
    }

    pub(super) fn l1(&self, raw: u64) -> u64 {
        if raw & OFFSET_MASK == 0 {
            // No table, whatever the flags say.
            return match self.aim {
                Aim::Fix => 0,
                _ => raw,
            };
        }
        if self.aim != Aim::Fix {
            return self.with_copied(raw, false);
        }
        let aligned = self
            .tally
            .geometry
            .is_aligned(HostOffset(raw & OFFSET_MASK));
        if aligned && self.outside(raw) {
            // It reads as an empty table.
            return 0;
        }
        self.with_copied(raw & !L1_RESERVED, false)
    }

    pub(super) fn l2(&self, raw: u64, bitmap: u64) -> (u64, u64) {
        let fixing = self.aim == Aim::Fix;
        if raw & COMPRESSED != 0 {
            return match fixing && !self.tally.data_file {
                true => (raw & !COPIED, 0),
                false => (raw, bitmap),
            };
        }
        let (raw, bitmap) = match fixing {
            true => self.fixed_cluster(raw, bitmap),
            false => (raw, bitmap),
        };
        let host = raw & OFFSET_MASK != 0;
        match self.tally.data_file {
            true if host || raw & COPIED != 0 && raw & ZERO == 0 => {
                (self.with_copied(raw, true), bitmap)
            }
            false if host => (self.with_copied(raw, false), bitmap),
            _ => (raw, bitmap),
        }
    }

    fn fixed_cluster(&self, raw: u64, bitmap: u64) -> (u64, u64) {
        let geometry = self.tally.geometry;
        let extended = geometry.extended_l2();
        let mut raw = raw & !L2_RESERVED;
        if extended {
            raw &= !ZERO;
        }
        if raw & OFFSET_MASK == 0 {
            return (raw, bitmap);
        }
        let (alloc, zero) = match extended {
            true => (bitmap & 0xffff_ffff, bitmap >> 32),
            false if raw & ZERO != 0 => (0, 1),
            false => (1, 0),
        };
        let unaligned = !geometry.is_aligned(HostOffset(raw & OFFSET_MASK));
        if geometry.version() == Version::V2 && (raw & ZERO != 0 || self.outside(raw)) {
            return (raw, bitmap);
        }
        // Without data in it a cluster that cannot be there is let go; with data, when it reads as zeros
        // because it lies behind the end of the file.
        let gone = !self.tally.data_file && !unaligned && self.outside(raw);
        if gone || unaligned && alloc == 0 {
            return match extended {
                true => (0, (zero | alloc) << 32),
                false => (ZERO, 0),
            };
        }
        if alloc & zero != 0 && !unaligned {
            // What is either is zeros, as in QEMU's repair; what is certainly data stays.
            return (raw, zero << 32 | alloc & !zero);
        }
        (raw, bitmap)
    }
}
