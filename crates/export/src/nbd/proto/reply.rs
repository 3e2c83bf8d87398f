//! Replies. Headers come as small arrays by value, so that writing one allocates nothing.

use core::ops::Deref;

use gaur_block::Errno;

use super::Style;
use super::wire::{
    CHUNK_MAGIC, EXTENDED_CHUNK_LEN, EXTENDED_CHUNK_MAGIC, SIMPLE_REPLY_MAGIC, STATE_HOLE,
    STATE_ZERO, chunk, clip, known_errno,
};

/// What a reply has to know of the request it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// How both sides write.
    pub style: Style,
    /// What the client calls the request.
    pub cookie: u64,
    /// The offset the client sent.
    pub offset_bytes: u64,
}

/// The longest header: an extended chunk's, and what comes before data or extents, or a hole.
const HEADER_MAX_BYTES: usize = EXTENDED_CHUNK_LEN + 12;

/// A header, as the bytes it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    bytes: [u8; HEADER_MAX_BYTES],
    len: usize,
}

impl Header {
    fn new() -> Header {
        Header {
            bytes: [0; HEADER_MAX_BYTES],
            len: 0,
        }
    }

    fn with<const N: usize>(mut self, field: [u8; N]) -> Header {
        self.bytes[self.len..self.len + N].copy_from_slice(&field);
        self.len += N;
        self
    }
}

impl Deref for Header {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The number the protocol has for an error.
pub fn error_number(errno: Errno) -> u32 {
    let errno = match errno {
        Errno::EROFS | Errno::EACCES => Errno::EPERM,
        Errno::EFBIG => Errno::ENOSPC,
        errno => known_errno(errno),
    };
    errno.raw().unsigned_abs()
}

fn simple(cookie: u64, error: u32) -> Header {
    Header::new()
        .with(SIMPLE_REPLY_MAGIC.to_be_bytes())
        .with(error.to_be_bytes())
        .with(cookie.to_be_bytes())
}

/// Header of a chunk; `len_bytes` of content follow.
fn chunk_header(asked: &Asked, kind: u16, done: bool, len_bytes: u32) -> Header {
    let flags = if done { chunk::FLAG_DONE } else { 0 };
    if asked.style == Style::Extended {
        return Header::new()
            .with(EXTENDED_CHUNK_MAGIC.to_be_bytes())
            .with(flags.to_be_bytes())
            .with(kind.to_be_bytes())
            .with(asked.cookie.to_be_bytes())
            .with(asked.offset_bytes.to_be_bytes())
            .with(u64::from(len_bytes).to_be_bytes());
    }
    Header::new()
        .with(CHUNK_MAGIC.to_be_bytes())
        .with(flags.to_be_bytes())
        .with(kind.to_be_bytes())
        .with(asked.cookie.to_be_bytes())
        .with(len_bytes.to_be_bytes())
}

/// The reply to a request that succeeded and has nothing to tell.
pub fn success(asked: &Asked) -> Header {
    match asked.style {
        Style::Simple | Style::Structured => simple(asked.cookie, 0),
        Style::Extended => chunk_header(asked, chunk::NONE, true, 0),
    }
}

/// The reply to a read in one piece; the data follows.
pub fn read(asked: &Asked, len_bytes: u32) -> Header {
    match (asked.style, len_bytes) {
        (Style::Simple, _) => simple(asked.cookie, 0),
        (_, 0) => chunk_header(asked, chunk::NONE, true, 0),
        _ => data(asked, asked.offset_bytes, len_bytes, true),
    }
}

/// Header of a chunk of data; `len_bytes` of data follow. Not for simple replies.
pub fn data(asked: &Asked, offset_bytes: u64, len_bytes: u32, done: bool) -> Header {
    chunk_header(asked, chunk::OFFSET_DATA, done, 8 + len_bytes).with(offset_bytes.to_be_bytes())
}

/// A chunk that says that a run is zeros. Not for simple replies.
pub fn hole(asked: &Asked, offset_bytes: u64, len_bytes: u32, done: bool) -> Header {
    chunk_header(asked, chunk::OFFSET_HOLE, done, 12)
        .with(offset_bytes.to_be_bytes())
        .with(len_bytes.to_be_bytes())
}

/// Header of the chunk of a block status reply for one context; as many [`extent`]s follow. Not for simple replies.
pub fn status(asked: &Asked, context: u32, extents: u32, done: bool) -> Header {
    let id = context.to_be_bytes();
    if asked.style == Style::Extended {
        return chunk_header(asked, chunk::BLOCK_STATUS_EXT, done, 8 + extents * 16)
            .with(id)
            .with(extents.to_be_bytes());
    }
    chunk_header(asked, chunk::BLOCK_STATUS, done, 4 + extents * 8).with(id)
}

/// Status flags of `base:allocation` for a run.
pub fn state(allocated: bool, zero: bool) -> u32 {
    (if allocated { 0 } else { STATE_HOLE }) | (if zero { STATE_ZERO } else { 0 })
}

/// An extent of a block status reply. Without extended headers lengths have 32 bits, those of
/// requests too, so an extent that lies within its request always fits.
pub fn extent(asked: &Asked, len_bytes: u64, state: u32) -> Header {
    if asked.style == Style::Extended {
        return Header::new()
            .with(len_bytes.to_be_bytes())
            .with(u64::from(state).to_be_bytes());
    }
    Header::new()
        .with((len_bytes as u32).to_be_bytes())
        .with(state.to_be_bytes())
}

/// Appends the reply to a failed request: with its reason unless replies are simple.
pub fn error(out: &mut Vec<u8>, asked: &Asked, errno: Errno, reason: &str) {
    let number = error_number(errno);
    if asked.style == Style::Simple {
        out.extend_from_slice(&simple(asked.cookie, number));
        return;
    }
    let reason = clip(reason).as_bytes();
    let len = reason.len() as u16;
    out.extend_from_slice(&chunk_header(asked, chunk::ERROR, true, 6 + u32::from(len)));
    out.extend_from_slice(&number.to_be_bytes());
    out.extend_from_slice(&len.to_be_bytes());
    out.extend_from_slice(reason);
}
