//! What the tasks of one connection share: the reader ([`super::client_task`]), workers and a sender.
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
use super::exports::ExportDevice;
use super::job::{Job, PARTS_MAX};
use super::pool::{OWN_BYTES, Pool};
use super::thread_exports::ThreadExports;
use crate::nbd::proto::{Command, Session};
use crate::serve::{Disk, Serve, Workers};

/// Most stretches of memory in one send.
const SLICES_MAX: usize = 128;
const _: () = assert!(PARTS_MAX <= SLICES_MAX);

pub(super) struct Connection<D> {
    thread: Rc<ThreadExports<D>>,
    client: std::sync::Arc<Client>,
    pub(super) device: Rc<ExportDevice<D>>,
    pub(super) session: Session,
    pool: RefCell<Pool>,
    #[allow(
        clippy::vec_box,
        reason = "jobs change hands several times per request"
    )]
    free: RefCell<Vec<Box<Job>>>,
    jobs: Cell<u32>,
    /// A job or payload memory came back.
    room: Notify,
    /// In flight are jobs handed to workers or waiting to be sent.
    workers: Workers<Box<Job>>,
    outbox: RefCell<VecDeque<Box<Job>>>,
    outgoing: Notify,
    /// Those of them that were put to work; the others are refusals.
    owed: Cell<u32>,
    draining: Cell<bool>,
    /// Sending failed, or a worker is lost.
    broken: Cell<bool>,
}

impl<D: Device + 'static> Connection<D> {
    /// The connection of a connection that chose an export; its sender runs from now on.
    pub(super) fn start(
        thread: &Rc<ThreadExports<D>>,
        client: &std::sync::Arc<Client>,
        device: Rc<ExportDevice<D>>,
        session: Session,
    ) -> Rc<Connection<D>> {
        let connection = Rc::new(Connection {
            thread: thread.clone(),
            client: client.clone(),
            device,
            session,
            pool: RefCell::new(Pool::new(
                thread.options.connection_memory_bytes,
                &thread.budget,
            )),
            free: RefCell::default(),
            jobs: Cell::new(0),
            room: Notify::default(),
            workers: Workers::default(),
            outbox: RefCell::default(),
            outgoing: Notify::default(),
            owed: Cell::new(0),
            draining: Cell::new(false),
            broken: Cell::new(false),
        });
        gaur_reactor::spawn(connection.clone().send());
        let trimmed = Rc::downgrade(&connection);
        gaur_reactor::keep_trimmed(move || {
            let connection = trimmed.upgrade();
            connection
                .map(|connection| connection.pool.borrow_mut().trim())
                .is_some()
        });
        connection
    }

    pub(super) fn disk(&self) -> &Disk<D> {
        &self.device.device
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
        if all.is_none() && self.workers.in_flight.count() == 0 {
            return pool.take(OWN_BYTES);
        }
        all
    }

    fn try_take_job(&self) -> Option<Box<Job>> {
        if let Some(job) = self.free.borrow_mut().pop() {
            return Some(job);
        }
        if self.jobs.get() >= self.thread.options.depth {
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
        self.workers.in_flight.begin();
        self.owed.set(self.owed.get() + 1);
        job.worked = true;
        if job.command.kind.changes() {
            self.device.written.set(true);
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
        Workers::dispatch(self, job);
    }

    /// Sends the reply of a job that needs no work.
    pub(super) fn answer(&self, job: Box<Job>) {
        self.workers.in_flight.begin();
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

    async fn send(self: Rc<Self>) {
        let mut batch: Vec<Box<Job>> = Vec::new();
        loop {
            self.collect(&mut batch);
            if batch.is_empty() {
                if self.workers.closing() {
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
        self.workers.in_flight.end();
        self.owed.set(self.owed.get() - u32::from(worked));
    }

    fn check_rest(&self) {
        // A client that never stops asking is refused again and again; that does not delay the end.
        if self.draining.get() && self.owed.get() == 0 {
            self.client.hang_up();
        }
    }

    /// Waits until every request is answered (or its reply dropped), then ends workers and sender.
    pub(super) async fn close(&self) {
        self.workers.in_flight.drained().await;
        self.shut();
    }

    /// Ends workers and sender as soon as they have nothing to do.
    fn shut(&self) {
        self.workers.close();
        self.outgoing.notify_one();
        self.free.take();
    }
}

/// Held by the reader, so that the others end with it even when it panics.
pub(super) struct Open<'a, D: Device + 'static>(pub(super) &'a Rc<Connection<D>>);

impl<D: Device + 'static> Drop for Open<'_, D> {
    fn drop(&mut self) {
        self.0.shut();
    }
}

impl<D: Device + 'static> Serve for Connection<D> {
    type Job = Box<Job>;

    fn workers(&self) -> &Workers<Box<Job>> {
        &self.workers
    }

    async fn serve(self: &Rc<Self>, job: &mut Box<Job>) {
        if let Err(errno) = execute::run(self, job).await {
            job.fail(errno, errno.text());
        }
    }

    fn complete(&self, job: Box<Job>) {
        self.post(job);
    }

    fn panicked(&self) {
        self.settle(true);
        self.give_up();
        self.check_rest();
    }
}
