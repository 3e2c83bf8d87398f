//! A thread's reactor: it runs tasks until none can go on, tells the kernel what they asked for in
//! one call, and sleeps in that call until something happens.

use std::cell::{Cell, OnceCell, RefCell, RefMut};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use gaur_block::{Errno, Registered};
use rustix::fs::OFlags;

use crate::context;
use crate::file::SharedFiles;
use crate::inbox::{Inbox, Message};
use crate::iovecs::IovecPool;
use crate::memory::{Buffer, Pool};
use crate::race::yield_now;
use crate::readiness::Readiness;
use crate::ring::{self, Ring};
use crate::syscall;
use crate::task::{self, JoinHandle, Tasks};
use crate::timer::Timers;
use crate::trim;

/// How a reactor waits for files and sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Driver {
    /// A ring where io_uring works, otherwise the fallback.
    #[default]
    Auto,
    /// A ring, or an error.
    Ring,
    /// `poll(2)` for sockets; files block the thread.
    Fallback,
}

/// How a reactor is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// How it waits.
    pub driver: Driver,
    /// Entries of the submission queue: what one turn hands to the kernel at once.
    pub entries: u32,
    /// The most memory that the buffer pool keeps, and registers with the ring, in bytes.
    pub pool_bytes: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            driver: Driver::Auto,
            entries: 256,
            pool_bytes: 64 << 20,
        }
    }
}

/// Turns between two looks at the kernel while tasks keep each other busy.
const TURNS_BETWEEN_ENTERS: u32 = 16;

/// Most looks at the kernel in a [`Reactor::turn`]: the loop that drives it has other descriptors.
const ENTERS_PER_TURN: u32 = 8;

/// Transfers done inline between two looks at the kernel. They never wait, so a task that does
/// nothing else would keep the thread to itself.
const INLINE_PER_VISIT: u32 = 128;

/// A transfer of so many bytes counts twice, of twice as many three times.
const INLINE_BYTES: usize = 32 << 10;

/// With so many transfers between two looks at the kernel the ring is the cheaper way to the page
/// cache: one call takes them all there.
const CROWD: u32 = 4;

/// What a reactor waits in. There is one of each reactor, so its size does not matter.
#[allow(
    clippy::large_enum_variant,
    reason = "an indirection would cost on every operation"
)]
pub(crate) enum Engine {
    Ring(Ring),
    Fallback(Readiness),
}

/// What the operations on a thread share.
pub(crate) struct Core {
    tasks: Tasks,
    timers: Timers,
    inbox: Arc<Inbox>,
    engine: Engine,
    /// Declared after the ring: the ring goes before the memory registered with it.
    pool: Arc<Pool>,
    running: Cell<bool>,
    /// Transfers that may still be done inline before everybody else has a turn.
    inline_left: Cell<u32>,
    /// Transfers of files since the last look at the kernel.
    transfers: Cell<u32>,
    /// There were [`CROWD`] of them when there were some last.
    crowded: Cell<bool>,
    /// `/dev/zero`, for memory that only the kernel can fill.
    zeros: OnceCell<OwnedFd>,
    messages: RefCell<VecDeque<Message>>,
    /// Called when memory is to be given back; `false` when there is nothing left to give.
    trims: RefCell<Vec<Box<dyn Fn() -> bool>>>,
    iovecs: IovecPool,
    shared_files: RefCell<SharedFiles>,
}

impl Core {
    fn new(config: &Config) -> Result<Core, Errno> {
        let inbox = Inbox::new()?;
        trim::list(&inbox);
        let ring = match config.driver {
            Driver::Fallback => None,
            Driver::Ring => Some(Ring::new(config.entries)?),
            Driver::Auto => Ring::new(config.entries).ok(),
        };
        Ok(Core {
            tasks: Tasks::new(inbox.clone()),
            timers: Timers::default(),
            inbox,
            engine: ring.map_or_else(|| Engine::Fallback(Readiness::default()), Engine::Ring),
            pool: Pool::new(config.pool_bytes, ring::POOL_SLOTS),
            running: Cell::new(false),
            inline_left: Cell::new(INLINE_PER_VISIT),
            transfers: Cell::new(0),
            crowded: Cell::new(false),
            zeros: OnceCell::new(),
            messages: RefCell::default(),
            trims: RefCell::default(),
            iovecs: IovecPool::default(),
            shared_files: RefCell::default(),
        })
    }

    pub(crate) fn shared_files(&self) -> RefMut<'_, SharedFiles> {
        self.shared_files.borrow_mut()
    }

    pub(crate) fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    pub(crate) fn timers(&self) -> &Timers {
        &self.timers
    }

    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn ring(&self) -> Option<&Ring> {
        match &self.engine {
            Engine::Ring(ring) => Some(ring),
            Engine::Fallback(_) => None,
        }
    }

    pub(crate) fn buffer(&self, len_bytes: usize) -> Buffer {
        self.pool.buffer(len_bytes, |index, chunk| {
            if let Some(ring) = self.ring() {
                ring.register_chunk(index, chunk);
            }
        })
    }

    pub(crate) fn keep_trimmed(&self, trim: Box<dyn Fn() -> bool>) {
        let mut trims = self.trims.borrow_mut();
        // Before the list grows, those go that are over.
        if trims.len() == trims.capacity() {
            trims.retain(|trim| trim());
        }
        trims.push(trim);
    }

    /// Gives back what was not used since the last call.
    pub(crate) fn trim(&self) {
        self.trims.borrow_mut().retain(|trim| trim());
        self.iovecs.trim();
        let unregister = |index| self.ring().is_none_or(|ring| ring.unregister_chunk(index));
        self.pool.trim(unregister);
    }

    pub(crate) fn iovecs(&self) -> &IovecPool {
        &self.iovecs
    }

    /// Counts a transfer that is done inline, a long one for several, and steps aside when there were
    /// many.
    pub(crate) async fn take_turn(&self, len_bytes: usize) {
        match self.inline_left.get() {
            0 => yield_now().await,
            left => {
                let weight = 1 + u32::try_from(len_bytes / INLINE_BYTES).unwrap_or(left);
                self.inline_left.set(left.saturating_sub(weight));
            }
        }
    }

    /// Counts a transfer, and says whether it is one of many.
    pub(crate) fn joins_crowd(&self) -> bool {
        self.transfers.set(self.transfers.get().saturating_add(1));
        self.crowded.get()
    }

    /// `/dev/zero`, opened when it is first needed.
    pub(crate) fn zeros(&self) -> Result<BorrowedFd<'_>, Errno> {
        if self.zeros.get().is_none() {
            let _ = self.zeros.set(syscall::open(c"/dev/zero", OFlags::RDONLY)?);
        }
        self.zeros.get().map(AsFd::as_fd).ok_or(Errno::EIO)
    }

    /// Takes what other threads sent.
    fn read_inbox(&self) {
        let mut messages = self.messages.take();
        self.inbox.take(&mut messages);
        for message in messages.drain(..) {
            match message {
                Message::Wake(header) => self.tasks.push_ready(header),
                Message::Run(run) => run(),
            }
        }
        self.messages.replace(messages);
    }

    /// Enters the kernel: hands over what the tasks asked for, takes completions and wakes their tasks.
    /// With `sleep` it waits for the first of them, a message or a timer.
    fn enter_kernel(&self, sleep: bool) {
        let timeout = if sleep {
            self.timers.next_in()
        } else {
            Some(Duration::ZERO)
        };
        match &self.engine {
            Engine::Ring(ring) => {
                if !ring.signals() {
                    ring.arm_event(self.inbox.event().as_raw_fd());
                }
                if sleep {
                    ring.enter(1, timeout);
                } else if ring.needs_enter() {
                    ring.enter(0, None);
                }
                if ring.reap() {
                    self.inbox.event().clear();
                }
            }
            Engine::Fallback(readiness) => {
                readiness.wait(self.inbox.event().as_raw_fd(), timeout);
                self.inbox.event().clear();
            }
        }
        if sleep {
            self.inbox.wake_up();
        }
        self.timers.fire();
        self.read_inbox();
        self.inline_left.set(INLINE_PER_VISIT);
        // A look without transfers is one in between, for answers and new requests.
        match self.transfers.replace(0) {
            0 => {}
            transfers => self.crowded.set(transfers >= CROWD),
        }
    }

    /// Polls tasks until none is ready, but not for too long, and `root` before each round. Returns what
    /// `root` returns once it is done.
    fn run_tasks<T>(&self, mut root: impl FnMut() -> Poll<T>) -> Poll<T> {
        // The tasks would only find that it is not their turn.
        let turn_is_over = || self.inline_left.get() == 0;
        for _ in 0..TURNS_BETWEEN_ENTERS {
            if self.tasks.take_root_ready()
                && let Poll::Ready(output) = root()
            {
                return Poll::Ready(output);
            }
            self.tasks.run_ready(turn_is_over);
            if !self.tasks.has_ready() || turn_is_over() {
                break;
            }
        }
        Poll::Pending
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        if let Some(ring) = self.ring() {
            ring.signal(None);
        }
        let mut future = pin!(future);
        let waker = self.tasks.root_waker();
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(output) = self.run_tasks(|| future.as_mut().poll(&mut context)) {
                return output;
            }
            let sleep = !self.tasks.has_ready() && self.inbox.fall_asleep();
            self.enter_kernel(sleep);
        }
    }

    /// See [`Reactor::turn`].
    fn turn(&self) -> Option<Duration> {
        let event = self.inbox.event();
        // The ring's own descriptor will not do: with `DEFER_TASKRUN` it is not readable before the
        // thread enters the kernel to look.
        let may_sleep = self
            .ring()
            .is_none_or(|ring| ring.signal(Some(event.as_raw_fd())));
        self.inbox.wake_up();
        for _ in 0..ENTERS_PER_TURN {
            // There is no root: what wakes one was meant for a future that `block_on` has driven before.
            let _: Poll<()> = self.run_tasks(|| Poll::Pending);
            self.enter_kernel(false);
            // What comes after this raises the event again, what came before it is seen here.
            event.clear();
            let idle = !self.tasks.has_ready() && self.ring().is_none_or(Ring::is_idle);
            if may_sleep && idle && self.inbox.fall_asleep() {
                return self.timers.next_in();
            }
        }
        event.raise();
        Some(Duration::ZERO)
    }
}

/// The reactor of the thread that made it. It stays on that thread; its tasks and files do too.
pub struct Reactor {
    core: Rc<Core>,
    stays: PhantomData<*const ()>,
}

impl Reactor {
    /// Gives this thread a reactor.
    ///
    /// # Errors
    /// What the kernel says when it makes no ring or event.
    ///
    /// # Panics
    /// When the thread has one already.
    pub fn new(config: &Config) -> Result<Reactor, Errno> {
        assert!(!context::has_reactor(), "a thread has one reactor at most");
        let core = Rc::new(Core::new(config)?);
        context::set(Some(core.clone()));
        Ok(Reactor {
            core,
            stays: PhantomData,
        })
    }

    /// Drives `future`, and the tasks, until `future` is done.
    ///
    /// # Panics
    /// When called by something that the reactor is driving.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let _running = self.run();
        self.core.block_on(future)
    }

    /// Drives the tasks as far as they go without waiting, for a thread that has an event loop of its own.
    /// The loop watches the reactor's descriptor ([`AsFd`]) for reading, calls this when it is readable and
    /// after it has spawned a task or polled a future that uses the reactor, and once more when the time is
    /// over that this returns, which says how soon the next [`sleep`](crate::sleep) ends.
    ///
    /// Without a ring files block the thread here, and the descriptor tells of other threads' messages
    /// only, not of sockets.
    ///
    /// # Panics
    /// When called by something that the reactor is driving.
    pub fn turn(&self) -> Option<Duration> {
        let _running = self.run();
        self.core.turn()
    }

    fn run(&self) -> Running<'_> {
        assert!(
            !self.core.running.replace(true),
            "a reactor is driven by one loop"
        );
        Running { core: &self.core }
    }

    /// For other threads, to spawn tasks here.
    pub fn handle(&self) -> Handle {
        Handle {
            inbox: self.core.inbox.clone(),
        }
    }

    /// Whether it has a ring, rather than the fallback.
    pub fn has_ring(&self) -> bool {
        self.core.ring().is_some()
    }

    /// Tasks that have not ended.
    pub fn tasks_alive(&self) -> usize {
        self.core.tasks.alive()
    }

    /// Waits until every task has ended, and takes no more from other threads from then on.
    pub async fn drained(&self) {
        poll_fn(|context| {
            if !self.core.tasks.poll_drained(context.waker()) {
                return Poll::Pending;
            }
            if !self.core.inbox.close_if_empty() {
                // What arrived is read before this is polled again.
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
    }
}

impl AsFd for Reactor {
    /// Readable when [`Reactor::turn`] has something to do. Nothing but watching it makes sense.
    fn as_fd(&self) -> BorrowedFd<'_> {
        let event = self.core.inbox.event().as_raw_fd();
        // SAFETY: the event lives as long as the reactor.
        unsafe { BorrowedFd::borrow_raw(event) }
    }
}

/// Marks the reactor as driven, also while it unwinds.
struct Running<'a> {
    core: &'a Core,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.core.running.set(false);
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        // Tasks refer to the core, and their operations need it to end.
        self.core.inbox.close();
        self.core.tasks.clear();
        context::set(None);
    }
}

/// Starts a task on this thread's reactor.
///
/// # Panics
/// When the thread has none.
pub fn spawn<F: Future + 'static>(future: F) -> JoinHandle<F::Output> {
    let (handle, completer) = task::joint();
    context::current()
        .tasks
        .spawn(task::wrap(future, completer));
    handle
}

/// Memory for transfers on this thread: of the pool registered with its ring if it has one.
pub fn buffer(len_bytes: usize) -> Buffer {
    match context::find() {
        Some(core) => core.buffer(len_bytes),
        None => Buffer::from_system(len_bytes),
    }
}

impl Buffer {
    /// This memory by its number in the ring of the calling thread; `None` when that ring does not
    /// know it.
    pub fn registered(&self) -> Option<Registered> {
        let core = context::find()?;
        let ring = core.ring()?;
        let index = ring.buffer_of(self.as_ptr(), self.len())?;
        let (base, _) = ring.buffer_base(index);
        Some(Registered {
            index,
            offset: self.as_ptr() as u64 - base,
            len: self.len(),
        })
    }
}

/// A way into a reactor from any thread.
#[derive(Clone)]
pub struct Handle {
    inbox: Arc<Inbox>,
}

impl Handle {
    /// Calls `make` on the reactor's thread and drives the future it returns there.
    ///
    /// # Errors
    /// [`Errno::ESHUTDOWN`] when the reactor has ended.
    pub fn spawn<M, F>(&self, make: M) -> Result<JoinHandle<F::Output>, Errno>
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future + 'static,
        F::Output: Send + 'static,
    {
        let (handle, completer) = task::joint();
        let run = move || {
            let future = async move { make().await };
            context::current()
                .tasks
                .spawn(task::wrap(future, completer));
        };
        match self.inbox.send(Message::Run(Box::new(run))) {
            Ok(()) => Ok(handle),
            Err(_) => Err(Errno::ESHUTDOWN),
        }
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Handle")
    }
}
