//! The threads on which connections run.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::task::{Poll, Waker};

use gaur_block::Device;
use gaur_reactor::{Config, Driver, JoinHandle, Reactor, Threads, ThreadsConfig};

use super::client::Presence;
use super::connection;
use super::control::{self, Stations};
use super::exports::Exports;
use super::listen::Listener;
use super::options::{Options, Outcome, Place};
use super::pool::Budget;
use super::shelf::Shelf;
use super::stop::Stop;
use crate::error::ServeError;

/// Serves the exports of `options` as [`Exports::serve_uring`] does. Every thread has its own device
/// for an export, made by `devices` on that thread (so reactor files can be made there). Each thread
/// makes each device once before the first client is let in, to find out whether that works.
///
/// # Errors
/// Also when a device could not be made.
pub fn serve_uring<D, F>(
    listener: Listener,
    options: Options,
    stop: &Stop,
    devices: F,
) -> Result<Outcome, ServeError>
where
    D: Device + 'static,
    F: Fn(Place) -> Result<D, String> + Send + Sync + 'static,
{
    options.check()?;
    let exports = Exports::fixed(&options, devices)?;
    serve_on_threads(listener, options, stop, (&exports, true))
}

/// Serves the exports of `options` as [`Exports::serve_blocking`] does. `devices` is called on the
/// thread of a connection when its client first asks about an export.
///
/// # Errors
/// As [`serve_uring`].
pub fn serve_blocking<D, F>(
    listener: Listener,
    options: Options,
    stop: &Stop,
    devices: F,
) -> Result<Outcome, ServeError>
where
    D: Device + 'static,
    F: Fn(Place) -> Result<D, String> + Send + Sync + 'static,
{
    options.check()?;
    let exports = Exports::fixed(&options, devices)?;
    exports.serve_blocking(listener, options, stop)
}

impl<D: Device + 'static> Exports<D> {
    /// Serves these exports, and those that are added meanwhile, on [`Options::threads`] reactor
    /// threads; the exports of `options` are not looked at. Every connection stays on one thread.
    ///
    /// Blocks the calling thread, which must not run a reactor, until the server ends; see [`Outcome`].
    ///
    /// # Errors
    /// When a thread could not be made, or a device could not be flushed.
    pub fn serve_uring(
        &self,
        listener: Listener,
        options: Options,
        stop: &Stop,
    ) -> Result<Outcome, ServeError> {
        options.check()?;
        serve_on_threads(listener, options, stop, (self, false))
    }

    /// Serves these exports, and those that are added meanwhile, without io_uring: every connection
    /// has a thread of its own, on which requests run one after the other.
    ///
    /// Blocks and ends like [`Exports::serve_uring`].
    ///
    /// # Errors
    /// As [`Exports::serve_uring`].
    pub fn serve_blocking(
        &self,
        listener: Listener,
        options: Options,
        stop: &Stop,
    ) -> Result<Outcome, ServeError> {
        options.check()?;
        let options = Arc::new(options);
        let solos = Solos {
            options: options.clone(),
            budget: Budget::new(options.buffers_bytes),
            exports: self.clone(),
        };
        on_control_reactor(listener, &options, stop, &solos)
    }
}

fn serve_on_threads<D: Device + 'static>(
    listener: Listener,
    options: Options,
    stop: &Stop,
    (exports, try_first): (&Exports<D>, bool),
) -> Result<Outcome, ServeError> {
    let options = Arc::new(options);
    let crew = Crew::start(&options, exports, try_first)?;
    let outcome = on_control_reactor(listener, &options, stop, &crew);
    crew.dismiss();
    if outcome == Ok(Outcome::Forced) {
        // Joining would wait for the very requests that the second stop does not wait for.
        core::mem::forget(crew);
    } else {
        crew.threads.join();
    }
    outcome
}

fn on_control_reactor(
    listener: Listener,
    options: &Arc<Options>,
    stop: &Stop,
    stations: &impl Stations,
) -> Result<Outcome, ServeError> {
    let config = Config {
        driver: Driver::Fallback,
        ..Config::default()
    };
    let reactor = Reactor::new(&config)
        .map_err(|errno| ServeError::because("cannot start the control loop", errno))?;
    reactor.block_on(control::run(listener, options, stop, stations))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Everything under these locks is replaced in one step, so a panic elsewhere spoils nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Clients on their way to a thread.
#[derive(Default)]
struct Inbox {
    state: Mutex<InboxState>,
    /// Clients that are there or on their way.
    load: AtomicUsize,
}

#[derive(Default)]
struct InboxState {
    arrivals: VecDeque<Presence>,
    closed: bool,
    waker: Option<Waker>,
}

impl Inbox {
    fn put(&self, change: impl FnOnce(&mut InboxState)) {
        let waker = {
            let mut state = lock(&self.state);
            change(&mut state);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The next client; `None` when there will be no more.
    async fn next(&self) -> Option<Presence> {
        poll_fn(|context| {
            let mut state = lock(&self.state);
            match state.arrivals.pop_front() {
                Some(presence) => Poll::Ready(Some(presence)),
                None if state.closed => Poll::Ready(None),
                None => {
                    state.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// Reactor threads, each with its devices.
struct Crew<D> {
    threads: Threads,
    inboxes: Vec<Arc<Inbox>>,
    ends: RefCell<Vec<JoinHandle<()>>>,
    exports: Exports<D>,
}

impl<D: Device + 'static> Crew<D> {
    fn start(
        options: &Arc<Options>,
        exports: &Exports<D>,
        try_first: bool,
    ) -> Result<Crew<D>, ServeError> {
        let most = if options.shared == 0 {
            usize::MAX
        } else {
            options.shared as usize
        };
        let count = options.threads.clamp(1, most);
        let reactor = options.reactor;
        let config = ThreadsConfig {
            count,
            pin: false,
            name: "nbd".to_owned(),
            reactor,
        };
        let threads = Threads::start(&config)
            .map_err(|errno| ServeError::because("cannot start the serving threads", errno))?;
        let mut crew = Crew {
            threads,
            inboxes: Vec::new(),
            ends: RefCell::default(),
            exports: exports.clone(),
        };
        let budget = Budget::new(options.buffers_bytes);
        let (ready, readiness) = mpsc::channel();
        for (thread, handle) in crew.threads.handles().iter().enumerate() {
            let inbox = Arc::new(Inbox::default());
            crew.inboxes.push(inbox.clone());
            let (options, exports, ready) = (options.clone(), exports.clone(), ready.clone());
            let budget = budget.clone();
            let end = handle
                .spawn(move || {
                    let shelf = Rc::new(Shelf::new(options, exports, budget, thread));
                    let tried = if try_first { shelf.try_all() } else { Ok(()) };
                    // Nobody listens when the server gave up on another thread's account.
                    let _ = ready.send(tried);
                    drop(ready);
                    station(shelf, inbox)
                })
                .map_err(|errno| ServeError::because("cannot use a serving thread", errno))?;
            crew.ends.borrow_mut().push(end);
        }
        drop(ready);
        let mut outcome = Ok(());
        for _ in 0..count {
            // A thread that panics while it makes devices never says that it is ready.
            let made = readiness.recv().unwrap_or_else(|_| {
                Err(ServeError::new(
                    "a serving thread failed while it opened the exports",
                ))
            });
            outcome = outcome.and(made);
        }
        if let Err(error) = outcome {
            crew.dismiss();
            crew.threads.join();
            return Err(error);
        }
        Ok(crew)
    }

    fn dismiss(&self) {
        for inbox in &self.inboxes {
            inbox.put(|state| state.closed = true);
        }
    }
}

impl<D: Device + 'static> Stations for Crew<D> {
    fn serve(&self, presence: Presence) -> Result<(), ServeError> {
        let load = |inbox: &&Arc<Inbox>| inbox.load.load(Ordering::Relaxed);
        if let Some(inbox) = self.inboxes.iter().min_by_key(load) {
            inbox.load.fetch_add(1, Ordering::Relaxed);
            inbox.put(|state| state.arrivals.push_back(presence));
        }
        Ok(())
    }

    async fn close(&self) -> Result<(), ServeError> {
        self.dismiss();
        for end in self.ends.take() {
            end.await;
        }
        self.exports.take_failure()
    }

    fn stays(&self) -> bool {
        self.exports.stays()
    }
}

/// What a reactor thread does all day. `control` closes the inbox when every client is gone.
async fn station<D: Device + 'static>(shelf: Rc<Shelf<D>>, inbox: Arc<Inbox>) {
    while let Some(presence) = inbox.next().await {
        let (shelf, inbox) = (shelf.clone(), inbox.clone());
        gaur_reactor::spawn(async move {
            connection::serve(&shelf, &presence).await;
            inbox.load.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

/// A thread per connection.
struct Solos<D> {
    options: Arc<Options>,
    budget: Arc<Budget>,
    exports: Exports<D>,
}

impl<D: Device + 'static> Stations for Solos<D> {
    fn serve(&self, presence: Presence) -> Result<(), ServeError> {
        let (options, exports) = (self.options.clone(), self.exports.clone());
        let budget = self.budget.clone();
        let run = move || {
            // Moved here first and so dropped last: the client is gone only when its devices are.
            let presence = presence;
            let number = presence.0.number;
            let thread = usize::try_from(number).unwrap_or(usize::MAX);
            let config = Config {
                driver: Driver::Fallback,
                ..options.reactor
            };
            let reactor = match Reactor::new(&config) {
                Ok(reactor) => reactor,
                Err(errno) => {
                    options.say(&format!("client {number}: cannot be served: {errno}"));
                    return;
                }
            };
            let shelf = Rc::new(Shelf::new(options, exports, budget, thread));
            reactor.block_on(connection::serve(&shelf, &presence));
        };
        std::thread::Builder::new()
            .name("nbd".to_owned())
            .spawn(run)
            .map(drop)
            .map_err(|error| ServeError::new(format!("cannot start a thread: {error}")))
    }

    async fn close(&self) -> Result<(), ServeError> {
        self.exports.take_failure()
    }

    fn stays(&self) -> bool {
        self.exports.stays()
    }
}
