//! Numbers of the FUSE protocol, and the reading and writing of its fields.
//!
//! Source: `include/uapi/linux/fuse.h` of Linux, protocol 7.46. Every field is in the byte order of
//! the machine, at a multiple of its size.

/// The protocol's major version.
pub const MAJOR: u32 = 7;
/// The newest minor version this was written for.
pub const MINOR: u32 = 46;
/// The oldest minor version that is spoken: structures have had their present lengths since
/// earlier ones, and any kernel from 5.4 on has it.
pub const MINOR_MIN: u32 = 31;

/// The node of the file.
pub const ROOT_ID: u64 = 1;

/// Length of a request's header in bytes.
pub const IN_HEADER_LEN: usize = 40;
/// Length of a reply's header in bytes.
pub const OUT_HEADER_LEN: usize = 16;
/// Length of what stands between a write's header and its payload, in bytes.
pub const WRITE_IN_LEN: usize = 40;
/// Where the payload of a write starts, in bytes.
pub const WRITE_PAYLOAD_AT: usize = IN_HEADER_LEN + WRITE_IN_LEN;
/// Most pages of one request (`FUSE_MAX_MAX_PAGES`, and what the kernel allows by default).
pub const PAGES_MAX: u16 = 256;
/// Length of a page in bytes, as far as [`PAGES_MAX`] is concerned; machines with larger ones get
/// fewer of them.
pub const PAGE_LEN: usize = 4096;
/// Longest payload of one read or write in bytes.
pub const PAYLOAD_MAX: usize = PAGES_MAX as usize * PAGE_LEN;

/// What a request wants.
pub mod opcode {
    #![allow(missing_docs, reason = "the names are the kernel's")]
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const LSEEK: u32 = 46;
    pub const SYNCFS: u32 = 50;
}

/// What kernel and server agree on (`INIT`); bits from 32 on travel in a field of their own.
pub mod init_flag {
    /// Reads of one file may be under way at once.
    pub const ASYNC_READ: u64 = 1 << 0;
    /// Writes may be longer than a page.
    pub const BIG_WRITES: u64 = 1 << 5;
    /// Direct transfers are sent without waiting for one another.
    pub const ASYNC_DIO: u64 = 1 << 15;
    /// `max_pages` counts.
    pub const MAX_PAGES: u64 = 1 << 22;
    /// The server drops the set-uid bit and its like when a file is changed. There never is one.
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    /// There is a second field of flags.
    pub const INIT_EXT: u64 = 1 << 30;
    /// Shared mappings of a file whose reads and writes go around the page cache.
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
}

/// Flags of the answer to `OPEN`.
pub mod open_flag {
    /// Reads and writes go around the page cache.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// Nothing to be told when it is closed.
    pub const NOFLUSH: u32 = 1 << 5;
    /// Direct writes need not wait for each other.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Which fields of `SETATTR` count.
pub mod set_flag {
    #![allow(missing_docs, reason = "the names are the kernel's")]
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// Modes of `fallocate(2)`, and what `lseek(2)` looks for.
pub mod file {
    /// The size stays.
    pub const KEEP_SIZE: u32 = 1;
    /// The range reads as zeros, its space is given back.
    pub const PUNCH_HOLE: u32 = 2;
    /// The range reads as zeros.
    pub const ZERO_RANGE: u32 = 16;
    /// The next data.
    pub const SEEK_DATA: u32 = 3;
    /// The next hole.
    pub const SEEK_HOLE: u32 = 4;
    /// A regular file, in the mode of a file.
    pub const REGULAR: u32 = 0o100_000;
}

/// The bit of an open file's flags that asks for durable writes (`O_DSYNC`; `O_SYNC` has it too).
pub const OPEN_DSYNC: u32 = libc::O_DSYNC as u32;
/// The bits of an open file's flags that say how it may be used, and the value for reading only.
pub const OPEN_ACCESS: u32 = 3;
/// Opened for reading only.
pub const OPEN_READ_ONLY: u32 = 0;

/// Tells the kernel that what it knows of a node is no longer so (`FUSE_NOTIFY_INVAL_INODE`).
pub const NOTIFY_INVAL_INODE: i32 = 2;

/// Fields of a structure, one after the other. Beyond its end everything is zero and
/// [`Fields::all_there`] is false.
pub(super) struct Fields<'a> {
    bytes: &'a [u8],
    short: bool,
}

impl<'a> Fields<'a> {
    pub(super) fn of(bytes: &'a [u8]) -> Fields<'a> {
        Fields {
            bytes,
            short: false,
        }
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.bytes.split_first_chunk::<N>() {
            Some((field, rest)) => {
                self.bytes = rest;
                *field
            }
            None => {
                self.short = true;
                self.bytes = &[];
                [0; N]
            }
        }
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }

    pub(super) fn skip<const N: usize>(&mut self) -> &mut Self {
        self.take::<N>();
        self
    }

    pub(super) fn all_there(&self) -> bool {
        !self.short
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        self.bytes
    }
}
