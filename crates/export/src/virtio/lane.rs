//! A ring that runs: one task pops requests, workers serve them, one task publishes what is done.
//!
//! A slot goes round: idle, filled by the popping task, with a worker, idle. Completions are pushed
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
use super::execute::{self, Terms};
use super::inflight::InflightLog;
use super::mailbox::Mailbox;
use super::memory::GuestMemory;
use super::order::{Bell, Order, Setup, raise};
use super::queue;
use super::ring::Ring;
use super::station::Station;
use super::violation::Violation;
use super::wire::feature;

/// A request on its way.
struct Slot {
    head: u16,
    chain: Chain,
}

/// Where a worker gets its work.
#[derive(Default)]
struct Desk {
    slot: Cell<Option<Box<Slot>>>,
    bell: Notify,
}

/// A ring that runs.
pub(super) struct Lane<D> {
    station: Rc<Station<D>>,
    index: u16,
    memory: Arc<dyn GuestMemory>,
    ring: RefCell<Ring>,
    log: RefCell<Option<InflightLog>>,
    used_address: Option<u64>,
    /// By head, whether the request is in flight.
    busy: RefCell<Vec<bool>>,
    kick: Descriptor,
    bell: RefCell<Bell>,
    error: Option<std::os::fd::OwnedFd>,
    features: u64,
    write_through: Arc<AtomicBool>,
    /// What the last server left.
    inherited: RefCell<Vec<u16>>,
    #[allow(
        clippy::vec_box,
        reason = "slots change hands several times per request"
    )]
    free: RefCell<Vec<Box<Slot>>>,
    idle: RefCell<Vec<Rc<Desk>>>,
    desks: RefCell<Vec<Rc<Desk>>>,
    in_flight: Cell<u32>,
    /// Rung when something was pushed, or all is over.
    done: Notify,
    rest: Notify,
    closing: Cell<bool>,
    broken: Cell<bool>,
}

impl<D: Device + 'static> Lane<D> {
    /// The ring of `setup`, number `index` of its device.
    pub(super) fn new(station: &Rc<Station<D>>, index: u16, setup: Setup) -> Rc<Lane<D>> {
        let Setup {
            places,
            memory,
            next,
            features,
            write_through,
            mut log,
            used_address,
            kick,
            bell,
            error,
        } = setup;
        let event_idx = features & feature::EVENT_IDX != 0;
        let probe = Ring::new(places, memory.clone(), event_idx, next, 0);
        let (next, inherited) = match &mut log {
            // What is used and what is in flight was popped, whatever the driver believes.
            Some(log) => (None, log.recover(probe.used())),
            None => (next, Vec::new()),
        };
        let in_flight = inherited.len() as u16;
        let ring = Ring::new(places, memory.clone(), event_idx, next, in_flight);
        Rc::new(Lane {
            station: station.clone(),
            index,
            memory,
            busy: RefCell::new(vec![false; usize::from(ring.size())]),
            ring: RefCell::new(ring),
            log: RefCell::new(log),
            used_address,
            kick,
            bell: RefCell::new(bell),
            error,
            features,
            write_through,
            inherited: RefCell::new(inherited),
            free: RefCell::default(),
            idle: RefCell::default(),
            desks: RefCell::default(),
            in_flight: Cell::new(0),
            done: Notify::new(),
            rest: Notify::new(),
            closing: Cell::new(false),
            broken: Cell::new(false),
        })
    }

    /// The next entry of the available ring.
    pub(super) fn next(&self) -> u16 {
        self.ring.borrow().next()
    }

    /// Puts to work whatever is available. A ring that makes no sense is given up.
    fn pump(self: &Rc<Self>) {
        if self.broken.get() {
            return;
        }
        let outcome = self.try_pump();
        // What was read of such memory meant nothing.
        if self.memory.is_lost() {
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
            self.ring.borrow().silence();
            loop {
                let popped = self.ring.borrow_mut().pop()?;
                let Some(head) = popped else { break };
                if let Some(log) = &mut *self.log.borrow_mut() {
                    log.popped(head);
                }
                self.begin(head)?;
            }
            if self.ring.borrow().listen() {
                return Ok(());
            }
        }
    }

    /// Gives a request to a worker.
    fn begin(self: &Rc<Self>, head: u16) -> Result<(), Violation> {
        let mut slot = self.free.borrow_mut().pop().unwrap_or_else(|| {
            Box::new(Slot {
                head,
                chain: Chain::new(),
            })
        });
        slot.head = head;
        if std::mem::replace(&mut self.busy.borrow_mut()[usize::from(head)], true) {
            return Err(Violation::Twice { head });
        }
        let indirect = self.features & feature::INDIRECT_DESC != 0;
        let memory = &*self.memory;
        slot.chain
            .read(&self.ring.borrow(), memory, indirect, head)?;
        self.in_flight.set(self.in_flight.get() + 1);
        let idle = self.idle.borrow_mut().pop();
        let desk = idle.unwrap_or_else(|| self.hire());
        desk.slot.set(Some(slot));
        desk.bell.notify_one();
        Ok(())
    }

    fn hire(self: &Rc<Self>) -> Rc<Desk> {
        let desk = Rc::new(Desk::default());
        self.desks.borrow_mut().push(desk.clone());
        gaur_reactor::spawn(self.clone().work(desk.clone()));
        desk
    }

    async fn work(self: Rc<Self>, desk: Rc<Desk>) {
        loop {
            let Some(slot) = desk.slot.take() else {
                if self.closing.get() {
                    return;
                }
                desk.bell.notified().await;
                continue;
            };
            let lost = Lost(&self);
            let terms = Terms {
                read_only: self.station.read_only,
                write_through: self.features & feature::FLUSH == 0
                    || self.write_through.load(Ordering::Relaxed),
            };
            let written = execute::execute(&self.station, terms, &slot.chain).await;
            std::mem::forget(lost);
            self.complete(slot, written);
            self.idle.borrow_mut().push(desk.clone());
        }
    }

    fn complete(&self, slot: Box<Slot>, written: u32) {
        let head = slot.head;
        for (address, len) in &slot.chain.ranges {
            self.memory.written(*address, *len as usize);
        }
        self.free.borrow_mut().push(slot);
        self.ring.borrow_mut().push(head, written);
        if let Some(log) = &mut *self.log.borrow_mut() {
            log.pushed(head);
        }
        self.busy.borrow_mut()[usize::from(head)] = false;
        self.in_flight.set(self.in_flight.get() - 1);
        self.done.notify_one();
    }

    /// Publishes in batches until the lane is closed.
    async fn publish(self: Rc<Self>) {
        loop {
            self.publish_now();
            if self.in_flight.get() == 0 {
                self.rest.notify_one();
                if self.closing.get() {
                    return;
                }
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
            self.bell.borrow().ring();
        }
    }

    fn give_up(&self, reason: &str) {
        self.broken.set(true);
        let index = self.index;
        self.station
            .say(&format!("ring {index} is given up: {reason}"));
        if let Some(error) = &self.error {
            raise(error);
        }
    }

    /// Waits until nothing is in flight and all is published, and ends the tasks.
    async fn close(self: &Rc<Self>) {
        while self.in_flight.get() > 0 {
            self.rest.notified().await;
        }
        self.closing.set(true);
        self.publish_now();
        self.done.notify_one();
        // Their desks hold them and they hold the lane: both end here.
        for desk in self.desks.take() {
            desk.bell.notify_one();
        }
        self.idle.take();
    }
}

/// Serves until there is an order to stop, and returns to whom that is to be answered.
pub(super) async fn serve<D: Device + 'static>(
    lane: &Rc<Lane<D>>,
    orders: &Mailbox<Order>,
) -> Mailbox<Option<u16>> {
    gaur_reactor::spawn(lane.clone().publish());
    lane.pump();
    loop {
        let event = if lane.broken.get() {
            Either::Left(orders.take().await)
        } else {
            race(orders.take(), lane.kick.count()).await
        };
        match event {
            Either::Left(Order::Stop(answer)) => {
                lane.close().await;
                return answer;
            }
            Either::Left(Order::Bell(bell)) => {
                // What was published before is not announced by the new one otherwise.
                bell.ring();
                lane.bell.replace(bell);
            }
            #[cfg(feature = "vduse")]
            Either::Left(Order::Position(answer)) => answer.put(Some(lane.next())),
            Either::Left(order) => queue::attend(&lane.station, order).await,
            Either::Right(Ok(_)) => lane.pump(),
            Either::Right(Err(errno)) => lane.give_up(&format!("cannot wait for kicks: {errno}")),
        }
    }
}

/// Dropped only when a worker panics in the middle of a request: the device broke its word. The
/// request is never answered, so the ring cannot go on, but it must come to rest.
struct Lost<'a, D: Device + 'static>(&'a Rc<Lane<D>>);

impl<D: Device + 'static> Drop for Lost<'_, D> {
    fn drop(&mut self) {
        let lane = self.0;
        lane.in_flight.set(lane.in_flight.get() - 1);
        lane.give_up("a request was lost");
        lane.done.notify_one();
    }
}
