//! A thread that serves requests.
//!
//! It has the tags of one queue, of several, or a share of one queue's, and runs a task for each:
//! fetch, serve, answer and fetch the next in one command. Commands and the requests of the image's
//! files pile up in the thread's ring during a turn of its reactor and go to the kernel in one call.
//! A tag's memory is there before the first request; after warm-up nothing is allocated.
//!
//! A command that fetches cannot be taken back: the driver gives it back when a request comes or the
//! device ends. A thread therefore ends when the driver has let go of all its tags, and not before.

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use gaur_block::{Device, Errno, Payload, Request};
use gaur_reactor::command;

use super::channel::{Channel, Descriptors};
use super::supervisor::Event;
use super::transfer::{Job, Memory, Place, TransferMode};
use super::uapi;
use crate::serve::{InFlight, Log, say};

/// The longest piece of memory that is taken at once, in bytes: what the reactor's pool has.
const PIECE_BYTES: usize = 64 << 20;

/// What the tasks of a thread share.
pub(super) struct Worker<D> {
    pub(super) device: Rc<D>,
    pub(super) channel: Arc<Channel>,
    /// Of the queues that this thread has tags of.
    pub(super) descriptors: Vec<(u16, Descriptors)>,
    pub(super) mode: TransferMode,
    pub(super) events: mpsc::Sender<Event>,
    /// Some thread has been handed a tag back.
    pub(super) aborted: Arc<AtomicBool>,
    pub(super) log: Option<Log>,
    /// Tags that the driver has not given back for good.
    pub(super) tags: InFlight,
}

/// A tag, with its memory and the command that is next.
struct Fetch {
    place: Place,
    memory: Memory,
    operation: u32,
    result: i32,
}

impl<D: Device + 'static> Worker<D> {
    /// Serves `places` until the driver has given all of them back, and flushes the device.
    pub(super) async fn serve(self, places: &[Place], buffer_bytes: usize) -> Result<(), Errno> {
        let worker = Rc::new(self);
        for (place, memory) in places.iter().zip(memory_of(places.len(), buffer_bytes)) {
            let fetch = Fetch {
                place: *place,
                memory,
                operation: uapi::FETCH_REQ,
                result: 0,
            };
            worker.tags.begin();
            gaur_reactor::spawn(worker.clone().serve_tag(fetch));
        }
        worker.tags.drained().await;
        if worker.device.limits().read_only {
            return Ok(());
        }
        let flush = worker.device.submit(Request::Flush, Payload::None);
        flush.await
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
        let Fetch { place, .. } = *fetch;
        let (address, buffer) = if self.mode.zero_copy {
            (0, uapi::auto_buffer(place.buffer()))
        } else {
            (fetch.memory.address(), 0)
        };
        let payload = uapi::io_command(place.queue, place.tag, fetch.result, address);
        let channel = std::os::fd::AsFd::as_fd(&*self.channel);
        // SAFETY: the tag's memory is the driver's while this waits, and is kept by `fetch`, which
        // is borrowed meanwhile. The future is not dropped early: a task runs to its end.
        unsafe { command(channel, fetch.operation, payload, buffer) }.await
    }

    async fn answer(&self, fetch: &mut Fetch) -> Result<usize, Errno> {
        let place = fetch.place;
        let of_queue = self
            .descriptors
            .iter()
            .find(|(queue, _)| *queue == place.queue);
        let (_, descriptors) = of_queue.ok_or(Errno::EIO)?;
        let job = Job {
            device: &*self.device,
            channel: &self.channel,
            mode: self.mode,
            place,
            memory: &mut fetch.memory,
            descriptor: descriptors.get(place.tag),
        };
        job.run().await
    }

    fn end_tag(&self, fetch: &Fetch, errno: Errno) {
        if errno.raw() == uapi::ABORTED {
            if !self.aborted.swap(true, Ordering::AcqRel) {
                let _ = self.events.send(Event::Aborted);
            }
        } else {
            // An answer that the driver does not take leaves a request that can never be answered.
            let Place { queue, tag, .. } = fetch.place;
            let message = format!("ublk refuses a command for tag {tag} of queue {queue}: {errno}");
            let _ = self.events.send(Event::Broken(message));
        }
        self.tags.end();
    }

    fn say(&self, line: std::fmt::Arguments<'_>) {
        say(&self.log, &line.to_string());
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
