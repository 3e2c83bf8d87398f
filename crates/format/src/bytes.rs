//! Big-endian numbers in byte slices, without panics: reads outside the slice are `None`, writes
//! outside it do nothing.

use alloc::vec::Vec;

/// `len` bytes at `offset`.
#[inline]
pub(crate) fn slice(bytes: &[u8], offset: usize, len: usize) -> Option<&[u8]> {
    bytes.get(offset..offset.checked_add(len)?)
}

#[inline]
fn array<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    slice(bytes, offset, N)?.try_into().ok()
}

/// The 16-bit number at `offset`.
#[inline]
pub(crate) fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    array(bytes, offset).map(u16::from_be_bytes)
}

/// The 32-bit number at `offset`.
#[inline]
pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    array(bytes, offset).map(u32::from_be_bytes)
}

/// The 64-bit number at `offset`.
#[inline]
pub(crate) fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    array(bytes, offset).map(u64::from_be_bytes)
}

/// Stores `value` at `offset` when it lies inside.
#[inline]
pub(crate) fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    let end = offset.saturating_add(value.len());
    if let Some(place) = bytes.get_mut(offset..end) {
        place.copy_from_slice(value);
    }
}

/// Appends zeros until the length is a multiple of eight.
pub(crate) fn pad_to_8(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(8), 0);
}

/// The 64-bit numbers of a table; bytes after the last whole one are ignored.
pub(crate) fn u64s(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|chunk| u64::from_be_bytes(*chunk))
}
