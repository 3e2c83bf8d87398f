//! Signal handling for long verbs. The first signal cancels the work in order; the second ends the
//! process at once, which is no worse than a power cut.

use std::sync::Arc;

use gaur_engine::Job;
use gaur_reactor::{Signal, Signals, block_on};

use crate::failure::{EXIT_INTERRUPTED, Failure};

/// Signals that ask a verb to end.
const SIGNALS: [Signal; 3] = [Signal::Interrupt, Signal::Terminate, Signal::Hangup];

/// Has the first signal call `act`, on a thread of its own. To be called once in a process.
pub fn on_signal(act: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let signals = Signals::install(&SIGNALS)
        .map_err(|errno| Failure::new(format!("cannot take over signals: {errno}")))?;
    std::thread::spawn(move || {
        block_on(signals.next());
        signals.exit_on_next(EXIT_INTERRUPTED);
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
