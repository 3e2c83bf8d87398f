//! Numbers in byte slices, without panics: those outside of the slice are `None`.

fn array<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk().copied()
}

/// The little-endian 32-bit number at `offset`.
pub(crate) fn le32(bytes: &[u8], offset: usize) -> Option<u32> {
    array(bytes, offset).map(u32::from_le_bytes)
}

/// The little-endian 64-bit number at `offset`.
pub(crate) fn le64(bytes: &[u8], offset: usize) -> Option<u64> {
    array(bytes, offset).map(u64::from_le_bytes)
}

/// The big-endian 16-bit number at `offset`.
pub(crate) fn be16(bytes: &[u8], offset: usize) -> Option<u16> {
    array(bytes, offset).map(u16::from_be_bytes)
}

/// The big-endian 32-bit number at `offset`.
pub(crate) fn be32(bytes: &[u8], offset: usize) -> Option<u32> {
    array(bytes, offset).map(u32::from_be_bytes)
}

/// The big-endian 64-bit number at `offset`.
pub(crate) fn be64(bytes: &[u8], offset: usize) -> Option<u64> {
    array(bytes, offset).map(u64::from_be_bytes)
}

/// The sum of all bytes.
pub(crate) fn sum(bytes: &[u8]) -> u32 {
    let add = |sum: u32, byte: &u8| sum.wrapping_add(u32::from(*byte));
    bytes.iter().fold(0, add)
}

/// The little-endian 16-bit number at `offset`.
pub(crate) fn le16(bytes: &[u8], offset: usize) -> Option<u16> {
    array(bytes, offset).map(u16::from_le_bytes)
}

/// The CRC-32C of the parts, one after the other. Bit by bit: headers are short, and read once.
pub(crate) fn crc32c(parts: &[&[u8]]) -> u32 {
    let mut crc = u32::MAX;
    for byte in parts.iter().copied().flatten() {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of the CRC catalogue.
    #[test]
    fn crc32c_of_the_digits() {
        assert_eq!(crc32c(&[b"12345", b"", b"6789"]), 0xe306_9283);
    }
}
