//! The transmission phase: requests.
//!
//! Invariant: an [`Event::Request`] is inside the export, allowed, and no longer than the payload
//! limit; everything else became a refusal on the way.

use gaur_block::Errno;

use super::violation::Violation;
use super::wire::{
    EXTENDED_REQUEST_LEN, EXTENDED_REQUEST_MAGIC, Fields, PAYLOAD_MAX_BYTES, REQUEST_LEN,
    REQUEST_MAGIC, cmd, cmd_flag,
};
use super::{Contexts, Session, Style};

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Send data.
    Read {
        /// In one chunk.
        unfragmented: bool,
    },
    /// Store data, which follows the request.
    Write,
    /// Make everything durable.
    Flush,
    /// Discard.
    Trim,
    /// Read ahead.
    Cache,
    /// Make a range read as zeros.
    WriteZeroes {
        /// Space may be given back.
        may_unmap: bool,
        /// Quickly, or not at all.
        fast: bool,
    },
    /// Say what is allocated.
    BlockStatus {
        /// One extent is enough.
        one: bool,
        /// Of these contexts.
        contexts: Contexts,
    },
}

impl Kind {
    /// Whether a flush afterwards makes something durable.
    pub fn changes(self) -> bool {
        matches!(self, Kind::Write | Kind::Trim | Kind::WriteZeroes { .. })
    }
}

/// A request that passed every check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// What the client calls it; comes back in the reply.
    pub cookie: u64,
    /// What it asks for.
    pub kind: Kind,
    /// First byte; inside the export. For [`Kind::Flush`] whatever the client sent.
    pub offset_bytes: u64,
    /// Length in bytes; ends inside the export. At most [`PAYLOAD_MAX_BYTES`] for reads and
    /// writes, 0 for [`Kind::Flush`].
    pub len_bytes: u64,
    /// Durable before the reply.
    pub fua: bool,
}

/// A request that is answered with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What the client calls it.
    pub cookie: u64,
    /// The offset it was for, as the client sent it.
    pub offset_bytes: u64,
    /// The error.
    pub errno: Errno,
    /// The error in words.
    pub reason: &'static str,
}

/// What comes of feeding a parser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// More bytes are needed.
    Need,
    /// A request. The payload of a write follows, see [`Parser::payload_left`].
    Request(Command),
    /// A request to be refused. Its payload, if any, is skipped by the parser.
    Refuse(Refusal),
    /// The client said goodbye.
    Disconnect,
    /// The client broke the protocol: close.
    Violation(Violation),
}

/// Cuts the bytes of a connection into requests.
#[derive(Debug)]
pub struct Parser {
    session: Session,
    payload_left: usize,
    skip: usize,
    ended: bool,
}

impl Parser {
    /// A parser before the first request of `session`.
    pub fn new(session: Session) -> Parser {
        Parser {
            session,
            payload_left: 0,
            skip: 0,
            ended: false,
        }
    }

    /// The session it serves.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Bytes of payload of the last [`Event::Request`] that were not taken yet. They are the next
    /// bytes of the connection and belong to the caller, who takes them and says so by
    /// [`Parser::take_payload`]; [`Parser::feed`] answers [`Event::Need`] until all are taken.
    pub fn payload_left(&self) -> usize {
        self.payload_left
    }

    /// The caller took `len` bytes of the payload, at most [`Parser::payload_left`].
    pub fn take_payload(&mut self, len: usize) {
        assert!(len <= self.payload_left, "a payload is taken once");
        self.payload_left -= len;
    }

    /// The caller does not want the rest of the payload: it is skipped as it arrives.
    pub fn skip_payload(&mut self) {
        self.skip = core::mem::take(&mut self.payload_left);
    }

    /// Takes the front of `input`, what has arrived and was not used yet. Returns how many bytes of
    /// it were used.
    pub fn feed(&mut self, input: &[u8]) -> (usize, Event) {
        if self.payload_left > 0 || self.ended {
            return (0, Event::Need);
        }
        let skipped = self.skip.min(input.len());
        self.skip -= skipped;
        let (used, event) = self.request(&input[skipped..]);
        self.ended = matches!(event, Event::Disconnect | Event::Violation(_));
        (skipped + used, event)
    }

    fn request(&mut self, input: &[u8]) -> (usize, Event) {
        let extended = self.session.style == Style::Extended;
        let magic = if extended {
            EXTENDED_REQUEST_MAGIC
        } else {
            REQUEST_MAGIC
        };
        // The magic is judged as soon as it is there, as in the handshake.
        let found = Fields(input).u32().unwrap_or(magic);
        if found != magic {
            return (4, Event::Violation(Violation::RequestMagic(found)));
        }
        let header = if extended {
            Header::extended(input)
        } else {
            Header::compact(input)
        };
        let Some((header, used)) = header else {
            return (0, Event::Need);
        };
        let payload = match header.kind {
            cmd::WRITE => header.len_bytes,
            _ if extended && header.flags & cmd_flag::PAYLOAD_LEN != 0 => header.len_bytes,
            _ => 0,
        };
        if payload > u64::from(PAYLOAD_MAX_BYTES) {
            return (used, Event::Violation(Violation::PayloadLength(payload)));
        }
        if header.kind == cmd::DISC {
            return (used, Event::Disconnect);
        }
        if header.kind == cmd::BLOCK_STATUS && payload > 0 && payload <= STATUS_PAYLOAD_MAX {
            return match input[used..].get(..payload as usize) {
                Some(content) => (used + content.len(), self.narrow_status(header, content)),
                None => (0, Event::Need),
            };
        }
        let event = match self.check(&header) {
            Ok(command) => {
                self.payload_left = payload as usize;
                Event::Request(command)
            }
            Err(refused) => {
                self.skip = payload as usize;
                refuse(&header, refused)
            }
        };
        (used, event)
    }

    /// A request for the status of some of the contexts, which its payload names behind the length of the range.
    fn narrow_status(&self, mut header: Header, content: &[u8]) -> Event {
        let mut fields = Fields(content);
        let len_bytes = fields.u64().unwrap_or_default();
        let mut wanted = Contexts::default();
        let mut is_sound = content.len() > 8 && content.len().is_multiple_of(4);
        while let Some(id) = fields.u32() {
            is_sound &= self.session.contexts.contains(id) && !wanted.contains(id);
            wanted.insert(id);
        }
        if !is_sound {
            let reason = "the payload names contexts that were not chosen, or none";
            return refuse(&header, (Errno::EINVAL, reason));
        }
        header.len_bytes = len_bytes;
        header.flags &= !cmd_flag::PAYLOAD_LEN;
        match self.check(&header) {
            Ok(mut command) => {
                if let Kind::BlockStatus { contexts, .. } = &mut command.kind {
                    *contexts = wanted;
                }
                Event::Request(command)
            }
            Err(refused) => refuse(&header, refused),
        }
    }

    fn check(&self, header: &Header) -> Result<Command, (Errno, &'static str)> {
        let (kind, allowed) = self.kind(header)?;
        let payload = header.kind == cmd::WRITE && self.session.style == Style::Extended;
        let allowed = if payload {
            allowed | cmd_flag::PAYLOAD_LEN
        } else {
            allowed
        };
        if header.flags & !(allowed | cmd_flag::FUA) != 0 {
            return Err((Errno::EINVAL, "unknown or misplaced command flags"));
        }
        let writes = matches!(kind, Kind::Write | Kind::Trim | Kind::WriteZeroes { .. });
        if writes && self.session.read_only {
            return Err((Errno::EPERM, "the export is read-only"));
        }
        let mut command = Command {
            cookie: header.cookie,
            kind,
            offset_bytes: header.offset_bytes,
            len_bytes: header.len_bytes,
            fua: header.flags & cmd_flag::FUA != 0,
        };
        if kind == Kind::Flush {
            // Its offset and length are reserved; clients have sent all kinds of things.
            command.len_bytes = 0;
            return Ok(command);
        }
        self.check_range(&command)?;
        Ok(command)
    }

    fn kind(&self, header: &Header) -> Result<(Kind, u16), (Errno, &'static str)> {
        let flag = |flag: u16| header.flags & flag != 0;
        Ok(match header.kind {
            cmd::READ => {
                let structured = self.session.style >= Style::Structured;
                let allowed = if structured { cmd_flag::DF } else { 0 };
                (
                    Kind::Read {
                        unfragmented: flag(cmd_flag::DF),
                    },
                    allowed,
                )
            }
            cmd::WRITE => (Kind::Write, 0),
            cmd::FLUSH => (Kind::Flush, 0),
            cmd::TRIM => (Kind::Trim, 0),
            cmd::CACHE => (Kind::Cache, 0),
            cmd::WRITE_ZEROES => (
                Kind::WriteZeroes {
                    may_unmap: !flag(cmd_flag::NO_HOLE),
                    fast: flag(cmd_flag::FAST_ZERO),
                },
                cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO,
            ),
            cmd::BLOCK_STATUS if self.session.contexts.count() == 0 => {
                return Err((Errno::EINVAL, "no metadata context was chosen"));
            }
            cmd::BLOCK_STATUS => (
                Kind::BlockStatus {
                    one: flag(cmd_flag::REQ_ONE),
                    contexts: self.session.contexts,
                },
                cmd_flag::REQ_ONE,
            ),
            _ => return Err((Errno::EINVAL, "unknown command")),
        })
    }

    fn check_range(&self, command: &Command) -> Result<(), (Errno, &'static str)> {
        let end = command.offset_bytes.checked_add(command.len_bytes);
        if end.is_none_or(|end| end > self.session.size_bytes) {
            let grows = matches!(command.kind, Kind::Write | Kind::WriteZeroes { .. });
            let errno = if grows { Errno::ENOSPC } else { Errno::EINVAL };
            return Err((errno, "request past the end of the export"));
        }
        if let Kind::Read { unfragmented } = command.kind
            && command.len_bytes > u64::from(PAYLOAD_MAX_BYTES)
        {
            // EOVERFLOW is for a client that forbade several chunks; it may ask again without.
            let errno = if unfragmented {
                Errno::EOVERFLOW
            } else {
                Errno::EINVAL
            };
            return Err((errno, "read is longer than the payload limit"));
        }
        if matches!(command.kind, Kind::BlockStatus { .. }) && command.len_bytes == 0 {
            return Err((Errno::EINVAL, "block status of no bytes"));
        }
        Ok(())
    }
}

/// Longest payload of a request for status that is looked at: a length, and every context there can be.
const STATUS_PAYLOAD_MAX: u64 = 8 + 4 * u128::BITS as u64;

fn refuse(header: &Header, (errno, reason): (Errno, &'static str)) -> Event {
    Event::Refuse(Refusal {
        cookie: header.cookie,
        offset_bytes: header.offset_bytes,
        errno,
        reason,
    })
}

struct Header {
    flags: u16,
    kind: u16,
    cookie: u64,
    offset_bytes: u64,
    len_bytes: u64,
}

impl Header {
    /// A compact header and its length, when all of it is there.
    fn compact(input: &[u8]) -> Option<(Header, usize)> {
        let (fields, length) = input
            .first_chunk::<REQUEST_LEN>()?
            .split_last_chunk::<4>()?;
        let len_bytes = u64::from(u32::from_be_bytes(*length));
        Some((Header::start(fields, len_bytes)?, REQUEST_LEN))
    }

    /// An extended header and its length, when all of it is there.
    fn extended(input: &[u8]) -> Option<(Header, usize)> {
        let header = input.first_chunk::<EXTENDED_REQUEST_LEN>()?;
        let (fields, length) = header.split_last_chunk::<8>()?;
        Some((
            Header::start(fields, u64::from_be_bytes(*length))?,
            EXTENDED_REQUEST_LEN,
        ))
    }

    /// The fields that both kinds of header begin with.
    fn start(fields: &[u8], len_bytes: u64) -> Option<Header> {
        let mut fields = Fields(fields);
        fields.u32()?;
        Some(Header {
            flags: fields.u16()?,
            kind: fields.u16()?,
            cookie: fields.u64()?,
            offset_bytes: fields.u64()?,
            len_bytes,
        })
    }
}
