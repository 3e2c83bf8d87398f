//! Requests as bytes.

use std::ops::Deref;

use crate::wire::{
    EXTENDED_REQUEST_LEN, EXTENDED_REQUEST_MAGIC, REQUEST_LEN, REQUEST_MAGIC, cmd, cmd_flag,
};

/// How requests and replies begin, by what was agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Headers {
    /// Replies have their error and their data.
    #[default]
    Simple,
    /// Replies come in chunks.
    Structured,
    /// Likewise, and lengths have 64 bits.
    Extended,
}

/// Most bytes that a request without payload may name: what 32 bits hold, less what keeps it a multiple of any
/// block.
pub const REQUEST_BYTES_MAX: u64 = 1 << 30;

/// The header of a request as bytes.
#[derive(Clone, Copy, Debug)]
pub struct RequestHeader {
    bytes: [u8; EXTENDED_REQUEST_LEN],
    len: usize,
}

impl Deref for RequestHeader {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&self.bytes)
    }
}

/// The header of a request. Where lengths have 32 bits, one that is longer becomes [`REQUEST_BYTES_MAX`].
pub fn request(
    headers: Headers,
    (kind, flags): (u16, u16),
    cookie: u64,
    offset_bytes: u64,
    len_bytes: u64,
) -> RequestHeader {
    let is_extended = headers == Headers::Extended;
    let (magic, len) = match is_extended {
        true => (EXTENDED_REQUEST_MAGIC, EXTENDED_REQUEST_LEN),
        false => (REQUEST_MAGIC, REQUEST_LEN),
    };
    let has_payload = is_extended && kind == cmd::WRITE;
    let flags = match has_payload {
        true => flags | cmd_flag::PAYLOAD_LEN,
        false => flags,
    };
    let long = len_bytes.to_be_bytes();
    let short = u32::try_from(len_bytes.min(REQUEST_BYTES_MAX)).unwrap_or_default();
    let short = short.to_be_bytes();
    let fields: [&[u8]; 6] = [
        &magic.to_be_bytes(),
        &flags.to_be_bytes(),
        &kind.to_be_bytes(),
        &cookie.to_be_bytes(),
        &offset_bytes.to_be_bytes(),
        if is_extended { &long } else { &short },
    ];
    let mut bytes = [0; EXTENDED_REQUEST_LEN];
    let mut rest = bytes.as_mut_slice();
    for field in fields {
        let (place, after) = rest.split_at_mut(field.len());
        place.copy_from_slice(field);
        rest = after;
    }
    RequestHeader { bytes, len }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_28_bytes_in_the_protocols_order() {
        let header = request(Headers::Structured, (1, 2), 3, 4, 5);
        let expected = [
            &[0x25, 0x60, 0x95, 0x13, 0, 2, 0, 1][..],
            &[0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 5],
        ];
        assert_eq!(header.to_vec(), expected.concat());
        let long = request(Headers::Simple, (7, 0), 3, 4, 1 << 40);
        assert_eq!(long[24..], [0x40, 0, 0, 0]);
    }

    #[test]
    fn an_extended_request_has_a_long_length_and_says_which_has_a_payload() {
        let header = request(Headers::Extended, (7, 8), 3, 4, 1 << 40);
        let expected = [
            &[0x21, 0xe4, 0x1c, 0x71, 0, 8, 0, 7, 0, 0, 0, 0, 0, 0, 0, 3][..],
            &[0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 1, 0, 0, 0, 0, 0],
        ];
        assert_eq!(header.to_vec(), expected.concat());
        let write = request(Headers::Extended, (1, 0), 3, 4, 5);
        assert_eq!(write[4..6], [0, 32]);
    }
}
