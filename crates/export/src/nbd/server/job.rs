//! A request on its way through a connection, and its reply.
//!
//! Jobs are made once and used again and again; with their vectors grown, a request allocates
//! nothing.

use std::io::IoSlice;
use std::ops::Range;

use gaur_block::Errno;
use gaur_reactor::Buffer;

use crate::nbd::proto::reply::{self, Asked};
use crate::nbd::proto::{Command, Kind, Style};

/// A stretch of a reply.
enum Part {
    /// Bytes of [`Job::head`].
    Head(Range<usize>),
    /// Bytes of the payload.
    Payload(Range<usize>),
}

/// Most parts of one reply; a reply is sent in one go.
pub(super) const PARTS_MAX: usize = 64;

/// Most memory that a job keeps for heads.
const HEAD_BYTES: usize = 4096;

pub(super) struct Job {
    pub(super) command: Command,
    /// What the reply says of the request.
    pub(super) asked: Asked,
    /// The payload; the first `command.len_bytes` of it count.
    pub(super) buffer: Option<Buffer>,
    /// It went to a worker, it is not a refusal.
    pub(super) worked: bool,
    head: Vec<u8>,
    parts: Vec<Part>,
}

fn asked(style: Style, command: &Command) -> Asked {
    Asked {
        style,
        cookie: command.cookie,
        offset_bytes: command.offset_bytes,
    }
}

impl Job {
    pub(super) fn new() -> Job {
        let command = Command {
            cookie: 0,
            kind: Kind::Flush,
            offset_bytes: 0,
            len_bytes: 0,
            fua: false,
        };
        Job {
            asked: asked(Style::Simple, &command),
            command,
            buffer: None,
            worked: false,
            head: Vec::with_capacity(256),
            parts: Vec::with_capacity(4),
        }
    }

    /// Forgets the last request.
    pub(super) fn begin(&mut self, style: Style, command: Command) {
        debug_assert!(
            self.buffer.is_none(),
            "the last payload went back to the pool"
        );
        self.asked = asked(style, &command);
        self.command = command;
        self.worked = false;
        self.restart();
    }

    /// Takes the payload's memory, and lets go of an unusual head's.
    pub(super) fn end(&mut self) -> Option<Buffer> {
        self.restart();
        self.head.shrink_to(HEAD_BYTES);
        self.buffer.take()
    }

    /// The payload's bytes.
    pub(super) fn payload(&mut self) -> &mut [u8] {
        match &mut self.buffer {
            Some(buffer) => buffer,
            None => &mut [],
        }
    }

    /// The reply's parts.
    pub(super) fn part_count(&self) -> usize {
        self.parts.len()
    }

    /// Appends the reply's bytes to `slices`, of which `used` are taken.
    pub(super) fn gather<'a>(&'a self, slices: &mut [IoSlice<'a>], used: &mut usize) {
        let payload = self.buffer.as_deref().unwrap_or(&[]);
        for part in &self.parts {
            slices[*used] = IoSlice::new(match part {
                Part::Head(range) => &self.head[range.clone()],
                Part::Payload(range) => &payload[range.clone()],
            });
            *used += 1;
        }
    }

    /// Adds bytes to the reply.
    pub(super) fn reply_bytes(&mut self, bytes: &[u8]) {
        let start = self.head.len();
        self.head.extend_from_slice(bytes);
        match self.parts.last_mut() {
            Some(Part::Head(range)) => range.end = self.head.len(),
            _ => self.parts.push(Part::Head(start..self.head.len())),
        }
    }

    /// Bytes of the reply so far, without payload.
    pub(super) fn reply_len(&self) -> usize {
        self.head.len()
    }

    /// Replaces bytes of the reply by as many others.
    pub(super) fn rewrite(&mut self, at: usize, bytes: &[u8]) {
        self.head[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Adds bytes of the payload to the reply.
    pub(super) fn reply_payload(&mut self, range: Range<usize>) {
        self.parts.push(Part::Payload(range));
    }

    /// Replaces the reply by that of a success without content.
    pub(super) fn succeed(&mut self) {
        self.restart();
        self.reply_bytes(&reply::success(&self.asked));
    }

    /// Replaces the reply by that of a read into the whole payload, `len_bytes` long.
    pub(super) fn succeed_with_payload(&mut self, len_bytes: u32) {
        self.restart();
        self.reply_bytes(&reply::read(&self.asked, len_bytes));
        if len_bytes > 0 {
            self.reply_payload(0..len_bytes as usize);
        }
    }

    /// Replaces the reply by an error.
    pub(super) fn fail(&mut self, errno: Errno, reason: &str) {
        self.restart();
        reply::error(&mut self.head, &self.asked, errno, reason);
        self.parts.push(Part::Head(0..self.head.len()));
    }

    fn restart(&mut self) {
        self.head.clear();
        self.parts.clear();
    }
}
