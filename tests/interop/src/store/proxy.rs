//! A way to a store that is long, narrow or broken: a TCP proxy with latency, loss and a rate.
//!
//! Each direction of a connection has a thread that reads pieces and one that writes them when they are due, with a
//! bounded queue between: pieces are under way at the same time, as on a real line. The rate is that of the line,
//! which all connections share.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::acceptor::Acceptor;
use super::ports::loopback;
use crate::random::Random;

/// Bytes that are read at once, and between two chances of a loss.
const PIECE_BYTES: usize = 1 << 16;
/// Pieces that are under way in a direction of a connection: 8 MiB.
const PIECES: usize = 128;
/// How late a piece is that was lost and sent again: what TCP waits at least.
const SENT_AGAIN_AFTER: Duration = Duration::from_millis(200);
/// Between two looks at whether a connection was reset, for who writes to it.
const WRITE_PAUSE: Duration = Duration::from_millis(50);

/// What a line is like. Chances are "once in this many pieces of 64 KiB", each connection beginning with one; 0
/// is never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Time from one end to the other. The first bytes of a connection take three times as long: TCP's handshake,
    /// which is with the proxy, comes before.
    pub delay: Duration,
    /// Most that is added to it at random. What was sent later does not come earlier.
    pub jitter: Duration,
    /// Bytes a second in each direction, for all connections together; 0 is no limit.
    pub bytes_per_second: u64,
    /// Chance of a piece to be lost and sent again: it, and what follows it, comes 200 ms later.
    pub late_one_in: u64,
    /// Chance of a connection to be reset.
    pub reset_one_in: u64,
    /// What chances are drawn from; those of a connection depend on its number alone.
    pub seed: u64,
}

impl Link {
    /// A line of 20 ms each way with a little jitter: a store in another town.
    pub const FAR: Link = Link {
        delay: Duration::from_millis(20),
        jitter: Duration::from_millis(2),
        bytes_per_second: 0,
        late_one_in: 0,
        reset_one_in: 0,
        seed: 1,
    };
}

/// How many bytes went through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// From clients to the store.
    pub sent: u64,
    /// From the store to clients.
    pub received: u64,
}

/// The proxy.
#[derive(Debug)]
pub struct Proxy {
    line: Arc<Line>,
    acceptor: Acceptor,
}

impl Proxy {
    /// Starts one in front of a port of this machine.
    pub fn start(to: u16, link: Link) -> Proxy {
        let line = Arc::new(Line::new(link));
        let shared = Arc::clone(&line);
        let acceptor = Acceptor::start(move |client, number, _| {
            shared.connections_made.fetch_add(1, Ordering::Relaxed);
            if let Ok(server) = TcpStream::connect(loopback(to)) {
                shared.carry(client, server, number);
            } else {
                reset(client);
            }
        });
        Proxy { line, acceptor }
    }

    /// The port where clients connect.
    pub fn port(&self) -> u16 {
        self.acceptor.port()
    }

    /// What clients take as endpoint of an S3 store behind the proxy.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port())
    }

    /// Changes what the line is like, from the next piece on; chances of connections that are there stay drawn from
    /// the old seed.
    pub fn set(&self, link: Link) {
        self.line.lock().link = link;
    }

    /// Cuts the line: connections are reset, and new ones refused.
    pub fn refuse(&self) {
        self.line.lock().refuses = true;
        self.acceptor.close();
        self.reset_connections();
    }

    /// Nothing comes through any more: connections stay, and new ones are accepted.
    pub fn hang(&self) {
        self.line.lock().hangs = true;
    }

    /// Ends [`Proxy::refuse`] and [`Proxy::hang`]. What was under way in connections that hung goes on.
    pub fn restore(&self) {
        let mut state = self.line.lock();
        state.hangs = false;
        state.refuses = false;
        drop(state);
        self.line.changed.notify_all();
        self.acceptor.open();
    }

    /// Resets all connections that are there.
    pub fn reset_connections(&self) {
        let connections = std::mem::take(&mut self.line.lock().connections);
        for connection in connections {
            connection.reset(&self.line);
        }
    }

    /// How many connections there have been.
    pub fn connections(&self) -> u64 {
        self.line.connections_made.load(Ordering::Relaxed)
    }

    /// How many of them the proxy has reset.
    pub fn resets(&self) -> u64 {
        self.line.resets.load(Ordering::Relaxed)
    }

    /// How many bytes have come out of the line.
    pub fn bytes(&self) -> Bytes {
        let [sent, received] = [0, 1].map(|way| self.line.bytes[way].load(Ordering::Relaxed));
        Bytes { sent, received }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.refuse();
    }
}

/// What the connections share.
#[derive(Debug)]
struct Line {
    state: Mutex<State>,
    changed: Condvar,
    connections_made: AtomicU64,
    resets: AtomicU64,
    // To the store, and from it.
    bytes: [AtomicU64; 2],
}

#[derive(Debug)]
struct State {
    link: Link,
    hangs: bool,
    /// Also for a connection that was accepted a moment before.
    refuses: bool,
    /// When the last byte of either direction has left for the other end.
    busy_until: [Instant; 2],
    connections: Vec<Arc<Connection>>,
}

/// The two sockets of a connection. They are closed when its last thread ends.
#[derive(Debug)]
struct Connection {
    client: Arc<TcpStream>,
    server: TcpStream,
    was_reset: AtomicBool,
}

/// A piece, and when it is due; none is the end of the stream.
type Piece = (Instant, Option<Vec<u8>>);

impl Line {
    fn new(link: Link) -> Line {
        Line {
            state: Mutex::new(State {
                link,
                hangs: false,
                refuses: false,
                busy_until: [Instant::now(); 2],
                connections: Vec::new(),
            }),
            changed: Condvar::new(),
            connections_made: AtomicU64::new(0),
            resets: AtomicU64::new(0),
            bytes: [AtomicU64::new(0), AtomicU64::new(0)],
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with the lock")
    }

    /// Carries a connection, until both directions have ended.
    fn carry(self: &Arc<Line>, client: &Arc<TcpStream>, server: TcpStream, number: u64) {
        server.set_nodelay(true).expect("TCP has it");
        for socket in [&**client, &server] {
            let limited = socket.set_write_timeout(Some(WRITE_PAUSE));
            limited.expect("the time is not 0");
        }
        let connection = Arc::new(Connection {
            client: Arc::clone(client),
            server,
            was_reset: AtomicBool::new(false),
        });
        let mut state = self.lock();
        state.connections.push(Arc::clone(&connection));
        let refuses = state.refuses;
        drop(state);
        if refuses {
            connection.reset(self);
        }
        std::thread::scope(|scope| {
            for way in [0, 1] {
                let (sender, receiver) = sync_channel(PIECES);
                let connection = &*connection;
                scope.spawn(move || self.read(connection, way, number, &sender));
                scope.spawn(move || self.write(connection, way, &receiver));
            }
        });
        let mut state = self.lock();
        let others = |other: &Arc<Connection>| !Arc::ptr_eq(other, &connection);
        state.connections.retain(others);
    }

    fn read(&self, connection: &Connection, way: usize, number: u64, pieces: &SyncSender<Piece>) {
        let [from, _] = connection.sockets(way);
        let seed = self.lock().link.seed;
        let mut losses = Random::new(seed ^ (2 * number + way as u64).wrapping_mul(0x9e37_79b9));
        let mut jitter = losses.clone();
        let (mut due, mut count) = (Instant::now(), 0);
        loop {
            let mut piece = vec![0; PIECE_BYTES];
            let len = (&mut &*from).read(&mut piece).unwrap_or_else(|_| {
                connection.reset(self);
                0
            });
            piece.truncate(len);
            let link = self.lock().link;
            let is_boundary = count == 0 || (count + len) / PIECE_BYTES > count / PIECE_BYTES;
            let [reset, late] = if is_boundary && len > 0 {
                [link.reset_one_in, link.late_one_in].map(|n| hits(&mut losses, n))
            } else {
                [false; 2]
            };
            if reset {
                self.resets.fetch_add(1, Ordering::Relaxed);
                connection.reset(self);
            }
            let mut arrival = self.leave(way, len) + link.delay;
            arrival += link.jitter.mul_f64(jitter.below(1000) as f64 / 1000.0);
            if late {
                arrival += SENT_AGAIN_AFTER;
            }
            if way == 0 && count == 0 {
                arrival += 2 * link.delay;
            }
            due = due.max(arrival);
            count += len;
            let bytes = (len > 0).then_some(piece);
            if pieces.send((due, bytes)).is_err() || len == 0 || connection.is_reset() {
                return;
            }
        }
    }

    /// When that many bytes have left one end of the line.
    fn leave(&self, way: usize, len: usize) -> Instant {
        let mut state = self.lock();
        let now = Instant::now();
        let rate = state.link.bytes_per_second;
        if rate == 0 {
            return now;
        }
        let takes = Duration::from_secs_f64(len as f64 / rate as f64);
        let left = now.max(state.busy_until[way]) + takes;
        state.busy_until[way] = left;
        left
    }

    fn write(&self, connection: &Connection, way: usize, pieces: &Receiver<Piece>) {
        let [_, to] = connection.sockets(way);
        while let Ok((due, bytes)) = pieces.recv() {
            self.wait_until(due, connection);
            if connection.is_reset() {
                return;
            }
            let Some(bytes) = bytes else {
                // The other end may have closed it.
                let _ = to.shutdown(Shutdown::Write);
                return;
            };
            if !connection.write_all(to, &bytes) {
                connection.reset(self);
                return;
            }
            self.bytes[way].fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
    }

    /// Waits until a piece is due and the line does not hang, or the connection is reset.
    fn wait_until(&self, due: Instant, connection: &Connection) {
        let mut state = self.lock();
        while !connection.is_reset() {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() && !state.hangs {
                return;
            }
            state = if left.is_zero() {
                self.changed.wait(state).expect("no thread panics with it")
            } else {
                let waited = self.changed.wait_timeout(state, left);
                waited.expect("no thread panics with it").0
            };
        }
    }
}

impl Connection {
    /// Where a direction comes from and goes to: 0 is to the store.
    fn sockets(&self, way: usize) -> [&TcpStream; 2] {
        let mut sockets = [&*self.client, &self.server];
        if way == 1 {
            sockets.reverse();
        }
        sockets
    }

    fn is_reset(&self) -> bool {
        self.was_reset.load(Ordering::SeqCst)
    }

    /// Makes the threads end; the sockets are then closed with a reset.
    fn reset(&self, line: &Line) {
        self.was_reset.store(true, Ordering::SeqCst);
        for socket in [&*self.client, &self.server] {
            reset(socket);
        }
        // Under the lock, for a thread that has looked and does not wait yet.
        drop(line.lock());
        line.changed.notify_all();
    }

    /// Whether all was written.
    fn write_all(&self, mut to: &TcpStream, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() && !self.is_reset() {
            match to.write(bytes) {
                Ok(len) => bytes = &bytes[len..],
                Err(error) if is_timeout(error.kind()) => {}
                Err(_) => return false,
            }
        }
        bytes.is_empty()
    }
}

/// Makes the close of a socket a reset, and wakes its reader.
fn reset(socket: &TcpStream) {
    // The other end may have closed it.
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
    let _ = socket.shutdown(Shutdown::Read);
}

fn is_timeout(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// Draws a number, whatever `n` is; true once in `n`, never for 0.
fn hits(random: &mut Random, n: u64) -> bool {
    let number = random.number();
    n > 0 && number.is_multiple_of(n)
}
