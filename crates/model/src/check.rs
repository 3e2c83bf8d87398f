//! Runs models under loom.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake};

use loom::thread;

/// How much of the orderings asked for is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
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

/// The strength of the model that runs on this thread.
pub(crate) fn strength() -> Strength {
    STRENGTH.get()
}

/// Most steps of one run of a model.
const BRANCHES_MAX: usize = 20_000;
/// Preemptions in one run, unless `LOOM_MAX_PREEMPTIONS` says otherwise.
const PREEMPTIONS: usize = 2;

/// Runs `model` in every way in which its threads may interleave with a bounded number of
/// preemptions.
pub fn check(model: impl Fn() + Send + Sync + 'static) {
    let builder = loom::model::Builder::new();
    let preemptions = builder.preemption_bound.unwrap_or(PREEMPTIONS);
    run(builder, Some(preemptions), model);
}

/// Runs a small `model` in every way in which its threads may interleave.
pub fn check_fully(model: impl Fn() + Send + Sync + 'static) {
    run(loom::model::Builder::new(), None, model);
}

/// Runs a small `model` with weaker orderings.
pub fn check_weakened(strength: Strength, model: impl Fn() + Send + Sync + 'static) {
    STRENGTH.set(strength);
    check_fully(model);
    STRENGTH.set(Strength::AsWritten);
}

fn run(
    mut builder: loom::model::Builder,
    preemptions: Option<usize>,
    model: impl Fn() + Send + Sync + 'static,
) {
    builder.max_branches = BRANCHES_MAX;
    builder.preemption_bound = preemptions;
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    report(runs.load(Ordering::Relaxed));
}

/// Prints how many executions a model had, if an environment variable asks for it.
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
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Arc::new(Unpark(thread::current())).into();
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        thread::park();
    }
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
