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
use super::listen::Listener;
use super::options::{Options, Outcome, Place};
use super::shelf::{Make, Shelf};
use super::stop::Stop;
use crate::error::ServeError;

/// Serves on [`Options::threads`] reactor threads. Every connection stays on one thread; every
/// thread has its own device for each export, made by `devices` on that thread before the first
/// client is let in (so reactor files can be made there).
///
/// Blocks the calling thread, which must not run a reactor, until the server ends; see [`Outcome`].
/// An error: a thread or a device could not be made, or a device could not be flushed at the end.
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
    let options = Arc::new(options);
    let make: Make<D> = Arc::new(devices);
    let crew = Crew::start(&options, &make)?;
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

/// Serves without io_uring: every connection has a thread of its own, on which requests run one
/// after the other. `devices` is called on that thread when its client first asks about an export.
///
/// Blocks and ends like [`serve_uring`].
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
    let options = Arc::new(options);
    let failure = Arc::new(Mutex::new(None));
    let make: Make<D> = Arc::new(devices);
    let solos = Solos {
        options: options.clone(),
        make,
        failure,
    };
    on_control_reactor(listener, &options, stop, &solos)
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

type Ended = JoinHandle<Result<(), ServeError>>;

/// Reactor threads, each with its devices.
struct Crew {
    threads: Threads,
    inboxes: Vec<Arc<Inbox>>,
    ends: RefCell<Vec<Ended>>,
}

impl Crew {
    fn start<D: Device + 'static>(
        options: &Arc<Options>,
        make: &Make<D>,
    ) -> Result<Crew, ServeError> {
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
        };
        let (ready, readiness) = mpsc::channel();
        for (thread, handle) in crew.threads.handles().iter().enumerate() {
            let inbox = Arc::new(Inbox::default());
            crew.inboxes.push(inbox.clone());
            let (options, make, ready) = (options.clone(), make.clone(), ready.clone());
            let end = handle
                .spawn(move || {
                    let shelf = Rc::new(Shelf::new(options, thread, make));
                    station(shelf, inbox, ready)
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

impl Stations for Crew {
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
        let mut outcome = Ok(());
        for end in self.ends.take() {
            outcome = outcome.and(end.await);
        }
        outcome
    }
}

/// What a reactor thread does all day.
async fn station<D: Device + 'static>(
    shelf: Rc<Shelf<D>>,
    inbox: Arc<Inbox>,
    ready: mpsc::Sender<Result<(), ServeError>>,
) -> Result<(), ServeError> {
    let made = shelf.fill();
    let failed = made.is_err();
    // Nobody listens when the server gave up on another thread's account.
    let _ = ready.send(made);
    drop(ready);
    if failed {
        return Ok(());
    }
    while let Some(presence) = inbox.next().await {
        let (shelf, inbox) = (shelf.clone(), inbox.clone());
        gaur_reactor::spawn(async move {
            connection::serve(&shelf, &presence).await;
            inbox.load.fetch_sub(1, Ordering::Relaxed);
        });
    }
    // `control` closes the inbox when every client is gone.
    shelf.flush().await
}

/// A thread per connection.
struct Solos<D> {
    options: Arc<Options>,
    make: Make<D>,
    /// The first flush that failed.
    failure: Arc<Mutex<Option<ServeError>>>,
}

impl<D: Device + 'static> Stations for Solos<D> {
    fn serve(&self, presence: Presence) -> Result<(), ServeError> {
        let (options, make) = (self.options.clone(), self.make.clone());
        let failure = self.failure.clone();
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
            let shelf = Rc::new(Shelf::new(options, thread, make));
            let flushed = reactor.block_on(async {
                connection::serve(&shelf, &presence).await;
                shelf.flush().await
            });
            if let Err(error) = flushed {
                lock(&failure).get_or_insert(error);
            }
        };
        std::thread::Builder::new()
            .name("nbd".to_owned())
            .spawn(run)
            .map(drop)
            .map_err(|error| ServeError::new(format!("cannot start a thread: {error}")))
    }

    async fn close(&self) -> Result<(), ServeError> {
        match lock(&self.failure).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}
