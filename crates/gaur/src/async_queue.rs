//! A queue for any executor: its requests are served by threads of its own.
//!
//! Each thread has a reactor, a queue of the disk and as many tasks as requests may be under way on it. The
//! tasks take requests from one bounded channel, so a thread that is free takes the next, and a caller
//! waits while all are busy. A request owns its memory: the caller's future may be dropped at any time,
//! and the request then ends by itself.

use std::convert::Infallible;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use async_channel::{Receiver, Sender, bounded};
use gaur_block::Status;
use gaur_engine::{ErrorKind, Image};
use gaur_reactor::{Config, Reactor, spawn};

use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::queue::{Queue, Unmap};

/// What [`Disk::start`] starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncConfig {
    /// How many threads, at least 1.
    pub threads: usize,
    /// Most requests under way on each, at least 1. As many again wait for one of them.
    pub depth: usize,
    /// The reactor that each of them runs.
    pub reactor: Config,
}

impl Default for AsyncConfig {
    /// One thread with 64 requests.
    fn default() -> AsyncConfig {
        AsyncConfig {
            threads: 1,
            depth: 64,
            reactor: Config::default(),
        }
    }
}

type Serving<'q> = Pin<Box<dyn Future<Output = ()> + 'q>>;
/// A request, which one of the tasks makes on its thread's queue.
type Serve = Box<dyn for<'q> FnOnce(&'q Queue) -> Serving<'q> + Send>;

/// Requests as futures that are [`Send`] and need no executor in particular. Clones share the threads, which
/// end with the last of them. The methods are those of [`Queue`], with memory that is handed over; for
/// all others there is [`AsyncQueue::run`].
#[derive(Clone)]
pub struct AsyncQueue {
    requests: Sender<Serve>,
    /// Closed when all threads have ended.
    ended: Receiver<Infallible>,
    image: Arc<Image>,
}

impl AsyncQueue {
    pub(crate) fn start(disk: &Disk, config: &AsyncConfig) -> Result<AsyncQueue> {
        let (threads, depth) = (config.threads.max(1), config.depth.max(1));
        let (requests, to_serve) = bounded(threads * depth);
        let (ending, ended) = bounded(1);
        let (starting, started) = bounded(threads);
        for number in 0..threads {
            let thread = Thread {
                disk: disk.clone(),
                requests: to_serve.clone(),
                depth,
                _ending: ending.clone(),
            };
            let (reactor, starting) = (config.reactor, starting.clone());
            thread::Builder::new()
                .name(format!("gaur-disk-{number}"))
                .spawn(move || thread.run(&reactor, &starting))?;
        }
        // Returning early closes the channel, and with it ends the threads that did start.
        for _ in 0..threads {
            let result = started.recv_blocking();
            result.unwrap_or_else(|_| Err(gone()))?;
        }
        Ok(AsyncQueue {
            requests,
            ended,
            image: Arc::clone(disk.shared().image()),
        })
    }

    /// Calls `make` with the queue of one of the threads and drives what it returns there. Every request
    /// is made by this.
    ///
    /// # Errors
    /// What `make` returns; [`ErrorKind::Cancelled`] after [`AsyncQueue::close`].
    pub async fn run<T, M>(&self, make: M) -> Result<T>
    where
        T: Send + 'static,
        M: AsyncFnOnce(&Queue) -> Result<T> + Send + 'static,
    {
        let (reply, answer) = bounded(1);
        let serve: Serve = Box::new(move |queue| {
            Box::pin(async move {
                // The caller may have lost interest.
                let _ = reply.send(make(queue).await).await;
            })
        });
        self.requests.send(serve).await.map_err(|_| gone())?;
        answer.recv().await.map_err(|_| gone())?
    }

    /// Size of the disk in bytes, as of now.
    pub fn size_bytes(&self) -> u64 {
        self.image.size_bytes()
    }

    /// Fills `memory` from `offset` on and gives it back.
    pub async fn read_at(&self, offset: u64, mut memory: Vec<u8>) -> Result<Vec<u8>> {
        self.run(async move |queue| {
            queue.read_at(offset, &mut memory).await?;
            Ok(memory)
        })
        .await
    }

    /// Fills `parts`, one after the other, from `offset` on and gives them back.
    pub async fn read_vectored_at(
        &self,
        offset: u64,
        mut parts: Vec<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>> {
        self.run(async move |queue| {
            let mut slices: Vec<_> = parts.iter_mut().map(|part| IoSliceMut::new(part)).collect();
            queue.read_vectored_at(offset, &mut slices).await?;
            Ok(parts)
        })
        .await
    }

    /// Stores `bytes` at `offset`. They are durable after the next flush.
    pub async fn write_at<B>(&self, offset: u64, bytes: B) -> Result<()>
    where
        B: AsRef<[u8]> + Send + 'static,
    {
        self.run(async move |queue| queue.write_at(offset, bytes.as_ref()).await)
            .await
    }

    /// Stores `parts`, one after the other, at `offset`.
    pub async fn write_vectored_at<B>(&self, offset: u64, parts: Vec<B>) -> Result<()>
    where
        B: AsRef<[u8]> + Send + 'static,
    {
        self.run(async move |queue| {
            let slices = parts.iter().map(|part| IoSlice::new(part.as_ref()));
            let slices: Vec<_> = slices.collect();
            queue.write_vectored_at(offset, &slices).await
        })
        .await
    }

    /// Makes a range read as zeros.
    pub async fn zero(&self, range: Range<u64>, unmap: Unmap) -> Result<()> {
        self.run(async move |queue| queue.zero(range, unmap).await)
            .await
    }

    /// Says that a range is no longer needed. It reads as zeros or as before.
    pub async fn discard(&self, range: Range<u64>) -> Result<()> {
        self.run(async move |queue| queue.discard(range).await)
            .await
    }

    /// Makes every request durable that was complete before this one, on any queue of the disk.
    pub async fn flush(&self) -> Result<()> {
        self.run(async |queue| queue.flush().await).await
    }

    /// What the bytes from the start of `range` on are, for as far as they are the same.
    pub async fn status(&self, range: Range<u64>) -> Result<Status> {
        self.run(async move |queue| queue.status(range).await).await
    }

    /// Takes no further requests, of any clone, and waits until those under way are answered and the
    /// threads have let go of the disk.
    pub async fn close(self) {
        self.requests.close();
        // Nothing is ever sent: this ends when the last thread has.
        let _ = self.ended.recv().await;
    }
}

impl fmt::Debug for AsyncQueue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("AsyncQueue").field(&self.image).finish()
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Cancelled, "the threads of this queue have ended")
}

/// What a thread is given. The fields are dropped in this order.
struct Thread {
    disk: Disk,
    requests: Receiver<Serve>,
    depth: usize,
    _ending: Sender<Infallible>,
}

impl Thread {
    fn run(self, config: &Config, started: &Sender<Result<()>>) {
        let reactor = match Reactor::new(config) {
            Ok(reactor) => reactor,
            Err(errno) => {
                let error = Error::from(errno).context("cannot make a reactor");
                let _ = started.send_blocking(Err(error));
                return;
            }
        };
        let queue = Rc::new(self.disk.queue());
        let _ = started.send_blocking(Ok(()));
        reactor.block_on(async {
            for _ in 0..self.depth {
                let (queue, requests) = (Rc::clone(&queue), self.requests.clone());
                spawn(async move {
                    while let Ok(serve) = requests.recv().await {
                        serve(&queue).await;
                    }
                });
            }
            reactor.drained().await;
        });
    }
}
