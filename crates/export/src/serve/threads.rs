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
    /// What the first of them reported. All devices are queues of one image.
    pub(crate) report: R,
    waiting: Waiting<S>,
}

/// Dropping this ends the threads, and waits until their devices are gone.
struct Waiting<S> {
    starts: Vec<Channel<Option<S>>>,
    /// Until they serve.
    serving: Option<ServingThreads>,
}

impl<S> Drop for Waiting<S> {
    fn drop(&mut self) {
        if let Some(serving) = self.serving.take() {
            for start in &self.starts {
                start.put(None);
            }
            serving.join();
        }
    }
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
        let starts = threads.handles().iter().map(|_| Channel::new());
        let starts: Vec<Channel<Option<S>>> = starts.collect();
        let mut waiting = Waiting {
            starts: starts.clone(),
            serving: None,
        };
        let handles = threads.handles().to_vec();
        let ends = Vec::new();
        let serving = waiting.serving.insert(ServingThreads { threads, ends });
        let shared = Arc::new((make, serve));
        let (send, reports) = mpsc::channel();
        for (index, (handle, start)) in handles.iter().zip(starts).enumerate() {
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
            serving.ends.push(handle.spawn(run).map_err(cannot_start)?);
        }
        drop(send);
        let mut first = None;
        for _ in handles {
            // A thread that panics while it makes its device reports nothing.
            let panicked = "a serving thread failed while it opened the exports";
            let report = reports.recv().unwrap_or_else(|_| Err(panicked.to_owned()));
            first.get_or_insert(report.map_err(ServeError::new)?);
        }
        match first {
            Some(report) => Ok(Prepared { report, waiting }),
            None => Err(ServeError::new("there is no serving thread")),
        }
    }

    /// How many threads there are.
    pub(crate) fn count(&self) -> usize {
        self.waiting.starts.len()
    }

    /// Has every thread serve, with what is for it.
    pub(crate) fn serve(mut self, with: impl IntoIterator<Item = S>) -> ServingThreads {
        for (start, with) in self.waiting.starts.iter().zip(with) {
            start.put(Some(with));
        }
        let serving = self.waiting.serving.take();
        serving.expect("the threads wait until this is called")
    }
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

#[cfg(test)]
mod tests {
    use gaur_reactor::Config;

    use super::*;

    #[test]
    fn threads_that_never_serve_end_with_their_devices() {
        let device = Arc::new(());
        let config = ThreadsConfig {
            count: 2,
            processors: Vec::new(),
            name: "test".to_owned(),
            reactor: Config::default(),
        };
        let clone = device.clone();
        let make = move |_| Ok((clone.clone(), ()));
        let serve = async |_: Arc<()>, (): ()| Ok(());
        let prepared = Prepared::start(&config, make, serve).expect("threads");
        assert_eq!(Arc::strong_count(&device), 4, "the closure has one, too");
        // As when the control thread that would have them serve cannot start.
        drop(prepared);
        assert_eq!(Arc::strong_count(&device), 1);
    }
}
