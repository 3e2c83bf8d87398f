//! The range check every device owes its callers.

use gaur_block::{Errno, Payload, Request};

/// Checks a request against the size of a device and against its payload; its offset and length in bytes.
pub(super) fn check(
    size_bytes: u64,
    request: Request,
    payload: &Payload<'_>,
) -> Result<(u64, u64), Errno> {
    let (offset_bytes, len_bytes, past_end) = match (request, payload) {
        (Request::Read { offset_bytes }, Payload::Read(target)) => {
            (offset_bytes, target.len() as u64, Errno::EINVAL)
        }
        (Request::Write { offset_bytes, .. }, Payload::Write(source)) => {
            (offset_bytes, source.len() as u64, Errno::ENOSPC)
        }
        (
            Request::WriteZeroes {
                offset_bytes,
                len_bytes,
                ..
            },
            Payload::None,
        ) => (offset_bytes, len_bytes, Errno::ENOSPC),
        (
            Request::Discard {
                offset_bytes,
                len_bytes,
            },
            Payload::None,
        ) => (offset_bytes, len_bytes, Errno::EINVAL),
        (Request::Flush, Payload::None) => return Ok((0, 0)),
        _ => return Err(Errno::EINVAL),
    };
    match offset_bytes.checked_add(len_bytes) {
        Some(end) if end <= size_bytes => Ok((offset_bytes, len_bytes)),
        _ => Err(past_end),
    }
}
