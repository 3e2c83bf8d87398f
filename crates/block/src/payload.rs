//! The bytes of a request: memory in one or many pieces, or a buffer that only the kernel can see.
//!
//! A host may hand either kind to the kernel while a request is in flight. Memory therefore belongs
//! to the queue (a pool, a connection), never to something that can vanish before the request ends;
//! requests are never cancelled.

use crate::{Segments, SegmentsMut};

/// Part of a buffer registered with the host's ring (ublk zero copy). Nobody in user space looks
/// inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Index in the ring's table of buffers.
    pub index: u16,
    /// First byte, counted from the start of that buffer.
    pub offset: u64,
    /// Length in bytes.
    pub len: usize,
}

impl Registered {
    fn split_at(self, mid: usize) -> (Registered, Registered) {
        assert!(
            mid <= self.len,
            "a registered buffer is split inside its length"
        );
        let head = Registered { len: mid, ..self };
        let tail = Registered {
            offset: self.offset + mid as u64,
            len: self.len - mid,
            ..self
        };
        (head, tail)
    }
}

/// Where the bytes of a read go.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    /// Memory the host may let the kernel write to until the request ends.
    Memory(SegmentsMut<'a>),
    /// A buffer registered with the ring.
    Registered(Registered),
}

impl<'a> Target<'a> {
    /// Memory in one piece.
    #[inline]
    pub fn memory(bytes: &'a mut [u8]) -> Target<'a> {
        Target::Memory(SegmentsMut::from(bytes))
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Target::Memory(memory) => memory.len(),
            Target::Registered(registered) => registered.len,
        }
    }

    /// Whether there are no bytes at all.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Splits in two at `mid` bytes (0 to `len`).
    #[inline]
    pub fn split_at(self, mid: usize) -> (Target<'a>, Target<'a>) {
        match self {
            Target::Memory(memory) => {
                let (head, tail) = memory.split_at(mid);
                (Target::Memory(head), Target::Memory(tail))
            }
            Target::Registered(registered) => {
                let (head, tail) = registered.split_at(mid);
                (Target::Registered(head), Target::Registered(tail))
            }
        }
    }
}

/// Where the bytes of a write come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Memory the host may let the kernel read until the request ends.
    Memory(Segments<'a>),
    /// A buffer registered with the ring.
    Registered(Registered),
}

impl<'a> Source<'a> {
    /// Memory in one piece.
    #[inline]
    pub fn memory(bytes: &'a [u8]) -> Source<'a> {
        Source::Memory(Segments::from(bytes))
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Source::Memory(memory) => memory.len(),
            Source::Registered(registered) => registered.len,
        }
    }

    /// Whether there are no bytes at all.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Splits in two at `mid` bytes (0 to `len`).
    #[inline]
    pub fn split_at(self, mid: usize) -> (Source<'a>, Source<'a>) {
        match self {
            Source::Memory(memory) => {
                let (head, tail) = memory.split_at(mid);
                (Source::Memory(head), Source::Memory(tail))
            }
            Source::Registered(registered) => {
                let (head, tail) = registered.split_at(mid);
                (Source::Registered(head), Source::Registered(tail))
            }
        }
    }
}

/// What travels with a [`crate::Request`].
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Nothing: write zeroes, discard, flush.
    None,
    /// The bytes a read fills.
    Read(Target<'a>),
    /// The bytes a write stores.
    Write(Source<'a>),
}

impl Payload<'_> {
    /// Length in bytes, 0 where there is none.
    #[inline]
    #[expect(
        clippy::len_without_is_empty,
        reason = "whether there is a payload is a matter of the request"
    )]
    pub fn len(&self) -> usize {
        match self {
            Payload::None => 0,
            Payload::Read(target) => target.len(),
            Payload::Write(source) => source.len(),
        }
    }
}
