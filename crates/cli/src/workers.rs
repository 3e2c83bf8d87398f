//! Threads that work on one job, with progress and the end by a signal. Nothing is shared but the first error.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gaur_engine::Job;

use crate::failure::Failure;
use crate::interrupt;
use crate::progress::Progress;

/// Interval of progress updates.
const TICK: Duration = Duration::from_millis(50);

/// How far the threads are.
#[derive(Default)]
pub struct Shared {
    done_bytes: AtomicU64,
    failed: AtomicBool,
    error: Mutex<Option<Failure>>,
}

/// A lock whose holder panicked holds nothing that could be half changed here.
pub fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// So many bytes more are done.
    pub fn add(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether there is nothing more to do: a thread has failed, or a signal came.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    fn fail(&self, failure: Failure) {
        hold(&self.error).get_or_insert(failure);
        self.failed.store(true, Ordering::Release);
    }
}

/// Runs `work` on so many threads, until all have ended. The first error is what counts; `cancel` then has the others end
/// what they wait for.
pub fn run(
    count: usize,
    job: &Job,
    progress: &mut Progress,
    cancel: impl Fn(),
    work: impl Fn(&Shared) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let shared = &Shared::default();
    let work = &work;
    // Closed when all threads are gone.
    let (end_send, end) = sync_channel::<()>(0);
    std::thread::scope(|scope| {
        for _ in 0..count.max(1) {
            let worker_end = end_send.clone();
            scope.spawn(move || {
                let _end = worker_end;
                if let Err(failure) = work(shared) {
                    shared.fail(failure);
                }
            });
        }
        drop(end_send);
        while end.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            progress.set(shared.done_bytes.load(Ordering::Relaxed));
            if let Err(interrupted) = interrupt::check(job) {
                shared.fail(interrupted);
            }
            if shared.has_failed() {
                cancel();
            }
        }
    });
    match hold(&shared.error).take() {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}
