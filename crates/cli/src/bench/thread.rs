//! The measuring loop of a bench thread: a task per request in flight, each of which sends its next
//! request when the one before is done.
//!
//! Nothing is allocated per request, and the clock is read once: the end of a request is the start
//! of the next. A flush that is due holds new requests back until nothing is in flight, or runs
//! beside them when the user wants no drain.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use gaur_block::{Device, Errno, Payload, Request, Source, Target};
use gaur_reactor::local::Notify;
use gaur_reactor::{Buffer, buffer, spawn, yield_now};

use super::histogram::Histogram;
use super::load::{BenchRequest, Sequence, Workload};

/// Requests after which a task lets others have their turn, even if none of them had to wait.
const REQUESTS_PER_POLL: u32 = 32;

/// What a thread did.
#[derive(Clone, Debug)]
pub struct ThreadStatistics {
    /// How long each request took.
    pub times: Histogram,
    /// Reads done.
    pub reads: u64,
    /// Writes done.
    pub writes: u64,
    /// Flushes done.
    pub flushes: u64,
    /// When the first request was sent.
    pub started: Instant,
    /// When the last request was done.
    pub ended: Instant,
}

/// A request that failed.
#[derive(Clone, Copy, Debug)]
pub struct RequestError {
    /// The request; `None` for a flush.
    pub request: Option<BenchRequest>,
    /// The error.
    pub errno: Errno,
}

/// What the tasks of a thread share.
struct BenchThread<D> {
    device: D,
    load: Workload,
    sequence: RefCell<Sequence>,
    tally: RefCell<ThreadStatistics>,
    deadline: Cell<Option<Instant>>,
    /// A request failed, in this thread or another.
    stop: Arc<AtomicBool>,
    failed: Cell<Option<RequestError>>,
    in_flight: Cell<u64>,
    /// A flush waits for the requests in flight, or is under way and holds new ones back.
    flush_due: Cell<bool>,
    /// Flushes that run beside the requests.
    flushing: Cell<u64>,
    changed: Notify,
}

/// Sends the requests of thread `thread` to `device`. `ready` is called when everything is prepared;
/// it may wait for other threads.
pub async fn run<D: Device + 'static>(
    device: D,
    load: Workload,
    thread: u64,
    stop: Arc<AtomicBool>,
    ready: impl FnOnce(),
) -> Result<ThreadStatistics, RequestError> {
    let slots: Vec<RequestBuffers> = (0..load.slots())
        .map(|_| RequestBuffers::new(&load))
        .collect();
    let now = Instant::now();
    let thread = Rc::new(BenchThread {
        device,
        load,
        sequence: RefCell::new(load.sequence(thread)),
        tally: RefCell::new(ThreadStatistics {
            times: Histogram::new(),
            reads: 0,
            writes: 0,
            flushes: 0,
            started: now,
            ended: now,
        }),
        deadline: Cell::new(None),
        stop,
        failed: Cell::new(None),
        in_flight: Cell::new(0),
        flush_due: Cell::new(false),
        flushing: Cell::new(0),
        changed: Notify::new(),
    });
    let tasks: Vec<_> = slots
        .into_iter()
        .map(|slot| spawn(slot.run(thread.clone())))
        .collect();
    // No task runs before the first await, and memory for everything is there.
    ready();
    thread.start();
    for task in tasks {
        task.await;
    }
    while thread.flushing.get() > 0 {
        thread.changed.notified().await;
    }
    match thread.failed.get() {
        Some(failed) => Err(failed),
        None => Ok(thread.tally.borrow().clone()),
    }
}

/// Memory of one request in flight.
struct RequestBuffers {
    read: Option<Buffer>,
    write: Option<Buffer>,
}

impl RequestBuffers {
    fn new(load: &Workload) -> RequestBuffers {
        let len_bytes = usize::try_from(load.buffer).unwrap_or(usize::MAX);
        // Touched, so that no request is the first to use a page.
        let filled = |byte| {
            let mut memory = buffer(len_bytes);
            memory.fill(byte);
            memory
        };
        RequestBuffers {
            read: load.reads().then(|| filled(0)),
            write: load.writes().then(|| filled(load.pattern)),
        }
    }

    /// Sends one request after the other.
    async fn run<D: Device + 'static>(mut self, thread: Rc<BenchThread<D>>) {
        let mut turn = REQUESTS_PER_POLL;
        let mut sent = Instant::now();
        loop {
            if thread.flush_due.get() {
                thread.drained_flush().await;
                sent = Instant::now();
                continue;
            }
            let Some(next) = thread.take(sent) else {
                return;
            };
            let result = self.send(&thread.device, next).await;
            let done = Instant::now();
            thread.done(next, result, sent, done);
            sent = done;
            turn -= 1;
            if turn == 0 {
                turn = REQUESTS_PER_POLL;
                yield_now().await;
                sent = Instant::now();
            }
        }
    }

    async fn send(&mut self, device: &impl Device, next: BenchRequest) -> Result<(), Errno> {
        let offset_bytes = next.offset;
        match (&mut self.read, &self.write) {
            (_, Some(memory)) if next.write => {
                let request = Request::Write {
                    offset_bytes,
                    fua: false,
                };
                let payload = Payload::Write(Source::memory(memory));
                device.submit(request, payload).await
            }
            (Some(memory), _) => {
                let payload = Payload::Read(Target::memory(memory));
                let request = Request::Read { offset_bytes };
                device.submit(request, payload).await
            }
            _ => Err(Errno::EINVAL),
        }
    }
}

impl<D: Device + 'static> BenchThread<D> {
    /// Starts the clock.
    fn start(&self) {
        let now = Instant::now();
        let end = self
            .load
            .runtime
            .and_then(|runtime| now.checked_add(runtime));
        self.deadline.set(end);
        let mut tally = self.tally.borrow_mut();
        (tally.started, tally.ended) = (now, now);
    }

    /// The next request, until the end. `now` is the time.
    fn take(&self, now: Instant) -> Option<BenchRequest> {
        if self.stop.load(Ordering::Relaxed) || self.deadline.get().is_some_and(|end| now >= end) {
            return None;
        }
        let next = self.sequence.borrow_mut().next()?;
        self.in_flight.set(self.in_flight.get() + 1);
        if next.flush_after && self.load.drain {
            self.flush_due.set(true);
        }
        Some(next)
    }

    fn done(
        self: &Rc<Self>,
        next: BenchRequest,
        result: Result<(), Errno>,
        sent: Instant,
        done: Instant,
    ) {
        self.in_flight.set(self.in_flight.get() - 1);
        if let Err(errno) = result {
            return self.fail(RequestError {
                request: Some(next),
                errno,
            });
        }
        let mut tally = self.tally.borrow_mut();
        tally.times.record(done.duration_since(sent));
        tally.ended = done;
        match next.write {
            true => tally.writes += 1,
            false => tally.reads += 1,
        }
        if next.flush_after && !self.load.drain {
            self.flushing.set(self.flushing.get() + 1);
            drop(spawn(self.clone().flush_beside()));
        }
    }

    fn fail(&self, failed: RequestError) {
        // The first one tells most.
        if self.failed.get().is_none() {
            self.failed.set(Some(failed));
        }
        self.stop.store(true, Ordering::Relaxed);
    }

    /// The task that finds nothing in flight flushes; the others wait for it.
    async fn drained_flush(&self) {
        if self.in_flight.get() > 0 {
            return self.changed.notified().await;
        }
        // Counts as in flight, so that no other thread takes it for drained.
        self.in_flight.set(1);
        self.flush().await;
        self.in_flight.set(0);
        self.flush_due.set(false);
        self.changed.notify_all();
    }

    async fn flush_beside(self: Rc<Self>) {
        self.flush().await;
        self.flushing.set(self.flushing.get() - 1);
        self.changed.notify_all();
    }

    async fn flush(&self) {
        let flushed = self.device.submit(Request::Flush, Payload::None);
        match flushed.await {
            Ok(()) => self.tally.borrow_mut().flushes += 1,
            Err(errno) => self.fail(RequestError {
                request: None,
                errno,
            }),
        }
    }
}
