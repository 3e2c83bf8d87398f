//! A thread that serves requests.
//!
//! It has the tags of one queue, of several, or a share of one queue's, and runs a task for each:
//! fetch, serve, answer and fetch the next in one command. Commands and the requests of the image's
//! files pile up in the thread's ring during a turn of its reactor and go to the kernel in one call.
//! A tag's memory is there before the first request; after warm-up nothing is allocated.
//!
//! A command that fetches cannot be taken back: the driver gives it back when a request comes or the
//! device ends. A thread therefore ends when the driver has let go of all its tags, and not before.

use std::convert::Infallible;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use gaur_block::{Device, Errno, Payload, Request};
use gaur_reactor::{Either, command, race};

use super::char_device::Descriptors;
use super::options::ZERO_COPY;
use super::supervisor::Event;
use super::threads::{Shared, SizeQuery, ThreadStart};
use super::transfer::{Memory, ThreadTag, Transfer, TransferMode};
use super::uapi;
use crate::error::ServeError;
use crate::serve::{Channel, InFlight, OnDrop, say};

/// The longest piece of memory that is taken at once, in bytes: what the reactor's pool has.
const PIECE_BYTES: usize = 64 << 20;

/// What the tasks of a thread share.
struct Worker<D> {
    device: Rc<D>,
    shared: Shared,
    /// Of the queues that this thread has tags of.
    descriptors: Vec<(u16, Descriptors)>,
    mode: TransferMode,
    /// Tags that the driver has not given back for good.
    in_flight: InFlight,
}

/// A tag, with its memory and the command that is next.
struct Fetch {
    tag: ThreadTag,
    memory: Memory,
    operation: u32,
    result: i32,
}

/// Serves a thread's tags until the driver has given all of them back, and flushes the device.
pub(super) async fn serve<D: Device + 'static>(
    device: Rc<D>,
    start: ThreadStart,
) -> Result<(), ServeError> {
    let ThreadStart { shared, tags, .. } = start;
    let events = shared.events.clone();
    let _ended = OnDrop(|| events.put(Event::ThreadEnded));
    let worker = Rc::new(Worker::new(device.clone(), shared, &tags)?);
    for (tag, memory) in tags.iter().zip(memory_of(
        tags.len(),
        worker.shared.info.buffer_bytes as usize,
    )) {
        let fetch = Fetch {
            tag: *tag,
            memory,
            operation: uapi::FETCH_REQ,
            result: 0,
        };
        worker.in_flight.begin();
        gaur_reactor::spawn(worker.clone().serve_tag(fetch));
    }
    let drained = worker.in_flight.drained();
    match race(drained, answer_size(&*device, &start.size_queries)).await {
        Either::Left(()) => {}
        Either::Right(never) => match never {},
    }
    if device.limits().read_only {
        return Ok(());
    }
    let flushed = device.submit(Request::Flush, Payload::None).await;
    flushed.map_err(|errno| ServeError::because("the device could not be flushed", errno))
}

/// Answers each query with the size of the device.
async fn answer_size<D: Device>(device: &D, queries: &Channel<SizeQuery>) -> Infallible {
    loop {
        let query = queries.take().await;
        let _ = query.send(device.size_bytes());
    }
}

impl<D: Device + 'static> Worker<D> {
    fn new(device: Rc<D>, shared: Shared, tags: &[ThreadTag]) -> Result<Worker<D>, ServeError> {
        let mut queues: Vec<u16> = tags.iter().map(|tag| tag.queue).collect();
        queues.dedup();
        let map = |queue| {
            let descriptors = Descriptors::map(&shared.char_device, queue, shared.info.depth)?;
            Ok((queue, descriptors))
        };
        let mapped: Result<Vec<_>, Errno> = queues.into_iter().map(map).collect();
        let descriptors = mapped
            .map_err(|errno| ServeError::because("the requests of ublk cannot be seen", errno))?;
        let mode = TransferMode {
            zero_copy: shared.info.features.has(ZERO_COPY),
            max_transfer: (device.limits().max_transfer as usize).max(512),
        };
        Ok(Worker {
            device,
            shared,
            descriptors,
            mode,
            in_flight: InFlight::default(),
        })
    }

    async fn serve_tag(self: Rc<Self>, mut fetch: Fetch) {
        loop {
            match self.fetch(&fetch).await {
                Ok(uapi::FETCHED) => {}
                Ok(other) => self.say(format_args!("ublk sends a request of kind {other}")),
                Err(errno) => return self.end_tag(&fetch, errno),
            }
            fetch.operation = uapi::COMMIT_AND_FETCH_REQ;
            let mut guard = TagGuard {
                worker: &self,
                fetch: Some(fetch),
            };
            let result = match &mut guard.fetch {
                Some(fetch) => self.answer(fetch).await,
                None => Err(Errno::EIO),
            };
            let Some(served) = guard.fetch.take() else {
                return;
            };
            fetch = served;
            fetch.result = match result {
                Ok(len) => len as i32,
                Err(errno) => -errno.raw(),
            };
        }
    }

    /// Hands the tag to the driver, with the answer to its last request if there was one.
    async fn fetch(&self, fetch: &Fetch) -> Result<u32, Errno> {
        let Fetch { tag, .. } = *fetch;
        let (address, buffer) = if self.mode.zero_copy {
            (0, uapi::auto_buffer(tag.buffer()))
        } else {
            (fetch.memory.address(), 0)
        };
        let payload = uapi::io_command(tag.queue, tag.tag, fetch.result, address);
        let device = std::os::fd::AsFd::as_fd(&*self.shared.char_device);
        // SAFETY: the tag's memory is the driver's while this waits, and is kept by `fetch`, which
        // is borrowed meanwhile. The future is not dropped early: a task runs to its end.
        unsafe { command(device, fetch.operation, payload, buffer) }.await
    }

    async fn answer(&self, fetch: &mut Fetch) -> Result<usize, Errno> {
        let tag = fetch.tag;
        let of_queue = self
            .descriptors
            .iter()
            .find(|(queue, _)| *queue == tag.queue);
        let (_, descriptors) = of_queue.ok_or(Errno::EIO)?;
        let transfer = Transfer {
            device: &*self.device,
            char_device: &self.shared.char_device,
            mode: self.mode,
            tag,
            memory: &mut fetch.memory,
            descriptor: descriptors.get(tag.tag),
        };
        transfer.run().await
    }

    fn end_tag(&self, fetch: &Fetch, errno: Errno) {
        if errno.raw() == uapi::ABORTED {
            if !self.shared.aborted.swap(true, Ordering::AcqRel) {
                self.shared.events.put(Event::Aborted);
            }
        } else {
            // An answer that the driver does not take leaves a request that can never be answered.
            let ThreadTag { queue, tag, .. } = fetch.tag;
            let message = format!("ublk refuses a command for tag {tag} of queue {queue}: {errno}");
            self.shared.events.put(Event::Broken(message));
        }
        self.in_flight.end();
    }

    fn say(&self, line: std::fmt::Arguments<'_>) {
        say(&self.shared.log, &line.to_string());
    }
}

/// Has its tag only when a device panics in the middle of a request: it broke its word. The request
/// fails, and the tag is served on, for without it the block device could never be stopped.
struct TagGuard<'a, D: Device + 'static> {
    worker: &'a Rc<Worker<D>>,
    fetch: Option<Fetch>,
}

impl<D: Device + 'static> Drop for TagGuard<'_, D> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        if let Some(mut fetch) = self.fetch.take() {
            fetch.result = -libc::EIO;
            gaur_reactor::spawn(self.worker.clone().serve_tag(fetch));
        }
    }
}

/// Memory for `count` tags, from the reactor's pool where it has as much: it is registered with the
/// ring then.
fn memory_of(count: usize, len_bytes: usize) -> Vec<Memory> {
    let per_piece = (PIECE_BYTES / len_bytes).max(1);
    let mut memory = Vec::with_capacity(count);
    while memory.len() < count {
        let now = per_piece.min(count - memory.len());
        let whole = gaur_reactor::buffer(now * len_bytes);
        memory.append(&mut Memory::cut(whole, len_bytes));
    }
    memory
}

/// Bytes that the reactor's pool takes for [`memory_of`]: it hands out powers of two.
pub(super) fn pool_bytes(count: usize, len_bytes: usize) -> usize {
    let per_piece = (PIECE_BYTES / len_bytes).max(1);
    let whole = count / per_piece * (per_piece * len_bytes).next_power_of_two();
    let rest = (count % per_piece * len_bytes).next_power_of_two();
    whole + rest
}
