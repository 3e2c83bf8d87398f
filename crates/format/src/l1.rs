//! L1 table entries: host offsets of L2 tables.
//!
//! Bits 9 to 55 are the host offset, 63 says that the L2 table has a refcount of exactly one (right
//! in the active table only), all others are reserved. As in QEMU, the data path ignores reserved
//! bits, and [`lint`] is how the checker sees them.

use crate::addr::HostOffset;
use crate::error::{Corruption, CorruptionKind};
use crate::geometry::Geometry;

/// The flag that says "refcount is exactly one", in L1 and L2 entries.
pub const COPIED: u64 = 1 << 63;

/// The bits of an L1 or L2 entry that are a host offset.
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

const RESERVED: u64 = 0x7f00_0000_0000_01ff;

/// A reference to an L2 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct L1Ref {
    /// Where the table starts; cluster aligned and never 0.
    pub offset: HostOffset,
    /// Its refcount is exactly one: it may be written in place.
    pub copied: bool,
}

/// The L2 table an entry points to, `None` when there is none.
#[inline]
pub fn decode(raw: u64, geometry: &Geometry) -> Result<Option<L1Ref>, Corruption> {
    let offset = HostOffset(raw & OFFSET_MASK);
    if offset.0 == 0 {
        return Ok(None);
    }
    if !geometry.is_aligned(offset) {
        return Err(Corruption::new(CorruptionKind::L2TableUnaligned, raw));
    }
    Ok(Some(L1Ref {
        offset,
        copied: raw & COPIED != 0,
    }))
}

/// The entry for a reference; 0 for none.
#[inline]
pub fn encode(reference: Option<L1Ref>) -> u64 {
    match reference {
        Some(L1Ref { offset, copied }) => {
            debug_assert!(
                offset.0 & !OFFSET_MASK == 0,
                "an l2 table is at a host offset"
            );
            (offset.0 & OFFSET_MASK) | if copied { COPIED } else { 0 }
        }
        None => 0,
    }
}

/// What is wrong with an entry although [`decode`] accepts it.
pub fn lint(raw: u64) -> Option<Corruption> {
    if raw & RESERVED != 0 {
        return Some(Corruption::new(CorruptionKind::L1Reserved, raw));
    }
    // QEMU takes it for a table at offset 0.
    (raw == COPIED).then(|| Corruption::new(CorruptionKind::CopiedWithoutTable, raw))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry::FALLBACK;

    #[test]
    fn l1_reserved_bits_are_reported_by_the_checker_only() {
        let plain = COPIED | 0x30000;
        let expected = Some(L1Ref {
            offset: HostOffset(0x30000),
            copied: true,
        });
        for bit in (0..9).chain(56..63) {
            let raw = plain | 1 << bit;
            assert_eq!(decode(raw, &GEOMETRY), Ok(expected));
            assert_eq!(
                lint(raw).map(|found| found.kind),
                Some(CorruptionKind::L1Reserved)
            );
        }
        assert_eq!(lint(plain), None);
        assert_eq!(decode(COPIED, &GEOMETRY), Ok(None));
        assert_eq!(
            lint(COPIED).map(|found| found.kind),
            Some(CorruptionKind::CopiedWithoutTable)
        );
    }

    #[test]
    fn unaligned_l2_table_is_corruption() {
        let found = decode(0x30200, &GEOMETRY).unwrap_err();
        assert_eq!(
            (found.kind, found.raw),
            (CorruptionKind::L2TableUnaligned, 0x30200)
        );
    }
}
