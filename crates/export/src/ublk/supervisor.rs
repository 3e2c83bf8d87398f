//! How a served device comes to its end.
//!
//! There are three ways. The server is told to stop: the driver takes the block device away, waits
//! for the requests under way, which are answered meanwhile, and hands all tags back. Another process
//! stops or deletes the device: the same, and the server learns of it by the tags. Or the device is
//! quiesced, by this server or another process: the driver keeps the block device, holds requests back
//! and hands idle tags back. Those of requests under way come to it later, with their answers, and
//! no event makes it hand them back, so the server asks again until it has all.
//!
//! When all tags are back the threads flush their devices and end, and the character device is
//! closed. Only then does a quiesced device take its next server, and a stopped one go away.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use gaur_reactor::Stop;

use super::channel::Channel;
use super::control::Control;
use super::features::Features;
use super::info::{Info, State};
use super::options::Options;
use super::threads::ServingThread;
use crate::error::ServeError;

/// How long the driver may take to hand tags back before it is asked again.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the supervisor is told.
pub(super) enum Event {
    /// End, and take the device away.
    Stop,
    /// End, and leave the device to the next server.
    Quiesce,
    /// The driver has handed back a first tag.
    Aborted,
    /// It is not possible to go on.
    Broken(String),
    /// A thread has ended.
    Ended(Result<(), ServeError>),
}

/// Where the server is going.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    No,
    /// The device goes.
    Deleting,
    /// The device stays.
    Quiescing,
}

/// The outcome of a server, for the thread that waits for it.
#[derive(Default)]
pub(super) struct Outcome {
    result: Mutex<Option<Result<(), ServeError>>>,
    told: Condvar,
    pub(super) ended: Stop,
}

impl Outcome {
    /// The first result counts.
    pub(super) fn tell(&self, result: Result<(), ServeError>) {
        let mut told = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        told.get_or_insert(result);
        drop(told);
        self.told.notify_all();
        self.ended.stop();
    }

    /// Waits for the result.
    pub(super) fn wait(&self) -> Result<(), ServeError> {
        let mut told = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = &*told {
                return result.clone();
            }
            told = self.told.wait(told).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Looks after a device until its end.
pub(super) struct Supervisor {
    pub(super) control: Control,
    pub(super) info: Info,
    pub(super) options: Options,
    pub(super) running: Vec<ServingThread>,
    pub(super) channel: Arc<Channel>,
    /// What was told before.
    pub(super) early: Vec<Event>,
    pub(super) events: mpsc::Receiver<Event>,
    pub(super) leaving: Leaving,
}

impl Supervisor {
    /// Waits for the end, as whatever is told makes it come. An error is what threads said, or that
    /// it had to break off, with threads still running.
    pub(super) fn run(mut self) -> Result<(), ServeError> {
        let mut alive = self.running.len();
        let mut result = Ok(());
        for event in std::mem::take(&mut self.early) {
            self.take(event, &mut alive, &mut result)?;
        }
        self.urge();
        while alive > 0 {
            let event = if self.leaving == Leaving::No {
                self.events
                    .recv()
                    .map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                self.events.recv_timeout(PATIENCE)
            };
            match event {
                Ok(event) => self.take(event, &mut alive, &mut result)?,
                Err(RecvTimeoutError::Timeout) => self.urge(),
                // Threads say that they end; without a word they panicked.
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(ServeError::new("the threads that served ublk are gone"));
                }
            }
        }
        self.close();
        result
    }

    fn take(
        &mut self,
        event: Event,
        alive: &mut usize,
        result: &mut Result<(), ServeError>,
    ) -> Result<(), ServeError> {
        match event {
            Event::Stop => self.leave(Leaving::Deleting),
            Event::Quiesce => self.leave(Leaving::Quiescing),
            Event::Aborted if self.leaving == Leaving::No => {
                // The state tells what the other process wanted.
                let state = self.control.info(self.info.id).map(|info| info.state);
                let leaving = match state {
                    Ok(State::Live) => Leaving::Quiescing,
                    _ => Leaving::Deleting,
                };
                self.say(match leaving {
                    Leaving::Quiescing => "was quiesced",
                    _ => "was stopped",
                });
                self.leave(leaving);
            }
            Event::Aborted => {}
            Event::Broken(message) => return Err(ServeError::new(message)),
            Event::Ended(ended) => {
                *alive -= 1;
                if result.is_ok() {
                    *result = ended;
                }
                // Alone, without tags having been handed back: a thread that could not begin.
                if self.leaving == Leaving::No {
                    self.leave(Leaving::Deleting);
                }
            }
        }
        Ok(())
    }

    fn leave(&mut self, leaving: Leaving) {
        // Once it is stopped nothing can keep it.
        if self.leaving != Leaving::Deleting {
            self.leaving = leaving;
        }
        self.urge();
    }

    /// Makes the driver hand back what it has.
    fn urge(&mut self) {
        let result = match self.leaving {
            Leaving::No => Ok(()),
            Leaving::Deleting => self.control.stop(&self.info),
            Leaving::Quiescing => self.control.quiesce(&self.info, PATIENCE),
        };
        match result {
            Ok(()) => {}
            // Every tag of a queue at work: again, later.
            Err(errno) if errno.raw() == libc::EBUSY => {}
            Err(errno) => self.say(&format!("does not take its end: {errno}")),
        }
    }

    fn close(mut self) {
        for thread in self.running.drain(..) {
            // Its event came at the very end.
            let _ = thread.thread.join();
        }
        drop(self.channel);
        if self.leaving == Leaving::Quiescing {
            return;
        }
        match self.control.delete_later(&self.info) {
            Ok(()) => {}
            // Another process was faster.
            Err(errno) if errno.raw() == libc::ENODEV => {}
            Err(errno) => {
                let line = format!("ublk device {} cannot be deleted: {errno}", self.info.id);
                self.options.say(&line);
            }
        }
    }

    fn say(&self, what: &str) {
        let line = format!("ublk device {} {what}", self.info.id);
        self.options.say(&line);
    }

    /// How to end a start that failed: a new device goes, one that was to be recovered stays.
    pub(super) fn after_failure(info: &Info, recovering: bool) -> Leaving {
        match (recovering, info.features.has(Features::QUIESCE)) {
            (true, true) => Leaving::Quiescing,
            // The driver has no way to take tags back; the end of the process is one.
            (true, false) => Leaving::No,
            (false, _) => Leaving::Deleting,
        }
    }
}
