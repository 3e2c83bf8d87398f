//! Scatter-gather lists: the memory of a request, which a guest or a client may be changing meanwhile.
//!
//! A segment is an address and a length, laid out as the kernel's `struct iovec`. Neither this module nor a
//! holder of segments makes a Rust reference to such memory: bytes are copied in and out through raw
//! pointers, and a guest that writes at the same time gets a mixture in its own data. That is also why
//! lists may be copied freely, like a `&Cell<[u8]>`.
//!
//! This is the only module of the crate with unsafe code. Memory that comes as a Rust borrow needs none
//! of its callers; for a guest's memory the caller vouches.

use core::fmt;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr;
use std::io::{IoSlice, IoSliceMut};

/// One run of memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Segment<'a> {
    start: *mut u8,
    len: usize,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> Segment<'a> {
    /// Memory that no Rust value owns, for example a guest's.
    ///
    /// # Safety
    /// While this value, a copy of it, or anything made from them is used, the memory is mapped and
    /// readable, no Rust reference to it exists, and its addresses do not wrap. Its bytes may change at
    /// any time.
    #[inline]
    pub const unsafe fn from_raw(start: *mut u8, len: usize) -> Segment<'a> {
        Segment {
            start,
            len,
            memory: PhantomData,
        }
    }

    /// Address of the first byte.
    #[inline]
    pub const fn start(self) -> *mut u8 {
        self.start
    }

    /// Length in bytes.
    #[expect(
        clippy::len_without_is_empty,
        reason = "a segment is cut and copied, never asked whether it is empty"
    )]
    #[inline]
    pub const fn len(self) -> usize {
        self.len
    }

    /// The segment without its first `count` bytes, at most its length.
    #[inline]
    fn skip(self, count: usize) -> Segment<'a> {
        assert!(count <= self.len, "a segment is cut inside its length");
        Segment {
            // SAFETY: at most one past the end of the memory.
            start: unsafe { self.start.add(count) },
            len: self.len - count,
            ..self
        }
    }

    #[inline]
    fn first(self, count: usize) -> Segment<'a> {
        assert!(count <= self.len, "a segment is cut inside its length");
        Segment { len: count, ..self }
    }
}

impl fmt::Debug for Segment<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?}+{}", self.start, self.len)
    }
}

impl<'a> From<&'a [u8]> for Segment<'a> {
    #[inline]
    fn from(bytes: &'a [u8]) -> Segment<'a> {
        // Only `SegmentsMut` writes, and none is made from this.
        let start = bytes.as_ptr().cast_mut();
        // SAFETY: the memory is borrowed for 'a, and shared references only read it.
        unsafe { Segment::from_raw(start, bytes.len()) }
    }
}

/// Memory to read from: one segment, or a window over a list of them.
///
/// Three words, because every request takes it through a dozen futures.
#[derive(Clone, Copy)]
pub struct Segments<'a> {
    /// The memory if `skip` is [`ONE`]. Otherwise the first [`Segment`] of a list that is borrowed for 'a.
    start: *mut u8,
    /// Bytes in the window. A list goes on for at least `skip` and these.
    len: usize,
    /// Bytes of the list's first segment that lie before the window; fewer than the segment has.
    skip: usize,
    memory: PhantomData<&'a [Segment<'a>]>,
}

/// In place of a number of bytes: there is no list. No memory is that long.
const ONE: usize = usize::MAX;

impl<'a> Segments<'a> {
    /// All of `list`, one segment after the other.
    ///
    /// # Panics
    /// When the sum of the lengths does not fit a `usize`.
    pub fn new(list: &'a [Segment<'a>]) -> Segments<'a> {
        let sum = list
            .iter()
            .try_fold(0, |sum: usize, one| sum.checked_add(one.len));
        Segments {
            start: list.as_ptr().cast_mut().cast(),
            len: sum.expect("a list of memory has a length"),
            skip: 0,
            memory: PhantomData,
        }
        .skip_in_list(0)
    }

    /// Length in bytes.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes at all.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Splits in two at `mid` bytes (0 to `len`).
    #[inline]
    pub fn split_at(self, mid: usize) -> (Segments<'a>, Segments<'a>) {
        assert!(mid <= self.len, "a payload is split inside its length");
        (Segments { len: mid, ..self }, self.skip(mid))
    }

    /// Without the first `count` bytes, at most the length.
    #[inline]
    fn skip(self, count: usize) -> Segments<'a> {
        match self.skip {
            ONE => Segments::from(self.first().skip(count)),
            _ => self.skip_in_list(count),
        }
    }

    fn skip_in_list(self, count: usize) -> Segments<'a> {
        let len = self.len - count;
        if len == 0 {
            return Segments::from(Segment::from(&[][..]));
        }
        let mut segment = self.start.cast::<Segment<'a>>();
        let mut skip = self.skip + count;
        // SAFETY: the list goes on for `skip + len` bytes, so the segment with the first of them is in it.
        unsafe {
            while skip >= (*segment).len {
                skip -= (*segment).len;
                segment = segment.add(1);
            }
        }
        Segments {
            start: segment.cast(),
            len,
            skip,
            ..self
        }
    }

    /// The first run of memory.
    #[inline]
    fn first(self) -> Segment<'a> {
        if self.skip == ONE {
            // SAFETY: it was made from such a segment.
            return unsafe { Segment::from_raw(self.start, self.len) };
        }
        // SAFETY: without `ONE` it is a list.
        let segment = unsafe { *self.start.cast::<Segment<'a>>() }.skip(self.skip);
        segment.first(segment.len.min(self.len))
    }

    /// The runs of memory in order, none of them empty.
    pub fn pieces(self) -> impl Iterator<Item = Segment<'a>> {
        let mut left = self;
        core::iter::from_fn(move || {
            (left.len > 0).then(|| {
                let piece = left.first();
                left = left.skip(piece.len);
                piece
            })
        })
    }

    /// The one run of memory that it is, if it is one.
    #[inline]
    pub fn single(self) -> Option<Segment<'a>> {
        Some(self.first()).filter(|first| first.len == self.len)
    }

    /// As much as the first `count` runs of memory hold.
    #[inline]
    pub fn first_pieces(self, count: usize) -> Segments<'a> {
        if self.skip == ONE && count > 0 {
            return self;
        }
        let len = self.pieces().take(count).map(Segment::len).sum();
        Segments { len, ..self }
    }

    /// Whether every run of memory starts at a multiple of `address` and, where there are several, is
    /// a multiple of `len` long (both powers of two).
    #[inline]
    pub fn is_aligned(self, address: usize, len: usize) -> bool {
        let fits = |piece: Segment<'_>, len: usize| {
            piece.start.addr() & (address - 1) == 0 && piece.len & (len - 1) == 0
        };
        match self.single() {
            Some(piece) => fits(piece, 1),
            None => (address | len) == 1 || self.pieces().all(|piece| fits(piece, len)),
        }
    }

    /// Whether all of it is zeros, as it is now. What is not is usually known after a few bytes.
    pub fn is_zero(self) -> bool {
        /// As much as is looked at before the next branch: it stays in the first cache.
        const LOOK_BYTES: usize = 1024;
        let mut look = [0; LOOK_BYTES];
        let mut left = self;
        while !left.is_empty() {
            let (now, later) = left.split_at(left.len.min(LOOK_BYTES));
            let bytes = &mut look[..now.len];
            now.copy_to(bytes);
            // A sum without branches, which the compiler makes wide.
            if bytes.iter().fold(0, |sum, byte| sum | byte) != 0 {
                return false;
            }
            left = later;
        }
        true
    }

    /// Appends all of it to `into`.
    pub fn append_to(self, into: &mut Vec<u8>) {
        into.reserve(self.len);
        for piece in self.pieces() {
            let there = into.len();
            // SAFETY: the memory is readable for `piece.len` bytes; as many were reserved behind what is there, which
            // the vector alone owns, and they are initialised when its length says so.
            unsafe {
                let end = into.as_mut_ptr().add(there);
                ptr::copy_nonoverlapping(piece.start, end, piece.len);
                into.set_len(there + piece.len);
            }
        }
    }

    /// Copies all of it to `into`, which is as long.
    pub fn copy_to(self, into: &mut [u8]) {
        assert_eq!(self.len, into.len(), "a copy has one length");
        let mut rest = into;
        for piece in self.pieces() {
            let (now, later) = rest.split_at_mut(piece.len);
            // SAFETY: the memory is readable for `now.len()` bytes, and `now` is borrowed exclusively,
            // so it is not part of it.
            unsafe { ptr::copy_nonoverlapping(piece.start, now.as_mut_ptr(), now.len()) };
            rest = later;
        }
    }
}

impl fmt::Debug for Segments<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_list().entries(self.pieces()).finish()
    }
}

impl<'a> From<Segment<'a>> for Segments<'a> {
    #[inline]
    fn from(first: Segment<'a>) -> Segments<'a> {
        Segments {
            start: first.start,
            len: first.len,
            skip: ONE,
            memory: PhantomData,
        }
    }
}

impl<'a> From<&'a [u8]> for Segments<'a> {
    #[inline]
    fn from(bytes: &'a [u8]) -> Segments<'a> {
        Segments::from(Segment::from(bytes))
    }
}

#[cfg(unix)]
impl<'a> From<&'a [IoSlice<'a>]> for Segments<'a> {
    fn from(list: &'a [IoSlice<'a>]) -> Segments<'a> {
        const { assert!(size_of::<IoSlice<'_>>() == size_of::<Segment<'_>>()) };
        // SAFETY: on Unix both have the layout of `struct iovec`, and an `IoSlice` is memory that is
        // borrowed for 'a.
        let list = unsafe { &*(ptr::from_ref(list) as *const [Segment<'a>]) };
        Segments::new(list)
    }
}

/// Memory to write to, which may be read as well.
#[derive(Clone, Copy, Debug)]
pub struct SegmentsMut<'a>(Segments<'a>);

impl<'a> SegmentsMut<'a> {
    /// Says that the memory may be written to.
    ///
    /// # Safety
    /// What [`Segment::from_raw`] asks holds for writing too, so none of it was borrowed as shared.
    pub const unsafe fn new(segments: Segments<'a>) -> SegmentsMut<'a> {
        SegmentsMut(segments)
    }

    /// Splits in two at `mid` bytes (0 to `len`).
    #[inline]
    pub fn split_at(self, mid: usize) -> (SegmentsMut<'a>, SegmentsMut<'a>) {
        let (head, tail) = self.0.split_at(mid);
        (SegmentsMut(head), SegmentsMut(tail))
    }

    /// As much as the first `count` runs of memory hold.
    #[inline]
    pub fn first_pieces(self, count: usize) -> SegmentsMut<'a> {
        SegmentsMut(self.0.first_pieces(count))
    }

    /// Fills all of it from `from`, which is as long.
    pub fn copy_from(self, from: &[u8]) {
        assert_eq!(self.0.len, from.len(), "a copy has one length");
        let mut rest = from;
        for piece in self.0.pieces() {
            let (now, later) = rest.split_at(piece.len);
            // SAFETY: the memory is writable for `now.len()` bytes, and no reference to it exists, so
            // `now` is not part of it.
            unsafe { ptr::copy_nonoverlapping(now.as_ptr(), piece.start, now.len()) };
            rest = later;
        }
    }

    /// Fills all of it with zeros.
    pub fn fill_zeros(self) {
        for piece in self.0.pieces() {
            // SAFETY: the memory is writable for that many bytes.
            unsafe { ptr::write_bytes(piece.start, 0, piece.len) };
        }
    }
}

impl<'a> Deref for SegmentsMut<'a> {
    type Target = Segments<'a>;

    #[inline]
    fn deref(&self) -> &Segments<'a> {
        &self.0
    }
}

impl<'a> From<&'a mut [u8]> for SegmentsMut<'a> {
    #[inline]
    fn from(bytes: &'a mut [u8]) -> SegmentsMut<'a> {
        // SAFETY: the memory is borrowed exclusively for 'a, so no other reference to it exists.
        let segment = unsafe { Segment::from_raw(bytes.as_mut_ptr(), bytes.len()) };
        SegmentsMut(Segments::from(segment))
    }
}

#[cfg(unix)]
impl<'a, 'b: 'a> From<&'a mut [IoSliceMut<'b>]> for SegmentsMut<'a> {
    fn from(list: &'a mut [IoSliceMut<'b>]) -> SegmentsMut<'a> {
        const { assert!(size_of::<IoSliceMut<'_>>() == size_of::<Segment<'_>>()) };
        // SAFETY: on Unix both have the layout of `struct iovec`, and the memory of an `IoSliceMut` is
        // borrowed exclusively for as long as the list is.
        let list = unsafe { &*(ptr::from_mut(list) as *const [Segment<'a>]) };
        SegmentsMut(Segments::new(list))
    }
}

#[cfg(test)]
mod tests;
