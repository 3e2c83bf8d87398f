//! The historical path, as QEMU 10 takes it: `qemu_put_buffer` copies what is short into a buffer of 32 KiB
//! and refers to pages where they are; when 64 pieces have come together they are written with one
//! synchronous request. The request begins and ends inside blocks, so the file layer copies it to
//! aligned memory, together with what the blocks at its ends hold.

use gaur_block::{Device, Errno, File, Payload, Request, Source, Target};
use gaur_engine::Queue;

use super::Guest;
use crate::engine::Failure;

/// Short pieces are collected up to so many bytes.
const SHORT_BYTES: usize = 32 << 10;

/// Pieces of the stream that wait to be written.
#[derive(Default)]
struct PendingVectors<'a> {
    pieces: Vec<Chunk<'a>>,
    short: Vec<u8>,
}

enum Chunk<'a> {
    /// So many bytes of the short ones.
    Short(usize),
    Page(&'a [u8]),
}

impl<'a> PendingVectors<'a> {
    fn add_short(&mut self, bytes: &[u8]) {
        self.short.extend_from_slice(bytes);
        match self.pieces.last_mut() {
            Some(Chunk::Short(len)) => *len += bytes.len(),
            _ => self.pieces.push(Chunk::Short(bytes.len())),
        }
    }

    fn is_full(&self, most: usize) -> bool {
        self.pieces.len() >= most || self.short.len() >= SHORT_BYTES
    }

    /// Copies the pieces into `out`, and how many bytes they were; nothing waits any more.
    fn take(&mut self, out: &mut [u8]) -> usize {
        let (mut at, mut short) = (0, 0);
        for piece in self.pieces.drain(..) {
            let bytes = match piece {
                Chunk::Page(page) => page,
                Chunk::Short(len) => {
                    short += len;
                    &self.short[short - len..short]
                }
            };
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        }
        self.short.clear();
        at
    }
}

pub(super) async fn save<F: File>(
    queue: &Queue<F>,
    file: &F,
    guest: &Guest,
    bytes: u64,
    most: usize,
) -> Result<(), Failure> {
    let block = u64::from(file.limits().request_alignment);
    let mut memory = file.buffer(most * super::guest::PAGE + SHORT_BYTES + 2 * block as usize);
    let mut waiting = PendingVectors::default();
    let mut offset = 0;
    for sent in guest.pages() {
        waiting.add_short(&sent.header);
        if sent.body.len() < super::guest::PAGE {
            waiting.add_short(sent.body);
        } else {
            waiting.pieces.push(Chunk::Page(sent.body));
        }
        if waiting.is_full(most) {
            let head = (offset % block) as usize;
            let len = waiting.take(&mut memory[head..]) as u64;
            write_padded(queue, &mut memory, offset, len, block).await?;
            offset += len;
            if offset >= bytes {
                break;
            }
        }
    }
    let flushed = queue.submit(Request::Flush, Payload::None).await;
    flushed.map_err(|errno| format!("flush: {errno}").into())
}

/// Writes `len` bytes, which lie in `memory` as far from its start as `offset` is from that of a block,
/// as whole blocks.
async fn write_padded<F: File>(
    queue: &Queue<F>,
    memory: &mut [u8],
    offset: u64,
    len: u64,
    block: u64,
) -> Result<(), Errno> {
    let (start, end) = (
        offset - offset % block,
        (offset + len).next_multiple_of(block),
    );
    let mut edge = vec![0; block as usize];
    let head = (offset - start) as usize;
    let tail = (offset + len - start) as usize;
    if head > 0 {
        read(queue, start, &mut edge).await?;
        memory[..head].copy_from_slice(&edge[..head]);
    }
    if offset + len < end {
        read(queue, end - block, &mut edge).await?;
        let kept = block as usize - (end - offset - len) as usize;
        let rest = &edge[kept..];
        memory[tail..tail + rest.len()].copy_from_slice(rest);
    }
    let source = Source::memory(&memory[..(end - start) as usize]);
    let request = Request::Write {
        offset_bytes: start,
        fua: false,
    };
    queue.submit(request, Payload::Write(source)).await
}

async fn read<F: File>(queue: &Queue<F>, offset_bytes: u64, out: &mut [u8]) -> Result<(), Errno> {
    let payload = Payload::Read(Target::memory(out));
    queue.submit(Request::Read { offset_bytes }, payload).await
}
