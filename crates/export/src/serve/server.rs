//! The handle of a running export, and its control thread.

use std::future::Future;
use std::thread::{self, JoinHandle};

use gaur_reactor::{Config, Driver, Reactor, Stop, block_on};
use parking_lot::Mutex;

use super::stop::StopSwitch;
use super::workers::OnDrop;
use crate::error::ServeError;
use crate::front::Front;

/// What only the front end of a [`Server`] can do.
pub(crate) trait Transport: Send + Sync {
    /// The size of the device has changed: tells the clients that can be told.
    fn resized(&self) -> Result<(), ServeError>;

    /// The export is stopped now; called once. An error is the outcome of the export, and says that its
    /// control thread may be blocked by what is under way and is not waited for.
    fn cut_off(&self) -> Result<(), ServeError> {
        Ok(())
    }

    /// Whether dropping the handle ends the export. Otherwise it is served on.
    fn ends_with_handle(&self) -> bool {
        false
    }
}

/// An export that runs.
pub struct Server {
    place: String,
    switch: StopSwitch,
    ended: Stop,
    control: Option<JoinHandle<Result<(), ServeError>>>,
    /// The outcome when the control thread is not waited for.
    cut_off: Mutex<Option<ServeError>>,
    transport: Box<dyn Transport>,
}

/// A reactor for control work, which needs no ring.
pub(crate) fn control_reactor() -> Result<Reactor, ServeError> {
    let config = Config {
        driver: Driver::Fallback,
        ..Config::default()
    };
    Reactor::new(&config)
        .map_err(|errno| ServeError::because("cannot start the control loop", errno))
}

impl Server {
    /// Starts the control thread, which sees the export to its end: `serve` runs on it, ends when the
    /// switch says so or when the clients are through, and returns the outcome.
    pub(crate) fn spawn<F, E>(
        name: String,
        place: String,
        transport: Box<dyn Transport>,
        serve: F,
    ) -> Result<Server, ServeError>
    where
        F: FnOnce(StopSwitch) -> E + Send + 'static,
        E: Future<Output = Result<(), ServeError>>,
    {
        let (switch, ended) = (StopSwitch::new(), Stop::new());
        let (inner, raised) = (switch.clone(), ended.clone());
        let control = thread::Builder::new()
            .name(name)
            .spawn(move || {
                let _ended = OnDrop(|| raised.stop());
                control_reactor()?.block_on(serve(inner))
            })
            .map_err(|error| ServeError::new(format!("cannot start a thread: {error}")))?;
        Ok(Server {
            place,
            switch,
            ended,
            control: Some(control),
            cut_off: Mutex::new(None),
            transport,
        })
    }

    /// Names the place, when it is known only after the start.
    pub(crate) fn set_place(&mut self, place: String) {
        self.place = place;
    }

    fn join(&mut self) -> Result<(), ServeError> {
        block_on(self.ended.stopped());
        let cut_off = self.cut_off.lock().take();
        if let Some(error) = cut_off {
            self.control = None;
            return Err(error);
        }
        match self.control.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(ServeError::new("the control thread panicked")),
        }
    }
}

impl Front for Server {
    fn place(&self) -> String {
        self.place.clone()
    }

    fn resized(&self) -> Result<(), ServeError> {
        self.transport.resized()
    }

    fn stop(&self) {
        let mut cut_off = self.cut_off.lock();
        let before = self.switch.now.is_stopped();
        self.switch.drain();
        let stops_now = self.switch.now.is_stopped() && !before && !self.ended.is_stopped();
        if stops_now && let Err(error) = self.transport.cut_off() {
            *cut_off = Some(error);
            self.ended.stop();
        }
    }

    fn ended(&self) -> Stop {
        self.ended.clone()
    }

    fn finish(mut self: Box<Self>) -> Result<(), ServeError> {
        self.join()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.control.is_some() && self.transport.ends_with_handle() {
            if !self.switch.drain.is_stopped() {
                self.stop();
            }
            // A caller that wants to know of an error calls `finish`.
            let _ = self.join();
        }
    }
}
