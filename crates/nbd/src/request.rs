//! Requests as bytes.

use crate::wire::{REQUEST_LEN, REQUEST_MAGIC};

/// Most bytes that a request without payload may name: what 32 bits hold, less what keeps it a multiple of any
/// block.
pub const REQUEST_BYTES_MAX: u64 = 1 << 30;

/// The header of a request.
pub fn request(
    kind: u16,
    flags: u16,
    cookie: u64,
    offset_bytes: u64,
    len_bytes: u32,
) -> [u8; REQUEST_LEN] {
    let mut header = [0; REQUEST_LEN];
    let mut rest = header.as_mut_slice();
    let fields: [&[u8]; 6] = [
        &REQUEST_MAGIC.to_be_bytes(),
        &flags.to_be_bytes(),
        &kind.to_be_bytes(),
        &cookie.to_be_bytes(),
        &offset_bytes.to_be_bytes(),
        &len_bytes.to_be_bytes(),
    ];
    for field in fields {
        let (place, after) = rest.split_at_mut(field.len());
        place.copy_from_slice(field);
        rest = after;
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_28_bytes_in_the_protocols_order() {
        let header = request(1, 2, 3, 4, 5);
        let expected = [
            &[0x25, 0x60, 0x95, 0x13, 0, 2, 0, 1][..],
            &[0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 5],
        ];
        assert_eq!(header.to_vec(), expected.concat());
    }
}
