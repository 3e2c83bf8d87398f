//! Signal handling for long verbs. The first signal cancels the work in order; the second ends the
//! process at once, which is no worse than a power cut. `SIGUSR1` asks how far it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_engine::Job;
use gaur_reactor::{Signal, Signals, block_on};

use crate::failure::{EXIT_INTERRUPTED, Failure};

/// Signals that ask a verb to end, and the one that asks how far it is.
const SIGNALS: [Signal; 4] = [
    Signal::Interrupt,
    Signal::Terminate,
    Signal::Hangup,
    Signal::User1,
];
static ASKED: AtomicBool = AtomicBool::new(false);

/// Whether a signal has asked how far it is since the last call.
pub fn take_asked() -> bool {
    ASKED.load(Ordering::Relaxed) && ASKED.swap(false, Ordering::Relaxed)
}

/// Has the first signal that asks for the end call `act`, on a thread of its own. To be called once in a process.
pub fn on_signal(act: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let signals = Signals::install(&SIGNALS)
        .map_err(|errno| Failure::new(format!("cannot take over signals: {errno}")))?;
    std::thread::spawn(move || {
        while block_on(signals.next()) == Signal::User1 {
            ASKED.store(true, Ordering::Relaxed);
        }
        signals.exit_on_next(EXIT_INTERRUPTED);
        gaur_reactor::nbd::hurry();
        act();
    });
    Ok(())
}

/// A job that the first signal cancels. To be called once in a process.
pub fn job() -> Result<Arc<Job>, Failure> {
    let job = Arc::new(Job::default());
    let asked = Arc::clone(&job);
    on_signal(move || asked.cancel())?;
    Ok(job)
}

/// A failure when a signal has cancelled the job.
pub fn check(job: &Job) -> Result<(), Failure> {
    match job.is_cancelled() {
        true => Err(Failure::interrupted()),
        false => Ok(()),
    }
}
