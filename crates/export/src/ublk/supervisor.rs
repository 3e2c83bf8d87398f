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

use std::sync::{Arc, mpsc};
use std::time::Duration;

use gaur_block::Errno;
use gaur_reactor::{Stop, timeout};

use super::char_device::CharDevice;
use super::control::Control;
use super::features::Features;
use super::info::{Info, State};
use super::options::Options;
use super::uapi;
use crate::error::ServeError;
use crate::serve::{Channel, ServingThreads};

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
    ThreadEnded,
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

/// Looks after a device until its end. Its commands to the driver block the control thread.
pub(super) struct Supervisor {
    pub(super) control: Control,
    pub(super) info: Info,
    pub(super) options: Options,
    pub(super) threads: ServingThreads,
    /// Threads that have not ended.
    pub(super) alive: usize,
    pub(super) char_device: Arc<CharDevice>,
    pub(super) events: Channel<Event>,
    pub(super) leaving: Leaving,
}

impl Supervisor {
    /// Shows the block device, says so by `live`, and sees it to its end once `drain` is raised.
    pub(super) async fn run(
        mut self,
        recovering: bool,
        live: mpsc::Sender<()>,
        drain: Stop,
    ) -> Result<(), ServeError> {
        // Anything that is told now is that something is wrong, and the driver would wait for ever.
        let give_up = || !self.events.is_empty();
        let operation = match recovering {
            true => uapi::END_USER_RECOVERY,
            false => uapi::START_DEV,
        };
        let started = self.control.start(operation, &self.info, &give_up);
        if let Err(errno) = started {
            let why = ServeError::new(explain_start(&self.info, errno));
            self.leaving = Supervisor::after_failure(&self.info, recovering);
            return match self.leaving {
                Leaving::No => Err(why),
                _ => self.wind_down().await.and(Err(why)),
            };
        }
        let _ = live.send(());
        let events = self.events.clone();
        gaur_reactor::spawn(async move {
            drain.stopped().await;
            events.put(Event::Stop);
        });
        self.wind_down().await
    }

    /// Waits for the end, as whatever is told makes it come. An error is what threads said, or that
    /// it had to break off, with threads still running.
    async fn wind_down(mut self) -> Result<(), ServeError> {
        self.urge();
        while self.alive > 0 {
            let event = match self.leaving {
                Leaving::No => Some(self.events.take().await),
                _ => timeout(PATIENCE, self.events.take()).await,
            };
            match event {
                Some(event) => self.take(event)?,
                None => self.urge(),
            }
        }
        self.close().await
    }

    fn take(&mut self, event: Event) -> Result<(), ServeError> {
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
            Event::ThreadEnded => {
                self.alive -= 1;
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
            Leaving::Deleting => self.control.tell(uapi::STOP_DEV, &self.info, 0),
            Leaving::Quiescing => self.control.quiesce(&self.info, PATIENCE),
        };
        match result {
            Ok(()) => {}
            // Every tag of a queue at work: again, later.
            Err(errno) if errno.raw() == libc::EBUSY => {}
            Err(errno) => self.say(&format!("does not take its end: {errno}")),
        }
    }

    async fn close(mut self) -> Result<(), ServeError> {
        let served = self.threads.ended().await;
        self.threads.join();
        drop(self.char_device);
        if self.leaving == Leaving::Quiescing {
            return served;
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
        served
    }

    fn say(&self, what: &str) {
        let line = format!("ublk device {} {what}", self.info.id);
        self.options.say(&line);
    }

    /// How to end a start that failed: a new device goes, one that was to be recovered stays.
    fn after_failure(info: &Info, recovering: bool) -> Leaving {
        match (recovering, info.features.has(Features::QUIESCE)) {
            (true, true) => Leaving::Quiescing,
            // The driver has no way to take tags back; the end of the process is one.
            (true, false) => Leaving::No,
            (false, _) => Leaving::Deleting,
        }
    }
}

fn explain_start(info: &Info, errno: Errno) -> String {
    let id = info.id;
    match errno.raw() {
        libc::EINTR => format!("ublk device {id} did not start: requests cannot be fetched"),
        _ => format!("the kernel does not start ublk device {id}: {errno}"),
    }
}
