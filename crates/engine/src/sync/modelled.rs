//! The primitives as the model checker knows them, with the interfaces of the real ones.
//!
//! Two things differ from what loom offers. loom takes `SeqCst` accesses for `AcqRel` ones, which
//! would report errors that cannot happen; here such accesses are ordered by a second atomic, see
//! [`Floor`]. And a [`RwLock`] is a mutex: no reader of the engine does anything under such a lock
//! that another reader could notice.
//!
//! [`check_weakened`] runs a model with weaker orderings than the code asks for. It is how a model
//! shows that it would notice if they were missing.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

pub(crate) use loom::sync::MutexGuard;

/// The atomics.
pub(crate) mod atomic {
    pub(crate) use super::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize};
    pub(crate) use std::sync::atomic::Ordering;
}

/// How much of the orderings asked for is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "only models ask for less"))]
pub(crate) enum Strength {
    /// All of it.
    AsWritten,
    /// `SeqCst` is `AcqRel`.
    AcquireRelease,
    /// Everything is `Relaxed`.
    Relaxed,
}

thread_local! {
    /// A model runs on one thread of the system, whatever the number of its own threads.
    static STRENGTH: Cell<Strength> = const { Cell::new(Strength::AsWritten) };
}

/// Orders the `SeqCst` accesses of one atomic: a load sees at least what was the last `SeqCst` store
/// when it began. Other accesses, and other atomics, are not ordered by it.
#[derive(Debug, Default)]
struct Floor(loom::sync::atomic::AtomicUsize);

/// What is done to an atomic.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Load,
    Store,
    Both,
}

impl Floor {
    /// Makes an access with the ordering that is granted.
    #[track_caller]
    fn with<T>(&self, asked: Ordering, kind: Access, access: impl FnOnce(Ordering) -> T) -> T {
        let strength = STRENGTH.get();
        if strength == Strength::Relaxed {
            return access(Ordering::Relaxed);
        }
        if asked != Ordering::SeqCst {
            return access(asked);
        }
        let in_order = strength == Strength::AsWritten;
        if in_order && kind == Access::Load {
            self.0.fetch_add(0, Ordering::Acquire);
        }
        let result = access(match kind {
            Access::Load => Ordering::Acquire,
            Access::Store => Ordering::Release,
            Access::Both => Ordering::AcqRel,
        });
        if in_order && kind != Access::Load {
            self.0.fetch_add(0, Ordering::Release);
        }
        result
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        /// The atomic of the same name.
        #[derive(Debug, Default)]
        pub(crate) struct $name {
            value: loom::sync::atomic::$name,
            floor: Floor,
        }

        #[allow(dead_code, reason = "not every type is used in every way")]
        impl $name {
            #[track_caller]
            pub(crate) fn new(value: $value) -> $name {
                $name {
                    value: loom::sync::atomic::$name::new(value),
                    floor: Floor::default(),
                }
            }

            #[track_caller]
            pub(crate) fn load(&self, ordering: Ordering) -> $value {
                let load = |granted| self.value.load(granted);
                self.floor.with(ordering, Access::Load, load)
            }

            #[track_caller]
            pub(crate) fn store(&self, value: $value, ordering: Ordering) {
                let store = |granted| self.value.store(value, granted);
                self.floor.with(ordering, Access::Store, store);
            }

            #[track_caller]
            pub(crate) fn swap(&self, value: $value, ordering: Ordering) -> $value {
                let swap = |granted| self.value.swap(value, granted);
                self.floor.with(ordering, Access::Both, swap)
            }

            #[track_caller]
            pub(crate) fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.floor.with(success, Access::Both, |granted| {
                    self.value.compare_exchange(current, new, granted, failure)
                })
            }
        }
    };
}

macro_rules! counting {
    ($name:ident, $value:ty) => {
        #[allow(dead_code, reason = "not every type is used in every way")]
        impl $name {
            #[track_caller]
            pub(crate) fn fetch_add(&self, value: $value, ordering: Ordering) -> $value {
                let add = |granted| self.value.fetch_add(value, granted);
                self.floor.with(ordering, Access::Both, add)
            }

            #[track_caller]
            pub(crate) fn fetch_sub(&self, value: $value, ordering: Ordering) -> $value {
                let subtract = |granted| self.value.fetch_sub(value, granted);
                self.floor.with(ordering, Access::Both, subtract)
            }

            #[track_caller]
            pub(crate) fn fetch_or(&self, value: $value, ordering: Ordering) -> $value {
                let or = |granted| self.value.fetch_or(value, granted);
                self.floor.with(ordering, Access::Both, or)
            }
        }
    };
}

atomic!(AtomicBool, bool);
atomic!(AtomicI32, i32);
atomic!(AtomicU64, u64);
atomic!(AtomicUsize, usize);
counting!(AtomicU64, u64);
counting!(AtomicUsize, usize);

/// `parking_lot::Mutex`: no poison.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Mutex<T> {
        Mutex(loom::sync::Mutex::new(value))
    }

    #[track_caller]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        match self.0.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }
}

/// `parking_lot::RwLock`, as a mutex.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(Mutex<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> RwLock<T> {
        RwLock(Mutex::new(value))
    }

    #[track_caller]
    pub(crate) fn read(&self) -> MutexGuard<'_, T> {
        self.0.lock()
    }

    #[track_caller]
    pub(crate) fn write(&self) -> MutexGuard<'_, T> {
        self.0.lock()
    }
}

/// `std::sync::OnceLock`: the value is there for whoever sees that it is.
#[derive(Debug, Default)]
pub(crate) struct OnceLock<T> {
    is_set: loom::sync::atomic::AtomicBool,
    setting: Mutex<()>,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    #[track_caller]
    pub(crate) fn get(&self) -> Option<&T> {
        match self.is_set.load(Ordering::Acquire) {
            true => self.value.get(),
            false => None,
        }
    }

    #[track_caller]
    pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let _setting = self.setting.lock();
        let value = self.value.get_or_init(make);
        self.is_set.store(true, Ordering::Release);
        value
    }
}

/// `futures_util::lock::Mutex`: whoever gives it up wakes one of those that wait.
#[derive(Debug, Default)]
pub(crate) struct TaskMutex<T> {
    state: Mutex<TaskMutexState>,
    value: std::marker::PhantomData<T>,
}

#[derive(Debug, Default)]
struct TaskMutexState {
    held: bool,
    waiting: VecDeque<Waker>,
}

impl<T> TaskMutex<T> {
    pub(crate) async fn lock(&self) -> TaskMutexGuard<'_, T> {
        poll_fn(|context| {
            let mut state = self.state.lock();
            if std::mem::replace(&mut state.held, true) {
                state.waiting.push_back(context.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
        TaskMutexGuard { mutex: self }
    }
}

/// Holds a [`TaskMutex`].
#[derive(Debug)]
pub(crate) struct TaskMutexGuard<'a, T> {
    mutex: &'a TaskMutex<T>,
}

impl<T> Drop for TaskMutexGuard<'_, T> {
    fn drop(&mut self) {
        let next = {
            let mut state = self.mutex.state.lock();
            state.held = false;
            state.waiting.pop_front()
        };
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

/// Most steps of one run of a model.
#[cfg(test)]
const BRANCHES_MAX: usize = 20_000;
/// Preemptions in one run, unless `LOOM_MAX_PREEMPTIONS` says otherwise.
#[cfg(test)]
const PREEMPTIONS: usize = 2;

/// Runs `model` in every way in which its threads may interleave with a bounded number of
/// preemptions.
#[cfg(test)]
pub(crate) fn check(model: impl Fn() + Send + Sync + 'static) {
    let builder = loom::model::Builder::new();
    let preemptions = builder.preemption_bound.unwrap_or(PREEMPTIONS);
    run(builder, Some(preemptions), model);
}

/// Runs a small `model` in every way in which its threads may interleave.
#[cfg(test)]
pub(crate) fn check_fully(model: impl Fn() + Send + Sync + 'static) {
    run(loom::model::Builder::new(), None, model);
}

/// Runs a small `model` with weaker orderings.
#[cfg(test)]
pub(crate) fn check_weakened(strength: Strength, model: impl Fn() + Send + Sync + 'static) {
    STRENGTH.set(strength);
    check_fully(model);
    STRENGTH.set(Strength::AsWritten);
}

#[cfg(test)]
fn run(
    mut builder: loom::model::Builder,
    preemptions: Option<usize>,
    model: impl Fn() + Send + Sync + 'static,
) {
    builder.max_branches = BRANCHES_MAX;
    builder.preemption_bound = preemptions;
    let runs = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = std::sync::Arc::clone(&runs);
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    report(runs.load(Ordering::Relaxed));
}

/// Says how often a model was run, where somebody asked for it.
#[cfg(test)]
#[allow(
    clippy::disallowed_methods,
    reason = "a model is a test: it may say what it is called"
)]
fn report(runs: usize) {
    if std::env::var_os("GAUR_COUNT_RUNS").is_some() {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("a model");
        // Past the test runner, which would keep it to itself.
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("{name}: {runs} runs\n"),
        );
    }
}

/// Drives a future on this thread of the model. Unlike loom's own it leaves nothing to be undone when
/// a deadlock ends the run, so a test can expect one.
#[cfg(test)]
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let waker = std::sync::Arc::new(Unpark(loom::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        loom::thread::park();
    }
}

#[cfg(test)]
struct Unpark(loom::thread::Thread);

#[cfg(test)]
impl std::task::Wake for Unpark {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.unpark();
    }
}
