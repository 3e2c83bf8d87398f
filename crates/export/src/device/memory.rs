//! A device in memory, shared by its clones.
//!
//! The bytes lie in chunks of [`CHUNK_BYTES`]; a chunk that was never written, or was discarded or
//! zeroed whole, takes no memory and shows as a hole. Locks: one per chunk, held while bytes are
//! copied and never over an await, one at a time.

use std::ops::Range;
use std::sync::Arc;

use gaur_block::{
    Device, DeviceLimits, Errno, Payload, Request, Segments, SegmentsMut, Source, Status, Target,
};
use parking_lot::Mutex;

use super::range;

/// Granularity of holes.
const CHUNK_BYTES: usize = 64 << 10;

type Chunk = Option<Box<[u8]>>;

/// A sparse device in memory. Clones show the same bytes, so every thread can have its own.
#[derive(Clone)]
pub struct Memory {
    size_bytes: u64,
    chunks: Arc<[Mutex<Chunk>]>,
}

/// The part of a request that lies in one chunk.
struct Part {
    chunk: usize,
    /// Within the chunk.
    bytes: Range<usize>,
}

impl Memory {
    /// A device of `size_bytes` zeros.
    pub fn new(size_bytes: u64) -> Memory {
        let chunks = size_bytes.div_ceil(CHUNK_BYTES as u64);
        Memory {
            size_bytes,
            chunks: (0..chunks).map(|_| Mutex::new(None)).collect(),
        }
    }

    fn read(&self, offset_bytes: u64, mut target: SegmentsMut<'_>) {
        for part in parts(offset_bytes, target.len() as u64) {
            let (into, rest) = target.split_at(part.bytes.len());
            match &*self.chunks[part.chunk].lock() {
                Some(bytes) => into.copy_from(&bytes[part.bytes]),
                None => into.fill_zeros(),
            }
            target = rest;
        }
    }

    fn write(&self, offset_bytes: u64, mut source: Segments<'_>) {
        for part in parts(offset_bytes, source.len() as u64) {
            let (from, rest) = source.split_at(part.bytes.len());
            let mut chunk = self.chunks[part.chunk].lock();
            let bytes = chunk.get_or_insert_with(|| vec![0; CHUNK_BYTES].into_boxed_slice());
            from.copy_to(&mut bytes[part.bytes]);
            source = rest;
        }
    }

    fn zero(&self, offset_bytes: u64, len_bytes: u64, may_unmap: bool) {
        for part in parts(offset_bytes, len_bytes) {
            let mut chunk = self.chunks[part.chunk].lock();
            let whole = part.bytes.len() == CHUNK_BYTES;
            match &mut *chunk {
                Some(_) if whole && may_unmap => *chunk = None,
                Some(bytes) => bytes[part.bytes].fill(0),
                None if may_unmap => {}
                None => *chunk = Some(vec![0; CHUNK_BYTES].into_boxed_slice()),
            }
        }
    }
}

impl Device for Memory {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            preferred_block: 4096,
            discard_block: CHUNK_BYTES as u32,
            max_transfer: u32::MAX,
            read_only: false,
        }
    }

    async fn submit(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        let (offset_bytes, len_bytes) = range::check(self.size_bytes, request, &payload)?;
        match (request, payload) {
            (_, Payload::Read(Target::Memory(memory))) => self.read(offset_bytes, memory),
            (_, Payload::Write(Source::Memory(memory))) => self.write(offset_bytes, memory),
            (Request::WriteZeroes { may_unmap, .. }, _) => {
                self.zero(offset_bytes, len_bytes, may_unmap);
            }
            (Request::Discard { .. }, _) => self.zero(offset_bytes, len_bytes, true),
            (Request::Flush, _) => {}
            _ => return Err(Errno::EOPNOTSUPP),
        }
        Ok(())
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Status, Errno> {
        let mut parts = parts(offset_bytes, len_bytes);
        let Some(first) = parts.next() else {
            return Err(Errno::EINVAL);
        };
        let allocated = self.chunks[first.chunk].lock().is_some();
        let mut len_bytes = first.bytes.len() as u64;
        for part in parts {
            if self.chunks[part.chunk].lock().is_some() != allocated {
                break;
            }
            len_bytes += part.bytes.len() as u64;
        }
        Ok(Status {
            len_bytes,
            allocated,
            zero: !allocated,
        })
    }
}

fn parts(offset_bytes: u64, len_bytes: u64) -> impl Iterator<Item = Part> {
    let end = offset_bytes + len_bytes;
    let mut next = offset_bytes;
    core::iter::from_fn(move || {
        if next >= end {
            return None;
        }
        let start = (next % CHUNK_BYTES as u64) as usize;
        let len = (CHUNK_BYTES - start).min((end - next).min(CHUNK_BYTES as u64) as usize);
        let chunk = (next / CHUNK_BYTES as u64) as usize;
        let part = Part {
            chunk,
            bytes: start..start + len,
        };
        next += len as u64;
        Some(part)
    })
}
