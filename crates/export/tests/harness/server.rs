//! A server in a thread of the test.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use gaur_block::Device;
use gaur_export::nbd::{
    self, Export, Exports, Listen, Listener, Options, Outcome, Place, ServeError, Stop,
};

use gaur_reactor::Driver;

use super::eventually;

/// How a server runs its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Reactor threads with rings.
    Reactor,
    /// Reactor threads without.
    Fallback,
    /// A thread per connection.
    Blocking,
}

pub const MODES: [Mode; 3] = [Mode::Reactor, Mode::Fallback, Mode::Blocking];

/// A running server.
pub struct Server {
    pub socket: PathBuf,
    pub uri: String,
    pub stop: Stop,
    pub log: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<Result<Outcome, ServeError>>>,
}

/// A socket path of this test's own.
pub fn socket_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("gaur-nbd-{}-{number}.sock", std::process::id()))
}

/// One writable export with the empty name, any number of clients, two threads.
pub fn options() -> Options {
    let mut options = Options::new(vec![Export::new("")]);
    options.shared = 0;
    options.persistent = true;
    options.threads = 2;
    options
}

impl Server {
    /// Serves a device that every thread has a clone of.
    pub fn start<D>(mode: Mode, options: Options, device: D) -> Server
    where
        D: Device + Clone + Send + Sync + 'static,
    {
        Server::start_with(mode, options, move |_| Ok(device.clone()))
    }

    pub fn start_with<D, F>(mode: Mode, mut options: Options, devices: F) -> Server
    where
        D: Device + 'static,
        F: Fn(Place) -> Result<D, String> + Send + Sync + 'static,
    {
        let socket = socket_path();
        let listener = Listener::bind(&Listen::Unix(socket.clone())).expect("bind");
        let uri = listener.uri("");
        let stop = Stop::new();
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = log.clone();
        options.log = Some(Arc::new(move |line| {
            lines.lock().unwrap().push(line.to_owned())
        }));
        // Never the one when the other was meant, whatever the machine allows.
        options.reactor.driver = match mode {
            Mode::Reactor => Driver::Ring,
            Mode::Fallback | Mode::Blocking => Driver::Fallback,
        };
        let switch = stop.clone();
        let thread = std::thread::spawn(move || match mode {
            Mode::Reactor | Mode::Fallback => nbd::serve_uring(listener, options, &switch, devices),
            Mode::Blocking => {
                Exports::fixed(&options, devices)?.serve_blocking(listener, options, &switch)
            }
        });
        Server {
            socket,
            uri,
            stop,
            log,
            thread: Some(thread),
        }
    }

    pub fn uri_of(&self, export: &str) -> String {
        self.uri.replace(":///", &format!(":///{export}"))
    }

    /// Waits for the end.
    pub fn join(mut self) -> Result<Outcome, ServeError> {
        self.thread
            .take()
            .expect("joined once")
            .join()
            .expect("the server does not panic")
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Stops and expects a clean end.
    pub fn finish(self) {
        self.stop.drain();
        assert_eq!(self.join(), Ok(Outcome::Drained));
    }

    /// Waits for a line in the log.
    pub fn wait_for_log(&self, text: &str) {
        let found = || {
            self.log
                .lock()
                .unwrap()
                .iter()
                .any(|line| line.contains(text))
        };
        eventually(text, found);
    }
}
