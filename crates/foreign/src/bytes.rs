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

/// The steps of a CRC-32C for each value of a byte.
const CRC32C: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0_u32;
    while byte < 256 {
        let (mut crc, mut bit) = (byte, 0);
        while bit < 8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            bit = u32::wrapping_add(bit, 1);
        }
        if let Some(slot) = table
            .as_mut_slice()
            .split_at_mut(byte as usize)
            .1
            .first_mut()
        {
            *slot = crc;
        }
        byte = byte.wrapping_add(1);
    }
    table
};

/// The CRC-32C of the parts, one after the other.
pub(crate) fn crc32c(parts: &[&[u8]]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        let index = crc as u8 ^ byte;
        let next = CRC32C.get(usize::from(index)).copied();
        crc >> 8 ^ next.unwrap_or_default()
    };
    !parts.iter().copied().flatten().fold(u32::MAX, step)
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
