//! What the kernel asks for.

use gaur_block::Errno;

use super::attributes::Change;
use super::init::Offer;
use super::wire::{self, Fields, IN_HEADER_LEN, WRITE_PAYLOAD_AT, opcode};

/// `ENOSYS`: the kernel need not ask again.
pub(crate) const ENOSYS: Errno = Errno::from_raw(38);
/// `ENOTTY`: no such control of a file.
const ENOTTY: Errno = Errno::from_raw(25);

/// What every request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Names the request in its reply.
    pub unique: u64,
    /// What it wants ([`opcode`]).
    pub opcode: u32,
}

/// A request that is answered with an error, or with nothing at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The kernel gets this error.
    Error(Head, Errno),
    /// The kernel expects no answer.
    Silent,
    /// These bytes are no request.
    Garbage,
}

/// A request that can be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// For the reply.
    pub head: Head,
    /// What is to be done.
    pub operation: Operation,
}

/// What `lseek(2)` looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whence {
    /// The next byte that is data.
    Data,
    /// The next byte of a hole.
    Hole,
}

/// What is to be done. Offsets and lengths are bytes; they do not overflow together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Agree on the protocol.
    Init(Offer),
    /// Say what the file is.
    GetAttributes,
    /// Change what the file is.
    SetAttributes(Change),
    /// Open it.
    Open {
        /// The program may write to it by this.
        write: bool,
    },
    /// Read.
    Read {
        /// First byte.
        offset_bytes: u64,
        /// Length in bytes, at most [`wire::PAYLOAD_MAX`].
        len_bytes: u32,
    },
    /// Write the payload, which lies from [`WRITE_PAYLOAD_AT`] on in the request.
    Write {
        /// First byte.
        offset_bytes: u64,
        /// Length in bytes, at most [`wire::PAYLOAD_MAX`].
        len_bytes: u32,
        /// Durable before it is answered.
        fua: bool,
    },
    /// Make durable what was written.
    Flush,
    /// Nothing, and say so: closing, the end of the mount.
    Nothing,
    /// Say what the file system is.
    FileSystem,
    /// Allocate, zero or free a range.
    Allocate {
        /// First byte.
        offset_bytes: u64,
        /// Length in bytes.
        len_bytes: u64,
        /// Of `fallocate(2)` ([`wire::file`]).
        mode: u32,
    },
    /// Find data or a hole.
    Seek {
        /// Where to start looking.
        offset_bytes: u64,
        /// What for.
        whence: Whence,
    },
}

/// The request in `bytes`, which are all that one read of the device returned.
///
/// # Errors
/// How it is refused.
pub fn parse(bytes: &[u8]) -> Result<Request, Refusal> {
    let mut fields = Fields::of(bytes);
    let len = fields.u32();
    let opcode = fields.u32();
    let unique = fields.u64();
    let node = fields.u64();
    let body = bytes.get(IN_HEADER_LEN..).ok_or(Refusal::Garbage)?;
    let head = Head { unique, opcode };
    if len as usize != bytes.len() {
        return Err(Refusal::Error(head, Errno::EIO));
    }
    let about_the_file = matches!(
        opcode,
        opcode::GETATTR
            | opcode::SETATTR
            | opcode::OPEN
            | opcode::READ
            | opcode::WRITE
            | opcode::RELEASE
            | opcode::FSYNC
            | opcode::FLUSH
            | opcode::IOCTL
            | opcode::FALLOCATE
            | opcode::LSEEK
    );
    if about_the_file && node != wire::ROOT_ID {
        return Err(Refusal::Error(head, Errno::ENOENT));
    }
    match operation(opcode, body) {
        Ok(operation) => Ok(Request { head, operation }),
        Err(Answer::Error(errno)) => Err(Refusal::Error(head, errno)),
        Err(Answer::None) => Err(Refusal::Silent),
    }
}

/// What a request gets that is not served.
enum Answer {
    Error(Errno),
    None,
}

impl From<Errno> for Answer {
    fn from(errno: Errno) -> Answer {
        Answer::Error(errno)
    }
}

fn operation(opcode: u32, body: &[u8]) -> Result<Operation, Answer> {
    let mut fields = Fields::of(body);
    let operation = match opcode {
        opcode::INIT => Operation::Init(Offer::read(&mut fields)),
        opcode::GETATTR => Operation::GetAttributes,
        opcode::SETATTR => Operation::SetAttributes(Change::read(&mut fields)),
        opcode::OPEN => {
            let flags = fields.u32();
            Operation::Open {
                write: flags & wire::OPEN_ACCESS != wire::OPEN_READ_ONLY,
            }
        }
        opcode::READ => read(&mut fields)?,
        opcode::WRITE => write(&mut fields, body)?,
        opcode::FSYNC | opcode::FLUSH | opcode::SYNCFS => Operation::Flush,
        opcode::RELEASE | opcode::DESTROY => Operation::Nothing,
        opcode::STATFS => Operation::FileSystem,
        opcode::FALLOCATE => allocate(&mut fields)?,
        opcode::LSEEK => seek(&mut fields)?,
        // The file system is one file, there is nothing in it.
        opcode::LOOKUP => return Err(Errno::ENOENT.into()),
        opcode::IOCTL => return Err(ENOTTY.into()),
        // The one node there is stays.
        opcode::FORGET | opcode::BATCH_FORGET => return Err(Answer::None),
        // To an interrupt this means: no more of these. No request takes for ever.
        _ => return Err(ENOSYS.into()),
    };
    if fields.all_there() {
        Ok(operation)
    } else {
        Err(Errno::EIO.into())
    }
}

fn in_range(offset_bytes: u64, len_bytes: u64) -> Result<(), Errno> {
    let end = offset_bytes.checked_add(len_bytes);
    match end {
        Some(end) if i64::try_from(end).is_ok() => Ok(()),
        _ => Err(Errno::EINVAL),
    }
}

fn read(fields: &mut Fields<'_>) -> Result<Operation, Errno> {
    let offset_bytes = fields.skip::<8>().u64();
    let len_bytes = fields.u32();
    if len_bytes as usize > wire::PAYLOAD_MAX {
        return Err(Errno::EINVAL);
    }
    in_range(offset_bytes, u64::from(len_bytes))?;
    fields.skip::<20>();
    Ok(Operation::Read {
        offset_bytes,
        len_bytes,
    })
}

fn write(fields: &mut Fields<'_>, body: &[u8]) -> Result<Operation, Errno> {
    let offset_bytes = fields.skip::<8>().u64();
    let len_bytes = fields.u32();
    let flags = fields.skip::<12>().u32();
    let payload = body.len().checked_sub(WRITE_PAYLOAD_AT - IN_HEADER_LEN);
    if payload != Some(len_bytes as usize) || len_bytes as usize > wire::PAYLOAD_MAX {
        return Err(Errno::EIO);
    }
    in_range(offset_bytes, u64::from(len_bytes))?;
    Ok(Operation::Write {
        offset_bytes,
        len_bytes,
        fua: flags & wire::OPEN_DSYNC != 0,
    })
}

fn allocate(fields: &mut Fields<'_>) -> Result<Operation, Errno> {
    let offset_bytes = fields.skip::<8>().u64();
    let len_bytes = fields.u64();
    let mode = fields.u32();
    in_range(offset_bytes, len_bytes)?;
    Ok(Operation::Allocate {
        offset_bytes,
        len_bytes,
        mode,
    })
}

fn seek(fields: &mut Fields<'_>) -> Result<Operation, Errno> {
    let offset_bytes = fields.skip::<8>().u64();
    let whence = match fields.u32() {
        wire::file::SEEK_DATA => Whence::Data,
        wire::file::SEEK_HOLE => Whence::Hole,
        // The kernel knows the others itself.
        _ => return Err(Errno::EINVAL),
    };
    Ok(Operation::Seek {
        offset_bytes,
        whence,
    })
}
