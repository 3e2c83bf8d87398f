//! One thread's work: taking requests from the kernel and seeing each to its answer.
//!
//! There are as many workers as requests may run at once, each with a slot. One of them leads: it
//! takes the next request. If that is done without waiting for anything, it answers and goes on
//! leading, so that a request that needs no disk costs no change of tasks. Otherwise it passes the
//! lead on to the worker that has rested for the shortest time, whose memory is warm, and leads again
//! when it is rung for or finds that nobody does. All workers are of one thread and every step between
//! two awaits is sync, so there is no lock.

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

use super::device::{self, Received};
use super::execute::{self, Answer};
use super::file::File;
use super::keeper::Line;
use super::slot::{Pages, Slot};
use crate::fuse::proto::{self, Refusal, Reply, Request};

/// Requests that are answered in a row before others of the thread have their turn.
const ROW: u32 = 32;

/// Where a worker rests.
struct Desk {
    bell: Notify,
    /// The memory of its slot, which holds nothing while it rests.
    pages: Pages,
    /// It has worked since the last trim.
    active: Cell<bool>,
}

pub(super) struct Post<D> {
    pub(super) device: Rc<D>,
    pub(super) file: Arc<File>,
    pub(super) line: Line,
    /// Longest payload the disk takes at once.
    pub(super) max_transfer: usize,
    /// `None` when it was hung up on.
    kernel: RefCell<Option<Rc<Descriptor>>>,
    /// Workers at rest, the one that has rested longest first.
    idle: RefCell<Vec<Rc<Desk>>>,
    /// Somebody leads.
    led: Cell<bool>,
    workers: Cell<u32>,
    over: Cell<bool>,
    /// Rung for the leader when it is over.
    quit: Notify,
    /// Rung when a worker has ended.
    gone: Notify,
    failure: Cell<Option<Errno>>,
}

impl<D: Device + 'static> Post<D> {
    pub(super) fn new(device: Rc<D>, file: Arc<File>, line: Line, kernel: OwnedFd) -> Post<D> {
        Post {
            max_transfer: device.limits().max_transfer.max(1) as usize,
            device,
            file,
            line,
            kernel: RefCell::new(Some(Rc::new(Descriptor::new(kernel)))),
            idle: RefCell::default(),
            led: Cell::new(true),
            workers: Cell::new(0),
            over: Cell::new(false),
            quit: Notify::new(),
            gone: Notify::new(),
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
        for desk in self.idle.take() {
            desk.bell.notify_one();
        }
    }

    /// Lets go of the kernel's device, whatever is under way: nobody waits for its answers.
    pub(super) fn hang_up(&self) {
        self.close();
        self.kernel.take();
    }

    /// Gives back the memory of workers that have rested since the last call.
    fn trim(&self) {
        for desk in self.idle.borrow().iter() {
            if !desk.active.replace(false) {
                // SAFETY: a worker at rest has its slot and nothing in it, and is of this thread.
                unsafe { desk.pages.give_back() };
            }
        }
    }

    /// Serves until there are no more requests and the last is answered.
    ///
    /// # Errors
    /// When memory is short, or the kernel's device fails.
    pub(super) async fn run(self: &Rc<Self>, depth: u32) -> Result<(), Errno> {
        let slots: Result<Vec<Slot>, Errno> = (0..depth).map(|_| Slot::new()).collect();
        let trimmed = Rc::downgrade(self);
        gaur_reactor::keep_trimmed(move || trimmed.upgrade().map(|post| post.trim()).is_some());
        for (number, slot) in slots?.into_iter().enumerate() {
            self.workers.set(self.workers.get() + 1);
            let leads = number == 0;
            gaur_reactor::spawn(self.clone().work(slot, leads));
        }
        while self.workers.get() > 0 {
            self.gone.notified().await;
        }
        self.failure.get().map_or(Ok(()), Err)
    }

    async fn work(self: Rc<Self>, mut slot: Slot, leads: bool) {
        let _present = Present(&self);
        let desk = Rc::new(Desk {
            bell: Notify::new(),
            pages: slot.pages(),
            active: Cell::new(true),
        });
        let mut leads = leads;
        let mut row = 0;
        loop {
            if !leads && !self.lead(&desk).await {
                return;
            }
            leads = true;
            desk.active.set(true);
            let Some(request) = self.next(&mut slot, &mut row).await else {
                return;
            };
            let mut served = pin!(self.serve(&mut slot, &request));
            let at_once = poll_fn(|context| Poll::Ready(served.as_mut().poll(context))).await;
            if at_once.is_pending() {
                leads = false;
                self.pass_on();
                served.await;
            }
        }
    }

    /// Waits until it is this worker's turn to lead; `false` when it is over.
    async fn lead(&self, desk: &Rc<Desk>) -> bool {
        if self.over.get() {
            return false;
        }
        if self.led.replace(true) {
            self.idle.borrow_mut().push(desk.clone());
            desk.bell.notified().await;
        }
        !self.over.get()
    }

    fn pass_on(&self) {
        match self.idle.borrow_mut().pop() {
            Some(desk) => desk.bell.notify_one(),
            None => self.led.set(false),
        }
    }

    /// The next request that is to be served; `None` when it is over.
    async fn next(&self, slot: &mut Slot, row: &mut u32) -> Option<Request> {
        while !self.over.get() {
            match self.receive(slot) {
                Ok(Received::Request(len)) => {
                    *row += 1;
                    if row.is_multiple_of(ROW) {
                        yield_now().await;
                    }
                    let bytes = slot.request().get(..len).unwrap_or_default();
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

    fn receive(&self, slot: &mut Slot) -> Result<Received, Errno> {
        match &*self.kernel.borrow() {
            Some(kernel) => device::receive(kernel.as_fd(), slot.request()),
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

    async fn serve(&self, slot: &mut Slot, request: &Request) {
        match execute::run(self, slot, request).await {
            Answer::Reply(reply) => self.send(reply.bytes()),
            Answer::Data(reply, len) => self.send(slot.answer(reply.bytes(), len)),
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

/// A worker that has not ended. If it panics, the disk has broken its word, and its request will not
/// be answered unless it is over for all.
struct Present<'a, D: Device + 'static>(&'a Post<D>);

impl<D: Device + 'static> Drop for Present<'_, D> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Errno::EIO);
        }
        self.0.workers.set(self.0.workers.get() - 1);
        self.0.gone.notify_one();
    }
}
