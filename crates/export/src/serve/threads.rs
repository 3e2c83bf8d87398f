//! Serving threads: a reactor and a device each.

use std::future::Future;
use std::sync::{Arc, mpsc};

use gaur_block::{Device, DeviceLimits};
use gaur_reactor::{JoinHandle, Threads, ThreadsConfig};

use super::channel::Channel;
use crate::error::ServeError;

/// The size of a device, and what it can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) size_bytes: u64,
    pub(crate) limits: DeviceLimits,
}

impl Geometry {
    pub(crate) fn of(device: &impl Device) -> Geometry {
        Geometry {
            size_bytes: device.size_bytes(),
            limits: device.limits(),
        }
    }
}

/// Threads that have their devices and wait to be told to serve. `R` is what a thread reports of its
/// device, `S` what it needs to serve.
pub(crate) struct Prepared<R, S> {
    serving: ServingThreads,
    /// What the first of them reported. All devices are queues of one image.
    pub(crate) report: R,
    starts: Vec<Channel<Option<S>>>,
}

/// Threads that serve. Dropping this leaves them running.
pub(crate) struct ServingThreads {
    threads: Threads,
    ends: Vec<JoinHandle<Result<(), ServeError>>>,
}

impl<R: Send + 'static, S: Send + 'static> Prepared<R, S> {
    /// Starts the threads. Each calls `make` with its number, for its device and a report of it, and
    /// later `serve`, whose future ends when the thread has nothing more to serve.
    pub(crate) fn start<D, M, F, E>(
        config: &ThreadsConfig,
        make: M,
        serve: F,
    ) -> Result<Prepared<R, S>, ServeError>
    where
        D: 'static,
        M: Fn(usize) -> Result<(D, R), String> + Send + Sync + 'static,
        F: Fn(D, S) -> E + Send + Sync + 'static,
        E: Future<Output = Result<(), ServeError>> + 'static,
    {
        let cannot_start = |errno| ServeError::because("cannot start the serving threads", errno);
        let threads = Threads::start(config).map_err(cannot_start)?;
        let shared = Arc::new((make, serve));
        let (send, reports) = mpsc::channel();
        let (mut starts, mut ends) = (Vec::new(), Vec::new());
        for (index, handle) in threads.handles().iter().enumerate() {
            let start: Channel<Option<S>> = Channel::new();
            starts.push(start.clone());
            let (shared, send) = (shared.clone(), send.clone());
            let run = move || async move {
                let (make, serve) = &*shared;
                let (device, report) = match make(index) {
                    Ok(made) => made,
                    Err(reason) => {
                        let _ = send.send(Err(reason));
                        return Ok(());
                    }
                };
                let _ = send.send(Ok(report));
                drop(send);
                let Some(start) = start.take().await else {
                    return Ok(());
                };
                let served = serve(device, start);
                // It may hold the image open.
                drop(shared);
                served.await
            };
            ends.push(handle.spawn(run).map_err(cannot_start)?);
        }
        drop(send);
        let serving = ServingThreads { threads, ends };
        let mut all = Vec::with_capacity(starts.len());
        let mut failure = None;
        for _ in 0..starts.len() {
            // A thread that panics while it makes its device reports nothing.
            match reports.recv() {
                Ok(Ok(report)) => all.push(report),
                Ok(Err(reason)) => failure = failure.or(Some(reason)),
                Err(_) => {
                    let panicked = "a serving thread failed while it opened the exports";
                    failure = failure.or(Some(panicked.to_owned()));
                }
            }
        }
        match (failure, all.into_iter().next()) {
            (None, Some(report)) => Ok(Prepared {
                serving,
                report,
                starts,
            }),
            (failure, _) => {
                dismiss(&starts, serving);
                let none = || "there is no serving thread".to_owned();
                Err(ServeError::new(failure.unwrap_or_else(none)))
            }
        }
    }

    /// How many threads there are.
    pub(crate) fn count(&self) -> usize {
        self.starts.len()
    }

    /// Has every thread serve, with what is for it.
    pub(crate) fn serve(self, with: impl IntoIterator<Item = S>) -> ServingThreads {
        for (start, with) in self.starts.iter().zip(with) {
            start.put(Some(with));
        }
        self.serving
    }

    /// Ends threads that have nothing to serve, and waits until their devices are gone.
    pub(crate) fn dismiss(self) {
        dismiss(&self.starts, self.serving);
    }
}

fn dismiss<S>(starts: &[Channel<Option<S>>], serving: ServingThreads) {
    for start in starts {
        start.put(None);
    }
    serving.join();
}

impl ServingThreads {
    /// Waits until every thread has served to its end; the first error.
    pub(crate) async fn ended(&mut self) -> Result<(), ServeError> {
        let mut outcome = Ok(());
        for end in self.ends.drain(..) {
            outcome = outcome.and(end.await);
        }
        outcome
    }

    /// Waits until every task of every thread has ended, and their devices are gone.
    pub(crate) fn join(self) {
        self.threads.join();
    }
}
