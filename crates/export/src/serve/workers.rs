//! Workers of a connection or ring: tasks that serve one request each at a time.
//!
//! All of them are of one thread and every step between two awaits is sync, so there is no lock. There
//! are as many as requests were ever under way at once, which their owner limits.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;

use gaur_reactor::local::Notify;

/// Counts what is under way; a task can wait until nothing is.
#[derive(Default)]
pub(crate) struct InFlight {
    count: Cell<u32>,
    none: Notify,
}

impl InFlight {
    pub(crate) fn count(&self) -> u32 {
        self.count.get()
    }

    /// One more is under way.
    pub(crate) fn begin(&self) {
        self.count.set(self.count.get() + 1);
    }

    /// One is not under way any more.
    pub(crate) fn end(&self) {
        self.count.set(self.count.get() - 1);
        if self.count.get() == 0 {
            self.none.notify_one();
        }
    }

    /// Waits until nothing is under way.
    pub(crate) async fn drained(&self) {
        while self.count.get() > 0 {
            self.none.notified().await;
        }
    }
}

/// Calls its function when it is dropped, also by a panic.
pub(crate) struct OnDrop<F: FnMut()>(pub(crate) F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Calls its function when it is dropped by a panic: the device broke its word in the middle of a request.
pub(crate) struct PanicGuard<F: FnMut()>(pub(crate) F);

impl<F: FnMut()> Drop for PanicGuard<F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            (self.0)();
        }
    }
}

/// What workers serve requests for.
pub(crate) trait Serve: Sized + 'static {
    /// A request on its way.
    type Job: 'static;

    fn workers(&self) -> &Workers<Self::Job>;

    /// Serves a request.
    fn serve(self: &Rc<Self>, job: &mut Self::Job) -> impl Future<Output = ()>;

    /// A request was served.
    fn complete(&self, job: Self::Job);

    /// A worker panicked in the middle of a request, which is never answered. What it was of cannot go
    /// on, but must come to rest.
    fn panicked(&self);
}

/// Where a worker gets its requests.
struct WorkerSlot<J> {
    job: Cell<Option<J>>,
    filled: Notify,
}

/// The workers of one owner.
pub(crate) struct Workers<J> {
    slots: RefCell<Vec<Rc<WorkerSlot<J>>>>,
    idle: RefCell<Vec<Rc<WorkerSlot<J>>>>,
    closing: Cell<bool>,
    /// Counted by the owner, for whom a request may be under way before and after its worker has it.
    pub(crate) in_flight: InFlight,
}

impl<J> Default for Workers<J> {
    fn default() -> Workers<J> {
        Workers {
            slots: RefCell::default(),
            idle: RefCell::default(),
            closing: Cell::new(false),
            in_flight: InFlight::default(),
        }
    }
}

impl<J: 'static> Workers<J> {
    /// Gives a request to an idle worker, or to a new one.
    pub(crate) fn dispatch<O: Serve<Job = J>>(owner: &Rc<O>, job: J) {
        let workers = owner.workers();
        let idle = workers.idle.borrow_mut().pop();
        let slot = idle.unwrap_or_else(|| spawn_worker(owner));
        slot.job.set(Some(job));
        slot.filled.notify_one();
    }

    /// Whether workers end when they have nothing to do.
    pub(crate) fn closing(&self) -> bool {
        self.closing.get()
    }

    /// Ends every worker as soon as it has nothing to do.
    pub(crate) fn close(&self) {
        self.closing.set(true);
        // Slots hold their workers and these hold the owner: both end here.
        for slot in self.slots.take() {
            slot.filled.notify_one();
        }
        self.idle.take();
    }
}

fn spawn_worker<O: Serve>(owner: &Rc<O>) -> Rc<WorkerSlot<O::Job>> {
    let slot = Rc::new(WorkerSlot {
        job: Cell::new(None),
        filled: Notify::new(),
    });
    owner.workers().slots.borrow_mut().push(slot.clone());
    gaur_reactor::spawn(work(owner.clone(), slot.clone()));
    slot
}

async fn work<O: Serve>(owner: Rc<O>, slot: Rc<WorkerSlot<O::Job>>) {
    let workers = owner.workers();
    loop {
        let Some(mut job) = slot.job.take() else {
            if workers.closing.get() {
                return;
            }
            slot.filled.notified().await;
            continue;
        };
        let guard = PanicGuard(|| owner.panicked());
        owner.serve(&mut job).await;
        drop(guard);
        workers.idle.borrow_mut().push(slot.clone());
        owner.complete(job);
    }
}
