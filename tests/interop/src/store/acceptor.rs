//! A listening socket of the test's own, with a thread for each connection.
//!
//! The listener can be closed, so that connections are refused, and opened again at its port. Dropped, it shuts
//! all connections down and waits for their threads.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::ports::{listen, loopback};

/// Most connections at once; those above it are closed.
const CONNECTIONS: usize = 512;
/// How often a port is asked for that was closed a moment ago.
const BINDS: u32 = 100;
/// Between two of these.
const BIND_PAUSE: Duration = Duration::from_millis(20);

/// What is to happen with connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    Open,
    Refuses,
    Stopped,
}

/// A socket that listens on loopback.
#[derive(Debug)]
pub(super) struct Acceptor {
    port: u16,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// What is wanted, and what is so: a listener is closed and opened by the thread.
    door: Mutex<[Door; 2]>,
    changed: Condvar,
}

/// A wait that ends with the acceptor.
#[derive(Clone, Debug)]
pub(super) struct Sleeper(Arc<Shared>);

/// The thread of a connection, and its socket for as long as the thread has it.
struct Served {
    socket: Weak<TcpStream>,
    thread: JoinHandle<()>,
}

impl Acceptor {
    /// Listens at a free port; `serve` is called with each connection and its number in a thread of its own.
    pub(super) fn start<F>(serve: F) -> Acceptor
    where
        F: Fn(&Arc<TcpStream>, u64, &Sleeper) + Send + Sync + 'static,
    {
        let listener = listen();
        let port = listener.local_addr().expect("it listens").port();
        let shared = Arc::new(Shared {
            door: Mutex::new([Door::Open; 2]),
            changed: Condvar::new(),
        });
        let sleeper = Sleeper(Arc::clone(&shared));
        let thread = std::thread::spawn(move || accept(listener, port, &sleeper, &Arc::new(serve)));
        Acceptor {
            port,
            shared,
            thread: Some(thread),
        }
    }

    /// The port.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Closes the listener: connections are refused. Those that are there stay.
    pub(super) fn close(&self) {
        self.shared.change(self.port, Door::Refuses);
    }

    /// Opens the listener again.
    pub(super) fn open(&self) {
        self.shared.change(self.port, Door::Open);
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.shared.change(self.port, Door::Stopped);
        if let Some(thread) = self.thread.take() {
            // A panic of it has been printed.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, [Door; 2]> {
        self.door.lock().expect("no thread panics with the lock")
    }

    /// Says what is wanted, and waits until it is so.
    fn change(&self, port: u16, wanted: Door) {
        let mut doors = self.lock();
        if doors[0] == Door::Stopped {
            return;
        }
        doors[0] = wanted;
        self.changed.notify_all();
        while doors[1] != wanted && doors[0] == wanted {
            let was_open = doors[1] == Door::Open;
            drop(doors);
            if was_open {
                // The thread waits for a connection.
                let _ = TcpStream::connect(loopback(port));
            }
            let again = self.changed.wait_timeout(self.lock(), BIND_PAUSE);
            doors = again.expect("no thread panics with the lock").0;
        }
    }

    /// Says what is so from now on.
    fn is(&self, door: Door) {
        self.lock()[1] = door;
        self.changed.notify_all();
    }
}

impl Sleeper {
    /// Waits that long; false when the acceptor is dropped meanwhile.
    pub(super) fn sleep(&self, duration: Duration) -> bool {
        let end = Instant::now() + duration;
        let mut doors = self.0.lock();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if doors[0] == Door::Stopped || left.is_zero() {
                return doors[0] != Door::Stopped;
            }
            let changed = self.0.changed.wait_timeout(doors, left);
            doors = changed.expect("no thread panics with the lock").0;
        }
    }

    /// Waits while the listener is closed; false when the acceptor is dropped.
    fn wait_until_open(&self) -> bool {
        let mut doors = self.0.lock();
        while doors[0] == Door::Refuses {
            let changed = self.0.changed.wait(doors);
            doors = changed.expect("no thread panics with the lock");
        }
        doors[0] == Door::Open
    }

    fn wanted(&self) -> Door {
        self.0.lock()[0]
    }
}

/// The thread of the listener.
fn accept<F>(first: TcpListener, port: u16, sleeper: &Sleeper, serve: &Arc<F>)
where
    F: Fn(&Arc<TcpStream>, u64, &Sleeper) + Send + Sync + 'static,
{
    let mut listener = Some(first);
    let mut connections = Vec::new();
    let mut count = 0;
    loop {
        match (sleeper.wanted(), &listener) {
            (Door::Stopped, _) => break,
            (Door::Refuses, _) => {
                listener = None;
                sleeper.0.is(Door::Refuses);
                sleeper.wait_until_open();
            }
            (Door::Open, None) => {
                listener = Some(listen_again(port, sleeper));
                sleeper.0.is(Door::Open);
            }
            (Door::Open, Some(open)) => {
                let accepted = open.accept();
                if sleeper.wanted() != Door::Open {
                    continue;
                }
                let Ok((socket, _)) = accepted else { continue };
                connections.retain(|served: &Served| !served.thread.is_finished());
                if connections.len() < CONNECTIONS {
                    connections.push(serve_in_thread(socket, count, sleeper.clone(), serve));
                    count += 1;
                }
            }
        }
    }
    drop(listener);
    for served in connections {
        if let Some(socket) = served.socket.upgrade() {
            // It may be closed already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        // A panic of it has been printed.
        let _ = served.thread.join();
    }
    sleeper.0.is(Door::Stopped);
}

fn serve_in_thread<F>(socket: TcpStream, number: u64, sleeper: Sleeper, serve: &Arc<F>) -> Served
where
    F: Fn(&Arc<TcpStream>, u64, &Sleeper) + Send + Sync + 'static,
{
    socket.set_nodelay(true).expect("TCP has it");
    let socket = Arc::new(socket);
    let weak = Arc::downgrade(&socket);
    let serve = Arc::clone(serve);
    Served {
        socket: weak,
        thread: std::thread::spawn(move || serve(&socket, number, &sleeper)),
    }
}

fn listen_again(port: u16, sleeper: &Sleeper) -> TcpListener {
    for _ in 0..BINDS {
        if let Ok(listener) = TcpListener::bind(loopback(port)) {
            return listener;
        }
        sleeper.sleep(BIND_PAUSE);
    }
    panic!("port {port} was taken by another process");
}
