//! What the tasks of one connection share: the reader ([`super::connection`]), workers and a sender.
//!
//! A job goes round: free, taken by the reader, to an idle worker, into the outbox, sent, free. All
//! tasks are of one thread and every step is sync, so there is no lock; what crosses an await is
//! owned by the task that awaits. Bounds: `depth` jobs and as many workers, made when first needed;
//! payloads by [`Pool`], and a request that gets no memory for all of its payload is served by the
//! reader, piece by piece. A reply that cannot be sent is dropped, the job still comes back, and so
//! the connection always comes to rest.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::rc::Rc;

use gaur_block::{Device, Errno};
use gaur_reactor::Buffer;
use gaur_reactor::local::Notify;

use super::client::Client;
use super::execute;
use super::exports::Stand;
use super::job::{Job, PARTS_MAX};
use super::pool::{OWN_BYTES, Pool};
use super::shelf::Shelf;
use crate::nbd::proto::{Command, Session};

/// Most stretches of memory in one send.
const SLICES_MAX: usize = 128;
const _: () = assert!(PARTS_MAX <= SLICES_MAX);

/// Where a worker gets its work.
#[derive(Default)]
struct Desk {
    job: Cell<Option<Box<Job>>>,
    bell: Notify,
}

pub(super) struct Hub<D> {
    shelf: Rc<Shelf<D>>,
    client: std::sync::Arc<Client>,
    pub(super) stand: Rc<Stand<D>>,
    pub(super) session: Session,
    /// Longest payload the device takes at once.
    pub(super) max_transfer: usize,
    pool: RefCell<Pool>,
    #[allow(
        clippy::vec_box,
        reason = "jobs change hands several times per request"
    )]
    free: RefCell<Vec<Box<Job>>>,
    jobs: Cell<u32>,
    /// Rung when a job or payload memory comes back.
    room: Notify,
    desks: RefCell<Vec<Rc<Desk>>>,
    idle: RefCell<Vec<Rc<Desk>>>,
    outbox: RefCell<VecDeque<Box<Job>>>,
    outgoing: Notify,
    /// Jobs handed to workers or waiting to be sent.
    in_flight: Cell<u32>,
    /// Those of them that were put to work; the others are refusals.
    owed: Cell<u32>,
    rest: Notify,
    draining: Cell<bool>,
    /// Sending failed, or a worker is lost.
    broken: Cell<bool>,
    closing: Cell<bool>,
}

impl<D: Device + 'static> Hub<D> {
    /// The hub of a connection that chose an export; its sender runs from now on.
    pub(super) fn start(
        shelf: &Rc<Shelf<D>>,
        client: &std::sync::Arc<Client>,
        stand: Rc<Stand<D>>,
        session: Session,
    ) -> Rc<Hub<D>> {
        let hub = Rc::new(Hub {
            shelf: shelf.clone(),
            client: client.clone(),
            max_transfer: stand.device.limits().max_transfer.max(1) as usize,
            stand,
            session,
            pool: RefCell::new(Pool::new(shelf.options.buffer_bytes, &shelf.budget)),
            free: RefCell::default(),
            jobs: Cell::new(0),
            room: Notify::default(),
            desks: RefCell::default(),
            idle: RefCell::default(),
            outbox: RefCell::default(),
            outgoing: Notify::default(),
            in_flight: Cell::new(0),
            owed: Cell::new(0),
            rest: Notify::default(),
            draining: Cell::new(false),
            broken: Cell::new(false),
            closing: Cell::new(false),
        });
        gaur_reactor::spawn(hub.clone().send());
        let trimmed = Rc::downgrade(&hub);
        gaur_reactor::keep_trimmed(move || {
            let hub = trimmed.upgrade();
            hub.map(|hub| hub.pool.borrow_mut().trim()).is_some()
        });
        hub
    }

    /// Whether new requests are refused.
    pub(super) fn draining(&self) -> bool {
        self.draining.get()
    }

    /// From now on new requests are refused; when the last one under way is answered, the
    /// connection is closed.
    pub(super) fn drain(&self) {
        self.draining.set(true);
        self.check_rest();
    }

    /// A job for `command`, with `payload_bytes` of memory; waits for both. When there is less memory,
    /// and nothing else of the connection is under way, the job has a piece of [`OWN_BYTES`].
    pub(super) async fn take_job(&self, command: Command, payload_bytes: usize) -> Box<Job> {
        let mut job = loop {
            match self.try_take_job() {
                Some(job) => break job,
                None => self.room.notified().await,
            }
        };
        job.begin(self.session.style, command);
        if payload_bytes > 0 {
            loop {
                job.buffer = self.try_take_memory(payload_bytes);
                if job.buffer.is_some() {
                    break;
                }
                self.room.notified().await;
            }
        }
        job
    }

    fn try_take_memory(&self, payload_bytes: usize) -> Option<Buffer> {
        let mut pool = self.pool.borrow_mut();
        let all = pool.take(payload_bytes);
        if all.is_none() && self.in_flight.get() == 0 {
            return pool.take(OWN_BYTES);
        }
        all
    }

    fn try_take_job(&self) -> Option<Box<Job>> {
        if let Some(job) = self.free.borrow_mut().pop() {
            return Some(job);
        }
        if self.jobs.get() >= self.shelf.options.depth {
            return None;
        }
        self.jobs.set(self.jobs.get() + 1);
        Some(Box::new(Job::new()))
    }

    /// Gives a job back that was not put to work.
    pub(super) fn release(&self, mut job: Box<Job>) {
        if let Some(buffer) = job.end() {
            self.pool.borrow_mut().give(buffer);
        }
        self.free.borrow_mut().push(job);
        self.room.notify_one();
    }

    /// Counts a job as one that is being worked on.
    pub(super) fn begin(&self, job: &mut Job) {
        self.in_flight.set(self.in_flight.get() + 1);
        self.owed.set(self.owed.get() + 1);
        job.worked = true;
        if job.command.kind.changes() {
            self.stand.written.set(true);
        }
    }

    /// Ends a job that was begun and whose reply was sent, or will not be.
    pub(super) fn end(&self, job: Box<Job>) {
        self.settle(job.worked);
        self.release(job);
        self.check_rest();
    }

    /// Puts a job to work.
    pub(super) fn dispatch(self: &Rc<Self>, mut job: Box<Job>) {
        self.begin(&mut job);
        let idle = self.idle.borrow_mut().pop();
        let desk = idle.unwrap_or_else(|| self.hire());
        desk.job.set(Some(job));
        desk.bell.notify_one();
    }

    fn hire(self: &Rc<Self>) -> Rc<Desk> {
        let desk = Rc::new(Desk::default());
        self.desks.borrow_mut().push(desk.clone());
        gaur_reactor::spawn(self.clone().work(desk.clone()));
        desk
    }

    /// Sends the reply of a job that needs no work.
    pub(super) fn answer(&self, job: Box<Job>) {
        self.in_flight.set(self.in_flight.get() + 1);
        self.post(job);
    }

    /// Sends the reply of a job that was begun.
    pub(super) fn post(&self, job: Box<Job>) {
        let mut outbox = self.outbox.borrow_mut();
        outbox.push_back(job);
        if outbox.len() == 1 {
            self.outgoing.notify_one();
        }
    }

    async fn work(self: Rc<Self>, desk: Rc<Desk>) {
        loop {
            let Some(mut job) = desk.job.take() else {
                if self.closing.get() {
                    return;
                }
                desk.bell.notified().await;
                continue;
            };
            let lost = Lost(&self);
            let outcome = execute::run(&self, &mut job).await;
            core::mem::forget(lost);
            if let Err(errno) = outcome {
                job.fail(errno, errno.text());
            }
            self.idle.borrow_mut().push(desk.clone());
            self.post(job);
        }
    }

    async fn send(self: Rc<Self>) {
        let mut batch: Vec<Box<Job>> = Vec::new();
        loop {
            self.collect(&mut batch);
            if batch.is_empty() {
                if self.closing.get() {
                    return;
                }
                self.outgoing.notified().await;
                continue;
            }
            if !self.broken.get() && self.send_batch(&batch).await.is_err() {
                self.give_up();
            }
            for job in batch.drain(..) {
                self.settle(job.worked);
                self.release(job);
            }
            self.check_rest();
        }
    }

    #[allow(
        clippy::vec_box,
        reason = "jobs change hands several times per request"
    )]
    fn collect(&self, batch: &mut Vec<Box<Job>>) {
        let mut outbox = self.outbox.borrow_mut();
        let mut slices = 0;
        while let Some(job) = outbox.front() {
            slices += job.part_count();
            if slices > SLICES_MAX {
                break;
            }
            batch.extend(outbox.pop_front());
        }
    }

    async fn send_batch(&self, batch: &[Box<Job>]) -> Result<(), Errno> {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let mut used = 0;
        for job in batch {
            job.gather(&mut slices, &mut used);
        }
        self.client.stream.send_vectored(&slices[..used]).await
    }

    fn give_up(&self) {
        self.broken.set(true);
        self.client.hang_up();
    }

    fn settle(&self, worked: bool) {
        self.in_flight.set(self.in_flight.get() - 1);
        self.owed.set(self.owed.get() - u32::from(worked));
    }

    fn check_rest(&self) {
        // A client that never stops asking is refused again and again; that keeps nobody.
        if self.draining.get() && self.owed.get() == 0 {
            self.client.hang_up();
        }
        if self.in_flight.get() == 0 {
            self.rest.notify_one();
        }
    }

    /// Waits until every request is answered (or its reply dropped), then ends workers and sender.
    pub(super) async fn close(&self) {
        while self.in_flight.get() > 0 {
            self.rest.notified().await;
        }
        self.shut();
    }

    /// Ends workers and sender as soon as they have nothing to do.
    fn shut(&self) {
        self.closing.set(true);
        self.outgoing.notify_one();
        // Their desks hold them and they hold the hub: both end here.
        for desk in self.desks.take() {
            desk.bell.notify_one();
        }
        self.idle.take();
        self.free.take();
    }
}

/// Held by the reader, so that the others end with it even when it panics.
pub(super) struct Open<'a, D: Device + 'static>(pub(super) &'a Rc<Hub<D>>);

impl<D: Device + 'static> Drop for Open<'_, D> {
    fn drop(&mut self) {
        self.0.shut();
    }
}

/// Dropped only when a worker panics in the middle of a request: the device broke its word. The
/// request is never answered, so the connection cannot go on, but it must come to rest.
struct Lost<'a, D: Device + 'static>(&'a Rc<Hub<D>>);

impl<D: Device + 'static> Drop for Lost<'_, D> {
    fn drop(&mut self) {
        self.0.settle(true);
        self.0.give_up();
        self.0.check_rest();
    }
}
