//! Refcount blocks of every width, and refcount table entries.
//!
//! A refcount is 1 to 64 bits. Widths of 8 bits and more are big-endian numbers; below that several
//! share a byte, the first in its lowest bits. Table entries are host offsets of blocks (bits 9 to
//! 63), 0 for a block of zeros that has no space.

use crate::addr::HostOffset;
use crate::bytes;
use crate::error::{Corruption, CorruptionKind};
use crate::geometry::Geometry;
use crate::limit;

/// A refcount that does not fit in its width, or lies outside its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("refcount does not fit in its width")]
pub struct ValueTooLarge;

/// Byte of a sub-byte refcount and its shift within it.
#[inline]
const fn bit_place(order: u32, index: u64) -> (u64, u32) {
    let per_byte_bits = 3u32.wrapping_sub(order);
    let in_byte = (index & 1u64.wrapping_shl(per_byte_bits).wrapping_sub(1)) as u32;
    (
        index.wrapping_shr(per_byte_bits),
        in_byte.wrapping_shl(order),
    )
}

/// Bits of a sub-byte refcount.
#[inline]
const fn bit_mask(order: u32) -> u8 {
    0xffu8.wrapping_shr(8u32.wrapping_sub(1u32.wrapping_shl(order)))
}

/// Refcount `index` of a block whose refcounts are `2^order` bits wide (`order` 0 to 6); 0 outside
/// of it.
#[inline]
pub fn get(block: &[u8], order: u32, index: u64) -> u64 {
    let Ok(at) = usize::try_from(index) else {
        return 0;
    };
    let found = match order {
        4 => at
            .checked_mul(2)
            .and_then(|at| bytes::u16_at(block, at))
            .map(u64::from),
        3 => block.get(at).copied().map(u64::from),
        5 => at
            .checked_mul(4)
            .and_then(|at| bytes::u32_at(block, at))
            .map(u64::from),
        6 => at.checked_mul(8).and_then(|at| bytes::u64_at(block, at)),
        0..=2 => {
            let (byte, shift) = bit_place(order, index);
            let byte = block.get(byte as usize).copied();
            byte.map(|byte| u64::from(byte.wrapping_shr(shift) & bit_mask(order)))
        }
        _ => None,
    };
    found.unwrap_or(0)
}

#[inline]
fn store<const N: usize>(block: &mut [u8], at: usize, value: [u8; N]) -> Option<()> {
    let start = at.checked_mul(N)?;
    block
        .get_mut(start..start.checked_add(N)?)?
        .copy_from_slice(&value);
    Some(())
}

/// Sets refcount `index` of a block whose refcounts are `2^order` bits wide (`order` 0 to 6). A
/// value that does not fit in the width, or an index outside of the block, changes nothing.
#[inline]
pub fn set(block: &mut [u8], order: u32, index: u64, value: u64) -> Result<(), ValueTooLarge> {
    let at = usize::try_from(index).map_err(|_| ValueTooLarge)?;
    let stored = match order {
        4 => u16::try_from(value)
            .ok()
            .and_then(|value| store(block, at, value.to_be_bytes())),
        3 => u8::try_from(value)
            .ok()
            .and_then(|value| store(block, at, [value])),
        5 => u32::try_from(value)
            .ok()
            .and_then(|value| store(block, at, value.to_be_bytes())),
        6 => store(block, at, value.to_be_bytes()),
        0..=2 => set_bits(block, order, index, value),
        _ => None,
    };
    stored.ok_or(ValueTooLarge)
}

fn set_bits(block: &mut [u8], order: u32, index: u64, value: u64) -> Option<()> {
    let mask = bit_mask(order);
    let value = u8::try_from(value)
        .ok()
        .filter(|value| value & !mask == 0)?;
    let (byte, shift) = bit_place(order, index);
    let byte = block.get_mut(byte as usize)?;
    *byte = (*byte & !mask.wrapping_shl(shift)) | value.wrapping_shl(shift);
    Some(())
}

/// The refcount block a table entry points to, `None` when all its refcounts are 0.
#[inline]
pub fn decode_table_entry(raw: u64, geometry: &Geometry) -> Result<Option<HostOffset>, Corruption> {
    let offset = HostOffset(raw);
    let kind = if raw & 0x1ff != 0 {
        CorruptionKind::RefcountTableReserved
    } else if !geometry.is_aligned(offset) {
        CorruptionKind::RefcountBlockUnaligned
    } else if raw >= limit::HOST_END {
        CorruptionKind::RefcountBlockOutside
    } else if raw == 0 {
        return Ok(None);
    } else {
        return Ok(Some(offset));
    };
    Err(Corruption::new(kind, raw))
}

/// The table entry for a block.
#[inline]
pub fn encode_table_entry(block: Option<HostOffset>) -> u64 {
    block.map_or(0, |offset| offset.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_refcounts_fill_a_byte_from_its_lowest_bits() {
        let mut block = [0; 2];
        for (order, index, value, byte) in [(0, 1, 1, 0b10), (1, 3, 2, 0x80), (2, 1, 0xa, 0xa0)] {
            block.fill(0);
            set(&mut block, order, index, value).unwrap();
            assert_eq!(
                (block, get(&block, order, index)),
                ([byte, 0], value),
                "order {order}"
            );
        }
    }

    #[test]
    fn wide_refcounts_are_big_endian() {
        let mut block = [0; 16];
        set(&mut block, 4, 1, 0x1234).unwrap();
        assert_eq!(block[..4], [0, 0, 0x12, 0x34]);
        set(&mut block, 5, 0, 0x0102_0304).unwrap();
        assert_eq!(block[..4], [1, 2, 3, 4]);
        set(&mut block, 6, 1, u64::MAX - 1).unwrap();
        assert_eq!(block[8..], [255, 255, 255, 255, 255, 255, 255, 254]);
    }

    #[test]
    fn refcount_that_does_not_fit_changes_nothing() {
        for order in 0..=6 {
            let mut block = [0x55; 16];
            let width = 1u32 << order;
            let count = 16 * 8 / u64::from(width);
            assert_eq!(set(&mut block, order, count, 1), Err(ValueTooLarge));
            assert_eq!(set(&mut block, order, u64::MAX, 1), Err(ValueTooLarge));
            if width < 64 {
                assert_eq!(set(&mut block, order, 0, 1 << width), Err(ValueTooLarge));
            }
            assert_eq!(block, [0x55; 16]);
            assert_eq!(get(&block, order, count), 0);
            assert_eq!(get(&block, order, u64::MAX), 0);
        }
        assert_eq!(set(&mut [0; 64], 7, 0, 0), Err(ValueTooLarge));
        assert_eq!(get(&[1; 64], 7, 0), 0);
    }

    #[test]
    fn table_entries_are_offsets_of_clusters() {
        let geometry = Geometry::FALLBACK;
        assert_eq!(decode_table_entry(0, &geometry), Ok(None));
        let block = Some(HostOffset(0x30000));
        assert_eq!(decode_table_entry(0x30000, &geometry), Ok(block));
        assert_eq!(encode_table_entry(block), 0x30000);
        for (raw, kind) in [
            (0x30001, CorruptionKind::RefcountTableReserved),
            (0x30200, CorruptionKind::RefcountBlockUnaligned),
            (1 << 63, CorruptionKind::RefcountBlockOutside),
        ] {
            assert_eq!(decode_table_entry(raw, &geometry).unwrap_err().kind, kind);
        }
    }
}
