//! Two aligned buffers: the stream fills one while the other is being written. A full one is on its way at
//! once, so for a moment there are two requests.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use futures_util::stream::{FuturesUnordered, StreamExt};
use gaur_block::{Device, Errno, File, Payload, Request, Source};
use gaur_engine::Queue;

use super::Guest;
use crate::engine::Failure;

const BUFFER_BYTES: usize = 1 << 20;

type PendingWrite<'a, B> = Pin<Box<dyn Future<Output = Result<B, Errno>> + 'a>>;

/// The two buffers, and how far they have come.
struct Buffers<'a, F: File> {
    queue: &'a Queue<F>,
    /// The one that is filled; none only while both are written.
    filling: Option<F::Buffer>,
    filled: usize,
    offset: u64,
    writing: FuturesUnordered<PendingWrite<'a, F::Buffer>>,
    free: Vec<F::Buffer>,
}

impl<F: File> Buffers<'_, F> {
    async fn put(&mut self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            let filling = self.filling.as_mut().ok_or(Errno::EIO)?;
            let count = bytes.len().min(BUFFER_BYTES - self.filled);
            let (piece, rest) = bytes.split_at(count);
            filling[self.filled..self.filled + count].copy_from_slice(piece);
            self.filled += count;
            bytes = rest;
            if self.filled == BUFFER_BYTES {
                self.swap().await?;
            }
        }
        Ok(())
    }

    /// Starts to write the full buffer, and waits until the other one is there.
    async fn swap(&mut self) -> Result<(), Errno> {
        let full = self.filling.take().ok_or(Errno::EIO)?;
        let (queue, offset_bytes) = (self.queue, self.offset);
        self.writing.push(Box::pin(async move {
            let request = Request::Write {
                offset_bytes,
                fua: false,
            };
            let payload = Payload::Write(Source::memory(&full[..BUFFER_BYTES]));
            queue.submit(request, payload).await?;
            Ok(full)
        }));
        self.offset += BUFFER_BYTES as u64;
        self.filled = 0;
        self.turn().await?;
        while self.free.is_empty()
            && let Some(written) = self.writing.next().await
        {
            self.free.push(written?);
        }
        self.filling = self.free.pop();
        Ok(())
    }

    /// Starts what was put on its way, and lets the host run once so that it leaves this thread.
    async fn turn(&mut self) -> Result<(), Errno> {
        let mut yielded = false;
        poll_fn(|context| {
            while let Poll::Ready(Some(written)) = self.writing.poll_next_unpin(context) {
                match written {
                    Ok(buffer) => self.free.push(buffer),
                    Err(errno) => return Poll::Ready(Err(errno)),
                }
            }
            if self.writing.is_empty() || std::mem::replace(&mut yielded, true) {
                return Poll::Ready(Ok(()));
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    }
}

pub(super) async fn save<F: File>(
    queue: &Queue<F>,
    file: &F,
    guest: &Guest,
    bytes: u64,
) -> Result<(), Failure> {
    let mut buffers = Buffers {
        queue,
        filling: Some(file.buffer(BUFFER_BYTES)),
        filled: 0,
        offset: 0,
        writing: FuturesUnordered::new(),
        free: vec![file.buffer(BUFFER_BYTES)],
    };
    for sent in guest.pages() {
        buffers.put(&sent.header).await?;
        buffers.put(sent.body).await?;
        if buffers.offset >= bytes {
            break;
        }
    }
    while let Some(written) = buffers.writing.next().await {
        written?;
    }
    let flushed = queue.submit(Request::Flush, Payload::None).await;
    flushed.map_err(|errno| format!("flush: {errno}").into())
}
