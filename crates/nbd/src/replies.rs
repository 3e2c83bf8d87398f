//! What a server sends after the handshake, cut into events.
//!
//! Invariants: an event about a request lies inside of what that request asked for; data is passed on as it arrives, so
//! nothing that a server says decides how much memory is taken; a caller's buffer needs
//! [`Replies::BUFFER_BYTES`].

use gaur_block::Errno;

use crate::request::Headers;
use crate::violation::Violation;
use crate::wire::{
    CHUNK_LEN, CHUNK_MAGIC, EXTENDED_CHUNK_LEN, EXTENDED_CHUNK_MAGIC, Fields, SIMPLE_REPLY_LEN,
    SIMPLE_REPLY_MAGIC, STRING_MAX_BYTES, chunk, cmd, known_errno,
};

/// Flag of the types of chunks that tell errors.
const ERROR_FLAG: u16 = 1 << 15;

/// Longest content of a chunk that tells an error: number, length, message, offset.
const ERROR_BYTES_MAX: u32 = STRING_MAX_BYTES as u32 + 14;

/// Longest block status that is read, in bytes: a million extents.
const STATUS_BYTES_MAX: u32 = 4 + (8 << 20);

/// A request that is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Its type, of [`cmd`].
    pub kind: u16,
    /// Where it begins.
    pub offset_bytes: u64,
    /// For how many bytes.
    pub len_bytes: u64,
}

/// What comes of feeding [`Replies`]. All but `Need` are about the request of a cookie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// More bytes are needed.
    Need,
    /// Data, where the request asked for it.
    Data {
        /// Of the request.
        cookie: u64,
        /// Where in the export.
        offset_bytes: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Zeros, likewise.
    Hole {
        /// Of the request.
        cookie: u64,
        /// Where in the export.
        offset_bytes: u64,
        /// How many.
        len_bytes: u64,
    },
    /// The next extent, which may end behind what was asked for.
    Extent {
        /// Of the request.
        cookie: u64,
        /// Length, at least 1.
        len_bytes: u64,
        /// Flags of the context.
        state: u32,
    },
    /// It failed; more may be said about it.
    Failed {
        /// Of the request.
        cookie: u64,
        /// With this error.
        errno: Errno,
        /// The server's words.
        message: String,
    },
    /// Nothing more is said about it.
    Done {
        /// Of the request.
        cookie: u64,
    },
}

/// Content of a chunk that is on its way.
#[derive(Clone, Copy, Debug)]
enum Content {
    Data {
        offset_bytes: u64,
    },
    Extents,
    /// With numbers of 64 bits.
    LongExtents,
}

/// What a chunk begins with.
struct Chunk {
    last: bool,
    kind: u16,
    cookie: u64,
    /// Of its content.
    len: u32,
    header_len: usize,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    cookie: u64,
    content: Content,
    left: u64,
    last: bool,
}

/// Cuts the bytes of a connection into events.
#[derive(Debug)]
pub struct Replies {
    headers: Headers,
    context: Option<u32>,
    part: Option<Part>,
    /// A request that is done with the next event.
    finished: Option<u64>,
}

type Fed<'a> = Result<(usize, Event<'a>), Violation>;

impl Replies {
    /// A buffer of this many bytes holds whatever one call needs to see at once.
    pub const BUFFER_BYTES: usize = EXTENDED_CHUNK_LEN + ERROR_BYTES_MAX as usize;

    /// Before the first reply. `context` is the number of `base:allocation`.
    pub fn new(headers: Headers, context: Option<u32>) -> Replies {
        Replies {
            headers,
            context,
            part: None,
            finished: None,
        }
    }

    /// Takes the front of `input`, what has arrived and was not used yet. Returns how many bytes of it were used.
    /// `asked` tells the request of a cookie.
    pub fn feed<'a>(
        &mut self,
        input: &'a [u8],
        asked: impl FnOnce(u64) -> Option<Asked>,
    ) -> Fed<'a> {
        if let Some(cookie) = self.finished.take() {
            return Ok((0, Event::Done { cookie }));
        }
        if let Some(part) = self.part {
            return self.content(part, input);
        }
        let mut fields = Fields(input);
        match (fields.u32(), self.headers) {
            (None, _) => Ok((0, Event::Need)),
            (Some(SIMPLE_REPLY_MAGIC), Headers::Simple | Headers::Structured) => {
                self.simple(input, fields, asked)
            }
            (Some(CHUNK_MAGIC), Headers::Structured)
            | (Some(EXTENDED_CHUNK_MAGIC), Headers::Extended) => self.chunk(fields, asked),
            (Some(other), _) => Err(Violation::ReplyMagic(other)),
        }
    }

    fn simple<'a>(
        &mut self,
        input: &'a [u8],
        mut fields: Fields<'a>,
        asked: impl FnOnce(u64) -> Option<Asked>,
    ) -> Fed<'a> {
        let (Some(error), Some(cookie)) = (fields.u32(), fields.u64()) else {
            return Ok((0, Event::Need));
        };
        let asked = asked(cookie).ok_or(Violation::Unasked)?;
        if error != 0 {
            self.finished = Some(cookie);
            return Ok((SIMPLE_REPLY_LEN, failed(cookie, error, &[])));
        }
        match asked.kind {
            cmd::READ if self.headers == Headers::Simple => {
                let part = Part {
                    cookie,
                    content: Content::Data {
                        offset_bytes: asked.offset_bytes,
                    },
                    left: asked.len_bytes,
                    last: true,
                };
                let (used, event) =
                    self.content(part, input.get(SIMPLE_REPLY_LEN..).unwrap_or_default())?;
                Ok((SIMPLE_REPLY_LEN + used, event))
            }
            // What these are told comes in chunks.
            cmd::READ | cmd::BLOCK_STATUS => Err(Violation::Incomplete(asked.kind)),
            _ => Ok((SIMPLE_REPLY_LEN, Event::Done { cookie })),
        }
    }

    /// What a chunk begins with; `None` when not all of it is there.
    fn chunk_header(&self, fields: &mut Fields<'_>) -> Result<Option<Chunk>, Violation> {
        let (flags, kind, cookie) = (fields.u16(), fields.u16(), fields.u64());
        let (len, header_len) = match self.headers {
            Headers::Extended => {
                // The offset of the request, which its cookie tells as well.
                fields.u64();
                (fields.u64(), EXTENDED_CHUNK_LEN)
            }
            _ => (fields.u32().map(u64::from), CHUNK_LEN),
        };
        let (Some(flags), Some(kind), Some(cookie), Some(len)) = (flags, kind, cookie, len) else {
            return Ok(None);
        };
        Ok(Some(Chunk {
            last: flags & chunk::FLAG_DONE != 0,
            kind,
            cookie,
            len: u32::try_from(len).map_err(|_| Violation::ChunkLength(kind, u32::MAX))?,
            header_len,
        }))
    }

    fn chunk<'a>(
        &mut self,
        mut fields: Fields<'a>,
        asked: impl FnOnce(u64) -> Option<Asked>,
    ) -> Fed<'a> {
        let Some(header) = self.chunk_header(&mut fields)? else {
            return Ok((0, Event::Need));
        };
        let Chunk {
            last,
            kind,
            cookie,
            len,
            header_len,
        } = header;
        let asked = asked(cookie).ok_or(Violation::Unasked)?;
        let (used, event) = match (kind, asked.kind) {
            (chunk::NONE, _) if len == 0 && last => (0, Event::Done { cookie }),
            (chunk::OFFSET_DATA, cmd::READ) if len > 8 => {
                let Some(offset_bytes) = fields.u64() else {
                    return Ok((0, Event::Need));
                };
                let left = u64::from(len) - 8;
                asked.check(offset_bytes, left)?;
                let content = Content::Data { offset_bytes };
                let part = Part {
                    cookie,
                    content,
                    left,
                    last,
                };
                let (used, event) = self.content(part, fields.0)?;
                (8 + used, event)
            }
            (chunk::OFFSET_HOLE, cmd::READ) if len == 12 => {
                let Some(event) = hole(cookie, &asked, fields)? else {
                    return Ok((0, Event::Need));
                };
                self.finished = last.then_some(cookie);
                (12, event)
            }
            (chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT, cmd::BLOCK_STATUS)
                if is_status_len(kind, len) =>
            {
                let Some(part) = self.status(&header, &mut fields)? else {
                    return Ok((0, Event::Need));
                };
                let before = u64::from(len) - part.left;
                let (used, event) = self.content(part, fields.0)?;
                (before as usize + used, event)
            }
            (chunk::NONE, _)
            | (chunk::OFFSET_DATA | chunk::OFFSET_HOLE, cmd::READ)
            | (chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT, cmd::BLOCK_STATUS) => {
                return Err(Violation::ChunkLength(kind, len));
            }
            (error, _) if error & ERROR_FLAG != 0 => match error_chunk(kind, len, fields)? {
                None => return Ok((0, Event::Need)),
                Some((number, message)) => {
                    self.finished = last.then_some(cookie);
                    (len as usize, failed(cookie, number, message))
                }
            },
            (kind, asked) => return Err(Violation::ChunkType(kind, asked)),
        };
        Ok((header_len + used, event))
    }

    /// The extents of a chunk that tells them, which are of the context that was chosen; `None` when what stands before
    /// them is not all there.
    fn status(&self, header: &Chunk, fields: &mut Fields<'_>) -> Result<Option<Part>, Violation> {
        let len = u64::from(header.len);
        let (context, count) = match header.kind {
            chunk::BLOCK_STATUS_EXT => (fields.u32(), fields.u32()),
            _ => (fields.u32(), Some(0)),
        };
        let (Some(context), Some(count)) = (context, count) else {
            return Ok(None);
        };
        let (content, left) = match header.kind {
            chunk::BLOCK_STATUS_EXT => (Content::LongExtents, len - 8),
            _ => (Content::Extents, len - 4),
        };
        let is_counted = header.kind != chunk::BLOCK_STATUS_EXT || u64::from(count) * 16 == left;
        if Some(context) != self.context || !is_counted {
            return Err(Violation::BlockStatus);
        }
        Ok(Some(Part {
            cookie: header.cookie,
            content,
            left,
            last: header.last,
        }))
    }

    /// Goes on with the content of a chunk.
    fn content<'a>(&mut self, mut part: Part, input: &'a [u8]) -> Fed<'a> {
        let cookie = part.cookie;
        self.part = Some(part);
        let (used, event) = match &mut part.content {
            Content::Data { .. } if input.is_empty() && part.left > 0 => {
                return Ok((0, Event::Need));
            }
            Content::Data { offset_bytes } => {
                let len =
                    usize::try_from(part.left).map_or(input.len(), |left| left.min(input.len()));
                let (bytes, at) = (&input[..len], *offset_bytes);
                *offset_bytes += len as u64;
                (
                    len,
                    Event::Data {
                        cookie,
                        offset_bytes: at,
                        bytes,
                    },
                )
            }
            Content::Extents => {
                let mut fields = Fields(input);
                let (Some(len), Some(state)) = (fields.u32(), fields.u32()) else {
                    return Ok((0, Event::Need));
                };
                if len == 0 {
                    return Err(Violation::BlockStatus);
                }
                let len_bytes = u64::from(len);
                (
                    8,
                    Event::Extent {
                        cookie,
                        len_bytes,
                        state,
                    },
                )
            }
            Content::LongExtents => {
                let mut fields = Fields(input);
                let (Some(len_bytes), Some(state)) = (fields.u64(), fields.u64()) else {
                    return Ok((0, Event::Need));
                };
                if len_bytes == 0 || len_bytes > i64::MAX as u64 {
                    return Err(Violation::BlockStatus);
                }
                let state = u32::try_from(state).unwrap_or(u32::MAX);
                (
                    16,
                    Event::Extent {
                        cookie,
                        len_bytes,
                        state,
                    },
                )
            }
        };
        part.left -= used as u64;
        let ended = part.left == 0;
        self.finished = (ended && part.last).then_some(cookie);
        self.part = (!ended).then_some(part);
        Ok((used, event))
    }
}

impl Asked {
    /// Refuses data of outside of what was asked for.
    fn check(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), Violation> {
        let end = offset_bytes.checked_add(len_bytes);
        let inside = offset_bytes >= self.offset_bytes
            && end.is_some_and(|end| end <= self.offset_bytes.saturating_add(self.len_bytes));
        match inside && len_bytes > 0 {
            true => Ok(()),
            false => Err(Violation::DataRange(offset_bytes)),
        }
    }
}

/// Whether a chunk of this length can tell of extents.
fn is_status_len(kind: u16, len: u32) -> bool {
    let (before, one) = match kind {
        chunk::BLOCK_STATUS_EXT => (8, 16),
        _ => (4, 8),
    };
    (before + one..=STATUS_BYTES_MAX).contains(&len) && (len - before).is_multiple_of(one)
}

/// A chunk of zeros; `None` when not all of it is there.
fn hole(
    cookie: u64,
    asked: &Asked,
    mut fields: Fields<'_>,
) -> Result<Option<Event<'static>>, Violation> {
    let (Some(offset_bytes), Some(len_bytes)) = (fields.u64(), fields.u32()) else {
        return Ok(None);
    };
    let len_bytes = u64::from(len_bytes);
    asked.check(offset_bytes, len_bytes)?;
    Ok(Some(Event::Hole {
        cookie,
        offset_bytes,
        len_bytes,
    }))
}

/// Number and message of a chunk that tells an error; `None` when not all of it is there.
fn error_chunk(kind: u16, len: u32, fields: Fields<'_>) -> Result<Option<(u32, &[u8])>, Violation> {
    let bad_length = Violation::ChunkLength(kind, len);
    if !(6..=ERROR_BYTES_MAX).contains(&len) {
        return Err(bad_length);
    }
    let mut fields = fields;
    let Some(content) = fields.bytes(len as usize) else {
        return Ok(None);
    };
    let mut content = Fields(content);
    let (number, text) = (content.u32(), content.u16());
    let message = content.bytes(usize::from(text.unwrap_or_default()));
    match number.unwrap_or_default() {
        0 => Err(Violation::NoError),
        number => Ok(Some((number, message.ok_or(bad_length)?))),
    }
}

fn failed(cookie: u64, number: u32, message: &[u8]) -> Event<'static> {
    let errno = Errno::from_raw(i32::try_from(number).unwrap_or_default());
    let message = String::from_utf8_lossy(&message[..message.len().min(STRING_MAX_BYTES)]);
    Event::Failed {
        cookie,
        errno: known_errno(errno),
        message: message.chars().filter(|one| !one.is_control()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Asked = Asked {
        kind: cmd::READ,
        offset_bytes: 100,
        len_bytes: 50,
    };

    fn chunk(flags: u16, kind: u16, content: &[u8]) -> Vec<u8> {
        let mut bytes = CHUNK_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(7_u64.to_be_bytes());
        bytes.extend((content.len() as u32).to_be_bytes());
        bytes.extend(content);
        bytes
    }

    fn data(offset: u64, bytes: &[u8], flags: u16) -> Vec<u8> {
        let content = [&offset.to_be_bytes()[..], bytes].concat();
        chunk(flags, chunk::OFFSET_DATA, &content)
    }

    /// All events of some bytes that arrive `step` at a time, as text.
    fn events(bytes: &[u8], step: usize, asked: Asked) -> Result<Vec<String>, Violation> {
        events_of(Headers::Structured, bytes, step, asked)
    }

    fn events_of(
        headers: Headers,
        bytes: &[u8],
        step: usize,
        asked: Asked,
    ) -> Result<Vec<String>, Violation> {
        let mut replies = Replies::new(headers, Some(3));
        let (mut events, mut start, mut end) = (Vec::new(), 0, 0);
        loop {
            let (used, event) =
                replies.feed(&bytes[start..end], |cookie| (cookie == 7).then_some(asked))?;
            start += used;
            match event {
                Event::Need if end == bytes.len() => return Ok(events),
                Event::Need => end = (end + step).min(bytes.len()),
                event => events.push(format!("{event:?}")),
            }
        }
    }

    #[test]
    fn a_reply_in_chunks_is_the_same_however_it_arrives() {
        let mut extents = 3_u32.to_be_bytes().to_vec();
        for field in [10_u32, 0, 40, 3] {
            extents.extend(field.to_be_bytes());
        }
        let status = chunk(1, chunk::BLOCK_STATUS, &extents);
        let ask = Asked {
            kind: cmd::BLOCK_STATUS,
            ..READ
        };
        let whole = events(&status, status.len(), ask).unwrap();
        assert_eq!(whole.len(), 3, "{whole:?}");
        assert_eq!(events(&status, 1, ask).unwrap(), whole);

        let hole = [&120_u64.to_be_bytes()[..], &30_u32.to_be_bytes()].concat();
        let reply = [data(100, &[5; 20], 0), chunk(1, chunk::OFFSET_HOLE, &hole)].concat();
        let whole = events(&reply, reply.len(), READ).unwrap();
        assert_eq!(whole.len(), 3);
        assert!(
            whole[1].contains("Hole") && whole[2].contains("Done"),
            "{whole:?}"
        );
        assert!(events(&reply, 1, READ).unwrap().len() > 20);
    }

    fn extended(flags: u16, kind: u16, content: &[u8]) -> Vec<u8> {
        let mut bytes = EXTENDED_CHUNK_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(7_u64.to_be_bytes());
        bytes.extend(100_u64.to_be_bytes());
        bytes.extend((content.len() as u64).to_be_bytes());
        bytes.extend(content);
        bytes
    }

    #[test]
    fn extended_replies_are_the_same_however_they_arrive_and_nothing_else_comes() {
        let ask = Asked {
            kind: cmd::BLOCK_STATUS,
            ..READ
        };
        let of = |bytes: &[u8], step, asked| events_of(Headers::Extended, bytes, step, asked);
        let mut extents = [3_u32.to_be_bytes(), 2_u32.to_be_bytes()].concat();
        for field in [1_u64 << 40, 3, 1, 1 << 33] {
            extents.extend(field.to_be_bytes());
        }
        let status = extended(1, chunk::BLOCK_STATUS_EXT, &extents);
        let whole = of(&status, status.len(), ask).unwrap();
        assert!(whole[0].contains("1099511627776"), "{whole:?}");
        assert!(whole[1].contains("state: 4294967295"), "{whole:?}");
        assert_eq!(whole.len(), 3);
        assert_eq!(of(&status, 1, ask).unwrap(), whole);
        let content = [&100_u64.to_be_bytes()[..], &[5; 50]].concat();
        let data = extended(1, chunk::OFFSET_DATA, &content);
        assert!(of(&data, 99, READ).unwrap()[0].contains("bytes: [5, 5"));
        assert!(of(&data, 1, READ).unwrap().len() > 50);

        let refused = |bytes: &[u8], asked| of(bytes, bytes.len(), asked).unwrap_err();
        let short = super::tests::data(100, &[1], 1);
        assert_eq!(refused(&short, READ), Violation::ReplyMagic(CHUNK_MAGIC));
        extents[7] = 3;
        let miscounted = extended(1, chunk::BLOCK_STATUS_EXT, &extents);
        assert_eq!(refused(&miscounted, ask), Violation::BlockStatus);
        let mut endless = extended(1, chunk::OFFSET_DATA, &content);
        endless[24..32].fill(0xff);
        assert_eq!(refused(&endless, READ), Violation::ChunkLength(1, u32::MAX));
    }

    #[test]
    fn what_a_server_may_not_say_is_a_violation() {
        let of = |bytes: &[u8]| events(bytes, bytes.len(), READ).unwrap_err();
        assert_eq!(of(&[1, 2, 3, 4]), Violation::ReplyMagic(0x0102_0304));
        assert_eq!(of(&data(99, &[1], 0)), Violation::DataRange(99));
        assert_eq!(of(&data(149, &[1, 2], 0)), Violation::DataRange(149));
        assert_eq!(of(&data(u64::MAX, &[1], 0)), Violation::DataRange(u64::MAX));
        assert_eq!(
            of(&chunk(0, chunk::OFFSET_DATA, &[0; 8])),
            Violation::ChunkLength(1, 8)
        );
        assert_eq!(
            of(&chunk(1, chunk::NONE, &[0])),
            Violation::ChunkLength(0, 1)
        );
        assert_eq!(of(&chunk(1, 77, &[])), Violation::ChunkType(77, cmd::READ));
        assert_eq!(of(&chunk(1, chunk::ERROR, &[0; 6])), Violation::NoError);
        assert_eq!(
            of(&chunk(1, chunk::ERROR, &[0; 5])),
            Violation::ChunkLength(0x8001, 5)
        );
        let long = [&[0, 0, 0, 5][..], &[0xff, 0xff]].concat();
        assert_eq!(
            of(&chunk(1, chunk::ERROR, &long)),
            Violation::ChunkLength(0x8001, 6)
        );
        let mut unasked = data(100, &[1], 0);
        unasked[8] = 1;
        assert_eq!(of(&unasked), Violation::Unasked);
        // A simple reply to a read that was to come in chunks.
        let simple = [
            &SIMPLE_REPLY_MAGIC.to_be_bytes()[..],
            &[0; 4],
            &7_u64.to_be_bytes(),
        ]
        .concat();
        assert_eq!(of(&simple), Violation::Incomplete(cmd::READ));
        // A length that would take hours to skip.
        let mut endless = chunk(1, chunk::ERROR, &[0; 6]);
        endless[16..20].fill(0xff);
        assert_eq!(of(&endless), Violation::ChunkLength(0x8001, u32::MAX));
    }

    #[test]
    fn block_status_of_another_context_or_without_length_is_a_violation() {
        let ask = Asked {
            kind: cmd::BLOCK_STATUS,
            ..READ
        };
        let status = |fields: [u32; 3]| {
            let content: Vec<u8> = fields
                .iter()
                .flat_map(|field| field.to_be_bytes())
                .collect();
            events(&chunk(1, chunk::BLOCK_STATUS, &content), 99, ask)
        };
        assert!(status([3, 10, 0]).is_ok());
        assert_eq!(status([4, 10, 0]), Err(Violation::BlockStatus));
        assert_eq!(status([3, 0, 0]), Err(Violation::BlockStatus));
    }

    #[test]
    fn errors_come_with_the_servers_words_and_a_number_that_is_known() {
        let content = [&28_u32.to_be_bytes()[..], &[0, 4], b"full"].concat();
        let told = events(&chunk(1, chunk::ERROR, &content), 99, READ).unwrap();
        assert!(
            told[0].contains("ENOSPC") && told[0].contains("full"),
            "{told:?}"
        );
        assert!(told[1].contains("Done"));
        let content = [&0xffff_ffff_u32.to_be_bytes()[..], &[0, 0]].concat();
        let told = events(&chunk(1, chunk::ERROR, &content), 99, READ).unwrap();
        assert!(told[0].contains("EIO"), "{told:?}");
    }
}
