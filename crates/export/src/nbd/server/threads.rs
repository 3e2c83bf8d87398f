//! The threads on which connections run.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gaur_block::Device;
use gaur_reactor::{Config, Driver, Reactor, ThreadsConfig};

use super::client::ClientGuard;
use super::client_task;
use super::control::{self, ClientThreads};
use super::exports::Exports;
use super::listen::Listener;
use super::options::{Options, Outcome, Place};
use super::pool::Budget;
use super::thread_exports::ThreadExports;
use crate::error::ServeError;
use crate::serve::{Channel, Prepared, ServingThreads, StopSwitch, control_reactor, say};

/// Serves the exports of `options` as [`Exports::serve_uring`] does. Every thread has its own device
/// for an export, made by `devices` on that thread (so reactor files can be made there). Each thread
/// makes each device once before the first client is let in, to find out whether that works.
///
/// # Errors
/// Also when a device could not be made.
pub fn serve_uring<D, F>(
    listener: Listener,
    options: Options,
    stop: &StopSwitch,
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
        stop: &StopSwitch,
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
        stop: &StopSwitch,
    ) -> Result<Outcome, ServeError> {
        options.check()?;
        let options = Arc::new(options);
        let threads = ThreadPerClient {
            options: options.clone(),
            budget: Budget::new(options.memory_bytes),
            exports: self.clone(),
        };
        on_control_reactor(listener, &options, stop, &threads)
    }
}

fn serve_on_threads<D: Device + 'static>(
    listener: Listener,
    options: Options,
    stop: &StopSwitch,
    (exports, try_first): (&Exports<D>, bool),
) -> Result<Outcome, ServeError> {
    let options = Arc::new(options);
    let shared = SharedThreads::start(&options, exports, try_first)?;
    let outcome = on_control_reactor(listener, &options, stop, &shared);
    shared.close_inboxes();
    if outcome != Ok(Outcome::Forced)
        && let Some(threads) = shared.threads.take()
    {
        threads.join();
    }
    outcome
}

fn on_control_reactor(
    listener: Listener,
    options: &Arc<Options>,
    stop: &StopSwitch,
    threads: &impl ClientThreads,
) -> Result<Outcome, ServeError> {
    control_reactor()?.block_on(control::run(listener, options, stop, threads))
}

/// Clients on their way to a thread; `None` when there will be no more.
#[derive(Clone, Default)]
struct Inbox {
    arrivals: Channel<Option<ClientGuard>>,
    /// Clients that are there or on their way.
    load: Arc<AtomicUsize>,
}

/// Reactor threads that share the clients, each with its devices.
struct SharedThreads<D> {
    /// Taken when they are waited for.
    threads: RefCell<Option<ServingThreads>>,
    inboxes: Vec<Inbox>,
    exports: Exports<D>,
}

impl<D: Device + 'static> SharedThreads<D> {
    fn start(
        options: &Arc<Options>,
        exports: &Exports<D>,
        try_first: bool,
    ) -> Result<SharedThreads<D>, ServeError> {
        let most = match options.shared {
            0 => usize::MAX,
            shared => shared as usize,
        };
        let config = ThreadsConfig {
            count: options.threads.clamp(1, most),
            processors: Vec::new(),
            name: "nbd".to_owned(),
            reactor: options.reactor,
        };
        let budget = Budget::new(options.memory_bytes);
        let (options, all) = (options.clone(), exports.clone());
        let make = move |thread| {
            let (options, exports) = (options.clone(), all.clone());
            let exports = ThreadExports::new(options, exports, budget.clone(), thread);
            if try_first {
                exports.try_all()?;
            }
            Ok((Rc::new(exports), ()))
        };
        let prepared = Prepared::start(&config, make, serve_inbox::<D>)?;
        let inboxes: Vec<Inbox> = (0..config.count).map(|_| Inbox::default()).collect();
        Ok(SharedThreads {
            threads: RefCell::new(Some(prepared.serve(inboxes.iter().cloned()))),
            inboxes,
            exports: exports.clone(),
        })
    }

    fn close_inboxes(&self) {
        for inbox in &self.inboxes {
            inbox.arrivals.put(None);
        }
    }
}

impl<D: Device + 'static> ClientThreads for SharedThreads<D> {
    fn serve(&self, guard: ClientGuard) -> Result<(), ServeError> {
        let load = |inbox: &&Inbox| inbox.load.load(Ordering::Relaxed);
        if let Some(inbox) = self.inboxes.iter().min_by_key(load) {
            inbox.load.fetch_add(1, Ordering::Relaxed);
            inbox.arrivals.put(Some(guard));
        }
        Ok(())
    }

    async fn close(&self) -> Result<(), ServeError> {
        self.close_inboxes();
        let threads = self.threads.take();
        if let Some(mut threads) = threads {
            threads.ended().await?;
            self.threads.replace(Some(threads));
        }
        self.exports.take_failure()
    }

    fn stays(&self) -> bool {
        self.exports.stays()
    }
}

/// What a reactor thread does. `control` closes the inbox when every client is gone.
async fn serve_inbox<D: Device + 'static>(
    exports: Rc<ThreadExports<D>>,
    inbox: Inbox,
) -> Result<(), ServeError> {
    while let Some(guard) = inbox.arrivals.take().await {
        let (exports, load) = (exports.clone(), inbox.load.clone());
        gaur_reactor::spawn(async move {
            client_task::serve(&exports, &guard).await;
            load.fetch_sub(1, Ordering::Relaxed);
        });
    }
    Ok(())
}

/// A thread per connection.
struct ThreadPerClient<D> {
    options: Arc<Options>,
    budget: Arc<Budget>,
    exports: Exports<D>,
}

impl<D: Device + 'static> ClientThreads for ThreadPerClient<D> {
    fn serve(&self, guard: ClientGuard) -> Result<(), ServeError> {
        let (options, exports) = (self.options.clone(), self.exports.clone());
        let budget = self.budget.clone();
        let run = move || {
            // Moved here first and so dropped last: the client is gone only when its devices are.
            let guard = guard;
            let number = guard.0.number;
            let thread = usize::try_from(number).unwrap_or(usize::MAX);
            let config = Config {
                driver: Driver::Fallback,
                ..options.reactor
            };
            let reactor = match Reactor::new(&config) {
                Ok(reactor) => reactor,
                Err(errno) => {
                    say(
                        &options.log,
                        &format!("client {number}: cannot be served: {errno}"),
                    );
                    return;
                }
            };
            let exports = Rc::new(ThreadExports::new(options, exports, budget, thread));
            reactor.block_on(client_task::serve(&exports, &guard));
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
