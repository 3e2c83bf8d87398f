//! Tasks of one thread: futures that a reactor drives, and the handles that wait for their results.
//!
//! A task is a slot of a slab. Its header is what wakers share; it may be used from any thread and
//! outlive the task. Spawning allocates (the future's box, the header, the result's place), driving
//! does not. A panic ends the task that panicked and resumes in the task that joins it.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::panic::{self, AssertUnwindSafe};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use slab::Slab;

use crate::context;
use crate::inbox::{Inbox, Message};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};

/// The slot number of the future that `block_on` drives, which is in no slot.
const ROOT: usize = usize::MAX;

/// Room in a new ready queue: the first task that steps aside should not be the one that allocates.
const READY_AT_START: usize = 64;

/// What the wakers of a task share.
pub(crate) struct TaskHeader {
    inbox: Arc<Inbox>,
    slot: usize,
    /// It is in a ready queue already, or on its way there.
    queued: AtomicBool,
}

impl TaskHeader {
    fn new(inbox: Arc<Inbox>, slot: usize) -> Arc<TaskHeader> {
        Arc::new(TaskHeader {
            inbox,
            slot,
            queued: AtomicBool::new(false),
        })
    }

    /// Whether it has to be queued now; it counts as queued from here on.
    ///
    /// Every wake-up writes, also one that finds the task queued: the reactor's own exchange before
    /// it polls then reads that write, and so the poll sees what the waking thread did before.
    fn mark_queued(&self) -> bool {
        !self.queued.swap(true, Ordering::AcqRel)
    }

    fn enqueue(self: Arc<Self>) {
        let elsewhere = context::with(|core| match core {
            Some(core) if Arc::ptr_eq(core.inbox(), &self.inbox) => {
                core.tasks().push_ready(self);
                None
            }
            _ => Some(self),
        });
        if let Some(header) = elsewhere {
            let inbox = header.inbox.clone();
            // A reactor that has ended has no use for it.
            let _ = inbox.send(Message::Wake(header));
        }
    }
}

impl Wake for TaskHeader {
    fn wake(self: Arc<Self>) {
        if self.mark_queued() {
            self.enqueue();
        }
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.mark_queued() {
            self.clone().enqueue();
        }
    }
}

type BoxedFuture = Pin<Box<dyn Future<Output = ()>>>;

struct Slot {
    header: Arc<TaskHeader>,
    /// Empty while the task is being polled.
    future: Option<BoxedFuture>,
}

/// The tasks of a reactor and the queue of those that can go on.
pub(crate) struct Tasks {
    inbox: Arc<Inbox>,
    slots: RefCell<Slab<Slot>>,
    ready: RefCell<VecDeque<Arc<TaskHeader>>>,
    root_ready: Cell<bool>,
    /// Who waits until no task is alive.
    drained: RefCell<Option<Waker>>,
}

impl Tasks {
    pub(crate) fn new(inbox: Arc<Inbox>) -> Tasks {
        Tasks {
            inbox,
            slots: RefCell::default(),
            ready: RefCell::new(VecDeque::with_capacity(READY_AT_START)),
            root_ready: Cell::new(false),
            drained: RefCell::new(None),
        }
    }

    /// How many tasks have not ended.
    pub(crate) fn alive(&self) -> usize {
        self.slots.borrow().len()
    }

    /// Whether no task is alive; otherwise wakes `waker` when that comes true.
    pub(crate) fn poll_drained(&self, waker: &Waker) -> bool {
        let drained = self.alive() == 0;
        if !drained {
            *self.drained.borrow_mut() = Some(waker.clone());
        }
        drained
    }

    fn ended(&self) {
        let waker = match self.alive() {
            0 => self.drained.borrow_mut().take(),
            _ => None,
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// A waker for the future that `block_on` drives; it counts as woken.
    pub(crate) fn root_waker(&self) -> Waker {
        self.root_ready.set(true);
        Waker::from(TaskHeader::new(self.inbox.clone(), ROOT))
    }

    /// Whether the root future was woken; asking resets it.
    pub(crate) fn take_root_ready(&self) -> bool {
        self.root_ready.replace(false)
    }

    /// Adds a task, which will be polled in the next turn.
    pub(crate) fn spawn(&self, future: BoxedFuture) {
        let waker = {
            let mut slots = self.slots.borrow_mut();
            let vacant = slots.vacant_entry();
            let header = TaskHeader::new(self.inbox.clone(), vacant.key());
            vacant.insert(Slot {
                header: header.clone(),
                future: Some(future),
            });
            header
        };
        waker.wake();
    }

    /// Queues a task that was woken.
    pub(crate) fn push_ready(&self, header: Arc<TaskHeader>) {
        self.ready.borrow_mut().push_back(header);
    }

    /// Whether something can go on.
    pub(crate) fn has_ready(&self) -> bool {
        self.root_ready.get() || !self.ready.borrow().is_empty()
    }

    /// Polls each task that is ready now once, until `pause` holds; those that become ready
    /// meanwhile have to wait for the next turn, after the ring had its say.
    pub(crate) fn run_ready(&self, pause: impl Fn() -> bool) {
        let count = self.ready.borrow().len();
        for _ in 0..count {
            if pause() {
                break;
            }
            let Some(header) = self.ready.borrow_mut().pop_front() else {
                break;
            };
            header.queued.swap(false, Ordering::AcqRel);
            if header.slot == ROOT {
                self.root_ready.set(true);
            } else {
                self.run(header);
            }
        }
    }

    fn run(&self, header: Arc<TaskHeader>) {
        let future = match self.slots.borrow_mut().get_mut(header.slot) {
            Some(slot) if Arc::ptr_eq(&slot.header, &header) => slot.future.take(),
            // A waker outlived its task.
            _ => None,
        };
        let Some(mut future) = future else { return };
        let index = header.slot;
        let waker = Waker::from(header);
        let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
        match polled {
            Poll::Pending => {
                if let Some(slot) = self.slots.borrow_mut().get_mut(index) {
                    slot.future = Some(future);
                }
            }
            Poll::Ready(()) => {
                drop(future);
                let ended = self.slots.borrow_mut().try_remove(index);
                drop(ended);
                self.ended();
            }
        }
    }

    /// Drops every task. Their operations end first, see `crate::op`.
    pub(crate) fn clear(&self) {
        self.ready.borrow_mut().clear();
        // What is dropped may spawn more.
        while self.alive() > 0 {
            let slots = self.slots.take();
            drop(slots);
        }
        self.ended();
    }
}

enum Outcome<T> {
    Running(Option<Waker>),
    Done(Result<T, Box<dyn Any + Send>>),
    /// The task was dropped before its end, with its reactor.
    Gone,
}

struct Joint<T> {
    outcome: Mutex<Outcome<T>>,
}

/// The result of a task, as a future. Dropping it lets the task run on by itself.
///
/// # Panics
/// Awaiting it panics when the task panicked, with the same message, and when the task was dropped
/// because its reactor ended.
pub struct JoinHandle<T> {
    joint: Arc<Joint<T>>,
}

impl<T> Future for JoinHandle<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut outcome = self.joint.outcome.lock();
        match &mut *outcome {
            Outcome::Running(waker) => {
                *waker = Some(context.waker().clone());
                return Poll::Pending;
            }
            Outcome::Done(_) | Outcome::Gone => {}
        }
        let taken = std::mem::replace(&mut *outcome, Outcome::Gone);
        drop(outcome);
        match taken {
            Outcome::Done(Ok(value)) => Poll::Ready(value),
            Outcome::Done(Err(panic)) => panic::resume_unwind(panic),
            _ => panic!("the reactor of the task that is waited for has ended"),
        }
    }
}

/// The task's side of a [`JoinHandle`]; says so when it is dropped without a result.
pub(crate) struct Completer<T> {
    joint: Arc<Joint<T>>,
}

impl<T> Completer<T> {
    fn finish(&self, with: Outcome<T>) {
        let waker = {
            let mut outcome = self.joint.outcome.lock();
            match &mut *outcome {
                Outcome::Running(waker) => {
                    let waker = waker.take();
                    *outcome = with;
                    waker
                }
                _ => None,
            }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        self.finish(Outcome::Gone);
    }
}

/// A handle and the side that fills it.
pub(crate) fn joint<T>() -> (JoinHandle<T>, Completer<T>) {
    let joint = Arc::new(Joint {
        outcome: Mutex::new(Outcome::Running(None)),
    });
    (
        JoinHandle {
            joint: joint.clone(),
        },
        Completer { joint },
    )
}

/// The future as a task: it keeps its panic to itself and leaves its result with `completer`.
pub(crate) fn wrap<F: Future + 'static>(future: F, completer: Completer<F::Output>) -> BoxedFuture {
    Box::pin(async move {
        let result = CatchUnwind {
            future: Box::pin(future),
        }
        .await;
        completer.finish(Outcome::Done(result));
    })
}

struct CatchUnwind<F> {
    future: Pin<Box<F>>,
}

impl<F: Future> Future for CatchUnwind<F> {
    type Output = Result<F::Output, Box<dyn Any + Send>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let future = self.future.as_mut();
        match panic::catch_unwind(AssertUnwindSafe(|| future.poll(context))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    }
}

#[cfg(all(test, loom))]
mod loom_model;
