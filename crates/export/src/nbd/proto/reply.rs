//! Replies, written into fixed arrays or appended to a buffer of the caller.

use gaur_block::Errno;

use super::wire::{
    ALLOCATION_CONTEXT_ID, CHUNK_LEN, CHUNK_MAGIC, SIMPLE_REPLY_LEN, SIMPLE_REPLY_MAGIC,
    STATE_HOLE, STATE_ZERO, chunk, clip,
};

/// Length of what [`data_header`] writes, in bytes.
pub const DATA_HEADER_LEN: usize = CHUNK_LEN + 8;
/// Length of what [`hole`] writes, in bytes.
pub const HOLE_LEN: usize = CHUNK_LEN + 12;
/// Length of an extent of a block status reply in bytes.
pub const EXTENT_LEN: usize = 8;
/// Length of what [`status_header`] writes, in bytes.
pub const STATUS_HEADER_LEN: usize = CHUNK_LEN + 4;

/// The number the protocol has for an error.
pub fn error_number(errno: Errno) -> u32 {
    let errno = match errno {
        Errno::EROFS | Errno::EACCES => Errno::EPERM,
        Errno::EFBIG => Errno::ENOSPC,
        Errno::EPERM
        | Errno::EIO
        | Errno::ENOMEM
        | Errno::EINVAL
        | Errno::ENOSPC
        | Errno::EOVERFLOW
        | Errno::EOPNOTSUPP
        | Errno::ESHUTDOWN => errno,
        // The protocol knows no other number. What a client must not do is to take it for its own
        // mistake and go on, so it is an input/output error.
        _ => Errno::EIO,
    };
    errno.raw().unsigned_abs()
}

/// A simple reply; `error` is 0 or an [`error_number`]. The data of a successful read follows.
pub fn simple(cookie: u64, error: u32) -> [u8; SIMPLE_REPLY_LEN] {
    let mut reply = [0; SIMPLE_REPLY_LEN];
    reply[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    reply[4..8].copy_from_slice(&error.to_be_bytes());
    reply[8..].copy_from_slice(&cookie.to_be_bytes());
    reply
}

/// Header of a chunk; `len_bytes` of content follow.
pub fn chunk_header(cookie: u64, kind: u16, done: bool, len_bytes: u32) -> [u8; CHUNK_LEN] {
    let flags = if done { chunk::FLAG_DONE } else { 0 };
    let mut reply = [0; CHUNK_LEN];
    reply[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
    reply[4..6].copy_from_slice(&flags.to_be_bytes());
    reply[6..8].copy_from_slice(&kind.to_be_bytes());
    reply[8..16].copy_from_slice(&cookie.to_be_bytes());
    reply[16..].copy_from_slice(&len_bytes.to_be_bytes());
    reply
}

/// Header of a chunk of data; `len_bytes` of data follow.
pub fn data_header(
    cookie: u64,
    offset_bytes: u64,
    len_bytes: u32,
    done: bool,
) -> [u8; DATA_HEADER_LEN] {
    let mut reply = [0; DATA_HEADER_LEN];
    let header = chunk_header(cookie, chunk::OFFSET_DATA, done, 8 + len_bytes);
    reply[..CHUNK_LEN].copy_from_slice(&header);
    reply[CHUNK_LEN..].copy_from_slice(&offset_bytes.to_be_bytes());
    reply
}

/// A chunk that says that a run is zeros.
pub fn hole(cookie: u64, offset_bytes: u64, len_bytes: u32, done: bool) -> [u8; HOLE_LEN] {
    let mut reply = [0; HOLE_LEN];
    reply[..CHUNK_LEN].copy_from_slice(&chunk_header(cookie, chunk::OFFSET_HOLE, done, 12));
    reply[CHUNK_LEN..CHUNK_LEN + 8].copy_from_slice(&offset_bytes.to_be_bytes());
    reply[CHUNK_LEN + 8..].copy_from_slice(&len_bytes.to_be_bytes());
    reply
}

/// Header of a block status reply; `extents` times [`EXTENT_LEN`] bytes follow.
pub fn status_header(cookie: u64, extents: u32) -> [u8; STATUS_HEADER_LEN] {
    let len_bytes = 4 + extents * EXTENT_LEN as u32;
    let mut reply = [0; STATUS_HEADER_LEN];
    let header = chunk_header(cookie, chunk::BLOCK_STATUS, true, len_bytes);
    reply[..CHUNK_LEN].copy_from_slice(&header);
    reply[CHUNK_LEN..].copy_from_slice(&ALLOCATION_CONTEXT_ID.to_be_bytes());
    reply
}

/// Status flags of `base:allocation` for a run.
pub fn state(allocated: bool, zero: bool) -> u32 {
    (if allocated { 0 } else { STATE_HOLE }) | (if zero { STATE_ZERO } else { 0 })
}

/// An extent of a block status reply.
pub fn extent(len_bytes: u32, state: u32) -> [u8; EXTENT_LEN] {
    let mut extent = [0; EXTENT_LEN];
    extent[..4].copy_from_slice(&len_bytes.to_be_bytes());
    extent[4..].copy_from_slice(&state.to_be_bytes());
    extent
}

/// Appends the reply to a failed request: with its reason when replies are structured.
pub fn error(out: &mut Vec<u8>, structured: bool, cookie: u64, errno: Errno, reason: &str) {
    let number = error_number(errno);
    if !structured {
        out.extend_from_slice(&simple(cookie, number));
        return;
    }
    let reason = clip(reason).as_bytes();
    let len = reason.len() as u16;
    out.extend_from_slice(&chunk_header(
        cookie,
        chunk::ERROR,
        true,
        6 + u32::from(len),
    ));
    out.extend_from_slice(&number.to_be_bytes());
    out.extend_from_slice(&len.to_be_bytes());
    out.extend_from_slice(reason);
}
