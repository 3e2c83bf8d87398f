//! Numbers of the NBD protocol and the reading of big-endian fields.
//!
//! Source: the NBD protocol document (`doc/proto.md` of the NetworkBlockDevice project), sections
//! "Values" and "Newstyle negotiation". All fields on the wire are big-endian.

use gaur_block::Errno;

/// First eight bytes of the greeting, `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Starts the second half of the greeting and every option, `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Starts every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Starts every request of the transmission phase.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Starts every request of the transmission phase when headers are extended.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Starts a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Starts a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// Starts a chunk of a reply when headers are extended.
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// Length of the server's greeting in bytes.
pub const GREETING_LEN: usize = 18;
/// Length of the client's flags in bytes.
pub const CLIENT_FLAGS_LEN: usize = 4;
/// Length of an option's header in bytes.
pub const OPTION_HEADER_LEN: usize = 16;
/// Length of a request's header in bytes.
pub const REQUEST_LEN: usize = 28;
/// Length of a simple reply in bytes.
pub const SIMPLE_REPLY_LEN: usize = 16;
/// Length of a chunk's header in bytes.
pub const CHUNK_LEN: usize = 20;
/// Length of an extended request's header in bytes.
pub const EXTENDED_REQUEST_LEN: usize = 32;
/// Length of an extended chunk's header in bytes.
pub const EXTENDED_CHUNK_LEN: usize = 32;

/// Longest name, description, query or message, in bytes (the protocol's limit for strings).
pub const STRING_MAX_BYTES: usize = 4096;
/// Longest option that is looked at, in bytes: a longest name and as many longest queries as
/// anybody has. A longer one is skipped and answered with [`rep::ERR_TOO_BIG`].
pub const OPTION_MAX_BYTES: u32 = 64 << 10;
/// Longest option that is skipped, in bytes; a client that announces a longer one is disconnected.
pub const OPTION_SKIP_MAX_BYTES: u32 = 32 << 20;
/// Most options in one handshake: a client needs fewer than ten, and one that lists exports a few for each
/// of them. How long a handshake may take is limited besides.
pub const OPTIONS_MAX: u32 = 1 << 16;
/// Longest payload of a read or write in bytes (the protocol's portable limit).
pub const PAYLOAD_MAX_BYTES: u32 = 32 << 20;

/// Handshake flags, server (16 bits) and client (32 bits) alike.
pub mod handshake_flag {
    /// Fixed newstyle negotiation.
    pub const FIXED_NEWSTYLE: u32 = 1;
    /// No 124 zeros after the answer to `EXPORT_NAME`.
    pub const NO_ZEROES: u32 = 2;
}

/// Option numbers.
pub mod opt {
    /// Choose an export and go, without a way to fail politely.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Switch to TLS.
    pub const STARTTLS: u32 = 5;
    /// Ask about an export.
    pub const INFO: u32 = 6;
    /// Choose an export and go.
    pub const GO: u32 = 7;
    /// Switch to structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Ask which metadata contexts there are.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Switch to extended headers, and with them to structured replies.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod rep {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// An item of information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The option is not known or not offered.
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    /// The server's owner does not allow it.
    pub const ERR_POLICY: u32 = 0x8000_0002;
    /// The option's content makes no sense.
    pub const ERR_INVALID: u32 = 0x8000_0003;
    /// The server wants TLS first.
    pub const ERR_TLS_REQD: u32 = 0x8000_0005;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    /// The server is about to end.
    pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
    /// Extended headers were agreed on already.
    pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;
}

/// Items of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The canonical name.
    pub const NAME: u16 = 1;
    /// A description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags of an export.
pub mod export_flag {
    /// The other flags mean something.
    pub const HAS_FLAGS: u16 = 1;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The FUA flag works.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` works.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The DF flag works (structured replies only).
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections see each other's writes, and a flush on one covers all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` works.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The `FAST_ZERO` flag works.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// `BLOCK_STATUS` takes a payload (extended headers only).
    pub const BLOCK_STAT_PAYLOAD: u16 = 1 << 12;
}

/// Request types.
pub mod cmd {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Say goodbye.
    pub const DISC: u16 = 2;
    /// Make everything durable.
    pub const FLUSH: u16 = 3;
    /// Discard.
    pub const TRIM: u16 = 4;
    /// Read ahead.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Ask what is allocated.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub mod cmd_flag {
    /// Durable before the reply.
    pub const FUA: u16 = 1;
    /// Keep the space of zeroed blocks.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Answer a read in one chunk.
    pub const DF: u16 = 1 << 2;
    /// Answer with one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeroes quickly or not at all.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload (extended headers only).
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Chunks of structured replies.
pub mod chunk {
    /// Flag of the last chunk of a reply.
    pub const FLAG_DONE: u16 = 1;
    /// No content.
    pub const NONE: u16 = 0;
    /// Data.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// The request failed.
    pub const ERROR: u16 = (1 << 15) | 1;
}

/// The metadata context of what is allocated.
pub const ALLOCATION_CONTEXT: &str = "base:allocation";
/// The metadata context of how deep in the backing chain what is allocated lies.
pub const DEPTH_CONTEXT: &str = "qemu:allocation-depth";
/// What the name of a bitmap's context begins with, as QEMU has it.
pub const BITMAP_CONTEXT: &str = "qemu:dirty-bitmap:";
/// Numbers of contexts in replies of this server.
pub const ALLOCATION_CONTEXT_ID: u32 = 1;
/// That of the depth.
pub const DEPTH_CONTEXT_ID: u32 = 2;
/// That of the first bitmap; the others follow.
pub const BITMAP_CONTEXT_ID: u32 = 3;
/// Most bitmaps of an export.
pub const BITMAPS_MAX: usize = 64;
/// Status flag of a bitmap's context: the blocks are marked.
pub const STATE_DIRTY: u32 = 1;
/// Status flag of `base:allocation`: no space is allocated.
pub const STATE_HOLE: u32 = 1;
/// Status flag of `base:allocation`: reads as zeros.
pub const STATE_ZERO: u32 = 2;

/// The error, if the protocol has a number for it; else an input/output error, so that the other side does not
/// take it for a mistake of its own and go on.
pub fn known_errno(errno: Errno) -> Errno {
    match errno {
        Errno::EPERM
        | Errno::ENOMEM
        | Errno::EINVAL
        | Errno::ENOSPC
        | Errno::EOVERFLOW
        | Errno::EOPNOTSUPP
        | Errno::ESHUTDOWN => errno,
        _ => Errno::EIO,
    }
}

/// As much of a text as the protocol lets travel.
pub fn clip(text: &str) -> &str {
    let mut len = text.len().min(STRING_MAX_BYTES);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    &text[..len]
}

/// Reads big-endian fields from the front of a byte string; `None` at its end.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    /// The next 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    /// A 32-bit length and that many bytes.
    pub fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(usize::try_from(len).ok()?)
    }
}
