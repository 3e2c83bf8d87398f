//! Two aligned buffers: the stream fills one while the other is being written.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use gaur_block::{Device, Errno, File, Payload, Request, Source, Tag};
use gaur_engine::Queue;

use super::Guest;
use crate::engine::Failure;

const BUFFER_BYTES: usize = 1 << 20;

type Writing<'a, B> = Pin<Box<dyn Future<Output = Result<B, Errno>> + 'a>>;

/// The buffer that is filled, and the other one on its way.
struct Buffers<'a, F: File> {
    queue: &'a Queue<F>,
    filling: F::Buffer,
    filled: usize,
    offset: u64,
    writing: Option<Writing<'a, F::Buffer>>,
    spare: Option<F::Buffer>,
}

impl<F: File> Buffers<'_, F> {
    async fn put(&mut self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            let count = bytes.len().min(BUFFER_BYTES - self.filled);
            let (piece, rest) = bytes.split_at(count);
            self.filling[self.filled..self.filled + count].copy_from_slice(piece);
            self.filled += count;
            bytes = rest;
            if self.filled == BUFFER_BYTES {
                self.swap().await?;
            }
        }
        Ok(())
    }

    /// Waits for the other buffer, and starts to write this one.
    async fn swap(&mut self) -> Result<(), Errno> {
        if let Some(writing) = self.writing.take() {
            self.spare = Some(writing.await?);
        }
        let Some(next) = self.spare.take() else {
            return Err(Errno::EIO);
        };
        let full = std::mem::replace(&mut self.filling, next);
        let (queue, offset_bytes) = (self.queue, self.offset);
        let mut writing: Writing<'_, F::Buffer> = Box::pin(async move {
            let request = Request::Write {
                offset_bytes,
                fua: false,
            };
            let payload = Payload::Write(Source::Memory(&full[..BUFFER_BYTES]));
            queue.submit(Tag(0), request, payload).await?;
            Ok(full)
        });
        self.offset += BUFFER_BYTES as u64;
        self.filled = 0;
        match start(&mut writing).await {
            Some(done) => self.spare = Some(done?),
            None => self.writing = Some(writing),
        }
        Ok(())
    }
}

/// Polls once, and lets the host run once so that the request leaves this thread.
async fn start<T>(future: &mut Pin<Box<dyn Future<Output = T> + '_>>) -> Option<T> {
    let mut yielded = false;
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending if std::mem::replace(&mut yielded, true) => Poll::Ready(None),
        Poll::Pending => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

pub(super) async fn save<F: File>(
    queue: &Queue<F>,
    file: &F,
    guest: &Guest,
    bytes: u64,
) -> Result<(), Failure> {
    let mut buffers = Buffers {
        queue,
        filling: file.buffer(BUFFER_BYTES),
        filled: 0,
        offset: 0,
        writing: None,
        spare: Some(file.buffer(BUFFER_BYTES)),
    };
    for sent in guest.pages() {
        buffers.put(&sent.header).await?;
        buffers.put(sent.body).await?;
        if buffers.offset >= bytes {
            break;
        }
    }
    if let Some(writing) = buffers.writing.take() {
        writing.await?;
    }
    let flushed = queue.submit(Tag(0), Request::Flush, Payload::None).await;
    flushed.map_err(|errno| format!("flush: {errno}").into())
}
