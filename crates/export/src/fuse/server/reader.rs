//! The requests of one thread, from the kernel to their answers.
//!
//! There are as many workers as requests may run at once, each with a buffer. One of them leads: it
//! reads the next request. If that is done without waiting for anything, it answers and goes on
//! leading, so that a request that needs no disk costs no change of tasks. Otherwise it passes the
//! lead on to the worker that was idle for the shortest time, whose memory is warm, and leads again
//! when it is woken for that or finds that no worker leads. All workers are of one thread and every step
//! between two awaits is sync, so there is no lock.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use gaur_block::{Device, Errno};
use gaur_reactor::local::Notify;
use gaur_reactor::{Descriptor, Either, race, yield_now};

use super::control::Resizer;
use super::device::{self, Received};
use super::execute::Answer;
use super::file::File;
use super::request_buffer::{Pages, RequestBuffer};
use crate::fuse::proto::{self, Refusal, Reply, Request};
use crate::serve::{Disk, InFlight, OnDrop, PanicGuard};

/// Requests that are answered in a row before others of the thread have their turn.
const ROW: u32 = 32;

/// An idle worker.
struct WorkerSlot {
    /// It is to lead, or to end.
    woken: Notify,
    /// The memory of its buffer, which holds nothing while it is idle.
    pages: Pages,
    /// It has worked since the last trim.
    active: Cell<bool>,
}

/// What the workers of one thread share.
pub(super) struct Reader<D> {
    pub(super) device: Rc<Disk<D>>,
    pub(super) file: Arc<File>,
    pub(super) resizer: Resizer,
    /// `None` when it was cut off.
    kernel: RefCell<Option<Rc<Descriptor>>>,
    /// Idle workers, the one that was idle longest first.
    idle: RefCell<Vec<Rc<WorkerSlot>>>,
    /// A worker leads.
    led: Cell<bool>,
    /// Workers that have not ended.
    workers: InFlight,
    over: Cell<bool>,
    /// Wakes the leader when it is over.
    quit: Notify,
    failure: Cell<Option<Errno>>,
}

impl<D: Device + 'static> Reader<D> {
    pub(super) fn new(
        device: Rc<Disk<D>>,
        file: Arc<File>,
        resizer: Resizer,
        kernel: OwnedFd,
    ) -> Reader<D> {
        Reader {
            device,
            file,
            resizer,
            kernel: RefCell::new(Some(Rc::new(Descriptor::new(kernel)))),
            idle: RefCell::default(),
            led: Cell::new(true),
            workers: InFlight::default(),
            over: Cell::new(false),
            quit: Notify::new(),
            failure: Cell::new(None),
        }
    }

    /// Whether no more requests are taken.
    pub(super) fn over(&self) -> bool {
        self.over.get()
    }

    /// Takes no more requests.
    pub(super) fn close(&self) {
        self.over.set(true);
        self.quit.notify_one();
        for worker in self.idle.take() {
            worker.woken.notify_one();
        }
    }

    /// Lets go of the kernel's device, whatever is under way: no answer is waited for.
    pub(super) fn hang_up(&self) {
        self.close();
        self.kernel.take();
    }

    /// Gives back the memory of workers that have rested since the last call.
    fn trim(&self) {
        for worker in self.idle.borrow().iter() {
            if !worker.active.replace(false) {
                // SAFETY: an idle worker has its buffer and nothing in it, and is of this thread.
                unsafe { worker.pages.give_back() };
            }
        }
    }

    /// Serves until there are no more requests and the last is answered.
    ///
    /// # Errors
    /// When memory is short, or the kernel's device fails.
    pub(super) async fn run(self: &Rc<Self>, depth: u32) -> Result<(), Errno> {
        let buffers: Result<Vec<RequestBuffer>, Errno> =
            (0..depth).map(|_| RequestBuffer::new()).collect();
        let trimmed = Rc::downgrade(self);
        gaur_reactor::keep_trimmed(move || trimmed.upgrade().map(|reader| reader.trim()).is_some());
        for (number, buffer) in buffers?.into_iter().enumerate() {
            self.workers.begin();
            let leads = number == 0;
            gaur_reactor::spawn(self.clone().work(buffer, leads));
        }
        self.workers.drained().await;
        self.failure.get().map_or(Ok(()), Err)
    }

    async fn work(self: Rc<Self>, mut buffer: RequestBuffer, leads: bool) {
        // A device that panics broke its word, and its request is never answered unless it is over for all.
        let _present = OnDrop(|| self.workers.end());
        let _guard = PanicGuard(|| self.fail(Errno::EIO));
        let own = Rc::new(WorkerSlot {
            woken: Notify::new(),
            pages: buffer.pages(),
            active: Cell::new(true),
        });
        let mut leads = leads;
        let mut row = 0;
        loop {
            if !leads && !self.lead(&own).await {
                return;
            }
            leads = true;
            own.active.set(true);
            let Some(request) = self.next(&mut buffer, &mut row).await else {
                return;
            };
            let mut served = pin!(self.serve(&mut buffer, &request));
            let at_once = poll_fn(|context| Poll::Ready(served.as_mut().poll(context))).await;
            if at_once.is_pending() {
                leads = false;
                self.pass_on();
                served.await;
            }
        }
    }

    /// Waits until it is this worker's turn to lead; `false` when it is over.
    async fn lead(&self, own: &Rc<WorkerSlot>) -> bool {
        if self.over.get() {
            return false;
        }
        if self.led.replace(true) {
            self.idle.borrow_mut().push(own.clone());
            own.woken.notified().await;
        }
        !self.over.get()
    }

    fn pass_on(&self) {
        match self.idle.borrow_mut().pop() {
            Some(worker) => worker.woken.notify_one(),
            None => self.led.set(false),
        }
    }

    /// The next request that is to be served; `None` when it is over.
    async fn next(&self, buffer: &mut RequestBuffer, row: &mut u32) -> Option<Request> {
        while !self.over.get() {
            match self.receive(buffer) {
                Ok(Received::Request(len)) => {
                    *row += 1;
                    if row.is_multiple_of(ROW) {
                        yield_now().await;
                    }
                    let bytes = buffer.request().get(..len).unwrap_or_default();
                    match proto::parse(bytes) {
                        Ok(request) => return Some(request),
                        Err(refusal) => self.refuse(&refusal),
                    }
                }
                Ok(Received::Nothing) => self.wait().await,
                Ok(Received::End) => self.close(),
                Err(errno) => self.fail(errno),
            }
        }
        None
    }

    fn receive(&self, buffer: &mut RequestBuffer) -> Result<Received, Errno> {
        match &*self.kernel.borrow() {
            Some(kernel) => device::receive(kernel.as_fd(), buffer.request()),
            None => Ok(Received::End),
        }
    }

    /// Waits until there is a request, or it is over.
    async fn wait(&self) {
        let kernel = self.kernel.borrow().clone();
        if let Some(kernel) = kernel
            && let Either::Left(Err(errno)) = race(kernel.readable(), self.quit.notified()).await
        {
            self.fail(errno);
        }
    }

    fn refuse(&self, refusal: &Refusal) {
        if let Refusal::Error(head, errno) = refusal {
            self.send(Reply::error(head, *errno).bytes());
        }
    }

    async fn serve(&self, buffer: &mut RequestBuffer, request: &Request) {
        match self.execute(buffer, request).await {
            Answer::Reply(reply) => self.send(reply.bytes()),
            Answer::Data(reply, len) => self.send(buffer.answer(reply.bytes(), len)),
        }
    }

    fn send(&self, bytes: &[u8]) {
        let sent = match &*self.kernel.borrow() {
            Some(kernel) => device::send(kernel.as_fd(), bytes),
            None => Ok(()),
        };
        if let Err(errno) = sent {
            // The client of this one waits for ever: better that all of them are told.
            self.fail(errno);
        }
    }

    fn fail(&self, errno: Errno) {
        self.failure.set(Some(self.failure.get().unwrap_or(errno)));
        self.close();
    }
}
