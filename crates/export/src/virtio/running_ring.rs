//! A running ring: one task pops requests, workers serve them, one task publishes what is done.
//!
//! A job goes round: free, filled by the popping task, with a worker, free. Completions are pushed
//! at once and published together, after every worker that can go on has done so. All tasks are of
//! one thread and every step is sync, so there is no lock.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_block::Device;
use gaur_reactor::local::Notify;
use gaur_reactor::{Descriptor, Either, race};

use super::chain::Chain;
use super::execute::{self, RequestFlags};
use super::inflight::InflightLog;
use super::memory::GuestMemory;
use super::ring::Ring;
use super::ring_command::{CallNotifier, RingCommand, RingSetup, raise};
use super::ring_task;
use super::thread_context::ThreadContext;
use super::violation::Violation;
use super::wire::feature;
use crate::serve::{Channel, Serve, Workers};

/// A request on its way.
pub(super) struct Job {
    head: u16,
    chain: Chain,
    /// Bytes that were written to the guest's memory, status and all.
    written: u32,
}

/// A ring that runs.
pub(super) struct RunningRing<D> {
    context: Rc<ThreadContext<D>>,
    index: u16,
    memory: Arc<dyn GuestMemory>,
    ring: RefCell<Ring>,
    log: RefCell<Option<InflightLog>>,
    used_address: Option<u64>,
    /// By head, whether the request is in flight.
    busy: RefCell<Vec<bool>>,
    kick: Descriptor,
    call: RefCell<CallNotifier>,
    error: Option<std::os::fd::OwnedFd>,
    features: u64,
    write_through: Arc<AtomicBool>,
    /// Heads of requests that the last server left in flight.
    inherited: RefCell<Vec<u16>>,
    #[allow(
        clippy::vec_box,
        reason = "jobs change hands several times per request"
    )]
    free: RefCell<Vec<Box<Job>>>,
    workers: Workers<Box<Job>>,
    /// Something was pushed, or the ring is closed.
    done: Notify,
    broken: Cell<bool>,
}

impl<D: Device + 'static> RunningRing<D> {
    /// The ring of `setup`, number `index` of its device.
    pub(super) fn new(
        context: &Rc<ThreadContext<D>>,
        index: u16,
        setup: RingSetup,
    ) -> Rc<RunningRing<D>> {
        let RingSetup {
            addresses,
            memory,
            next,
            features,
            write_through,
            mut log,
            used_address,
            kick,
            call,
            error,
        } = setup;
        let event_idx = features & feature::EVENT_IDX != 0;
        let probe = Ring::new(addresses, memory.clone(), event_idx, next, 0);
        let (next, inherited) = match &mut log {
            // What is used and what is in flight was popped, whatever the driver believes.
            Some(log) => (None, log.recover(probe.used())),
            None => (next, Vec::new()),
        };
        let in_flight = inherited.len() as u16;
        let ring = Ring::new(addresses, memory.clone(), event_idx, next, in_flight);
        Rc::new(RunningRing {
            context: context.clone(),
            index,
            memory,
            busy: RefCell::new(vec![false; usize::from(ring.size())]),
            ring: RefCell::new(ring),
            log: RefCell::new(log),
            used_address,
            kick,
            call: RefCell::new(call),
            error,
            features,
            write_through,
            inherited: RefCell::new(inherited),
            free: RefCell::default(),
            workers: Workers::default(),
            done: Notify::new(),
            broken: Cell::new(false),
        })
    }

    /// The next entry of the available ring.
    pub(super) fn next(&self) -> u16 {
        self.ring.borrow().next()
    }

    /// Puts to work all that is available. A ring that makes no sense is given up.
    fn pump(self: &Rc<Self>) {
        if self.broken.get() {
            return;
        }
        let outcome = self.try_pump();
        // What was read of such memory meant nothing.
        if self.memory.is_truncated() {
            self.give_up("the file of its memory was made shorter");
        } else if let Err(violation) = outcome {
            self.give_up(&violation.to_string());
        }
    }

    fn try_pump(self: &Rc<Self>) -> Result<(), Violation> {
        for head in self.inherited.take() {
            self.begin(head)?;
        }
        loop {
            self.ring.borrow().disable_notification();
            loop {
                let popped = self.ring.borrow_mut().pop()?;
                let Some(head) = popped else { break };
                if let Some(log) = &mut *self.log.borrow_mut() {
                    log.popped(head);
                }
                self.begin(head)?;
            }
            if self.ring.borrow().enable_notification() {
                return Ok(());
            }
        }
    }

    /// Gives a request to a worker.
    fn begin(self: &Rc<Self>, head: u16) -> Result<(), Violation> {
        let mut job = self.free.borrow_mut().pop().unwrap_or_else(|| {
            Box::new(Job {
                head,
                chain: Chain::new(),
                written: 0,
            })
        });
        job.head = head;
        if std::mem::replace(&mut self.busy.borrow_mut()[usize::from(head)], true) {
            return Err(Violation::Twice { head });
        }
        let indirect = self.features & feature::INDIRECT_DESC != 0;
        let memory = &*self.memory;
        job.chain
            .read(&self.ring.borrow(), memory, indirect, head)?;
        self.workers.in_flight.begin();
        Workers::dispatch(self, job);
        Ok(())
    }

    /// Publishes in batches until the ring is closed.
    async fn publish(self: Rc<Self>) {
        loop {
            self.publish_now();
            if self.workers.closing() && self.workers.in_flight.count() == 0 {
                return;
            }
            self.done.notified().await;
        }
    }

    fn publish_now(&self) {
        let mut ring = self.ring.borrow_mut();
        let count = ring.pushed();
        if count == 0 {
            return;
        }
        let mut log = self.log.borrow_mut();
        if let Some(log) = &mut *log {
            log.before_publish();
        }
        ring.publish();
        if let Some(address) = self.used_address {
            self.memory.written(address, ring.used_bytes());
        }
        if let Some(log) = &mut *log {
            log.published(ring.used());
        }
        if ring.wants_interrupt(count) {
            self.call.borrow().notify();
        }
    }

    fn give_up(&self, reason: &str) {
        self.broken.set(true);
        let index = self.index;
        self.context
            .say(&format!("ring {index} is given up: {reason}"));
        if let Some(error) = &self.error {
            raise(error);
        }
    }

    /// Waits until nothing is in flight and all is published, and ends the tasks.
    async fn close(&self) {
        self.workers.in_flight.drained().await;
        self.workers.close();
        self.publish_now();
        self.done.notify_one();
    }
}

impl<D: Device + 'static> Serve for RunningRing<D> {
    type Job = Box<Job>;

    fn workers(&self) -> &Workers<Box<Job>> {
        &self.workers
    }

    async fn serve(self: &Rc<Self>, job: &mut Box<Job>) {
        let flags = RequestFlags {
            read_only: self.context.read_only,
            write_through: self.features & feature::FLUSH == 0
                || self.write_through.load(Ordering::Relaxed),
        };
        job.written = execute::execute(&self.context, flags, &job.chain).await;
    }

    fn complete(&self, job: Box<Job>) {
        let (head, written) = (job.head, job.written);
        for (address, len) in &job.chain.ranges {
            self.memory.written(*address, *len as usize);
        }
        self.free.borrow_mut().push(job);
        self.ring.borrow_mut().push(head, written);
        if let Some(log) = &mut *self.log.borrow_mut() {
            log.pushed(head);
        }
        self.busy.borrow_mut()[usize::from(head)] = false;
        self.workers.in_flight.end();
        self.done.notify_one();
    }

    fn panicked(&self) {
        self.workers.in_flight.end();
        self.give_up("a request was lost");
        self.done.notify_one();
    }
}

/// Serves until the command to stop, and returns where that is to be answered.
pub(super) async fn serve<D: Device + 'static>(
    ring: &Rc<RunningRing<D>>,
    commands: &Channel<RingCommand>,
) -> Channel<Option<u16>> {
    gaur_reactor::spawn(ring.clone().publish());
    ring.pump();
    loop {
        let event = if ring.broken.get() {
            Either::Left(commands.take().await)
        } else {
            race(commands.take(), ring.kick.count()).await
        };
        match event {
            Either::Left(RingCommand::Stop(answer)) => {
                ring.close().await;
                return answer;
            }
            Either::Left(RingCommand::Call(call)) => {
                // What was published before is not announced by the new one otherwise.
                call.notify();
                ring.call.replace(call);
            }
            #[cfg(feature = "vduse")]
            Either::Left(RingCommand::Position(answer)) => answer.put(Some(ring.next())),
            Either::Left(command) => ring_task::attend(&ring.context, command).await,
            Either::Right(Ok(_)) => ring.pump(),
            Either::Right(Err(errno)) => ring.give_up(&format!("cannot wait for kicks: {errno}")),
        }
    }
}
