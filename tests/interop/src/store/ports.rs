//! Free TCP ports, and small questions to servers behind them.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::random::Random;

/// Ports that Linux gives to no outgoing connection: a server that is restarted finds its own free. The upper part of
/// them, to 32,000, is for second ports of a server, 10,000 above the first.
const RANGE: std::ops::Range<u16> = 20_000..22_000;
/// Longest time for an answer to a small question.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest answer to one.
const ANSWER_BYTES: u64 = 1 << 20;

/// An address of this machine that no other reaches.
pub(super) fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// Listens at a free port.
pub(super) fn listen() -> TcpListener {
    let [listener] = listen_at(&[0]);
    listener
}

/// Listens at ports that have these distances from a first one.
fn listen_at<const COUNT: usize>(distances: &[u16; COUNT]) -> [TcpListener; COUNT] {
    let mut random = Random::new(RandomState::new().build_hasher().finish());
    for _ in 0..1000 {
        let offset = u16::try_from(random.below(RANGE.len() as u64)).expect("it is small");
        let first = RANGE.start + offset;
        let listeners =
            distances.map(|distance| TcpListener::bind(loopback(first + distance)).ok());
        if listeners.iter().all(Option::is_some) {
            return listeners.map(|listener| listener.expect("all are there"));
        }
    }
    panic!("no ports of {RANGE:?} are free");
}

/// Numbers of ports that are free now, all different, with those at these distances. Another process may take one
/// before the server does: then the server does not start, and other ports are to be tried.
pub(super) fn free<const COUNT: usize, const EACH: usize>(distances: &[u16; EACH]) -> [u16; COUNT] {
    // All are held until the last is found.
    let listeners = [(); COUNT].map(|()| listen_at(distances));
    listeners.map(|listeners| {
        let first = listeners[0].local_addr();
        first.expect("it listens").port()
    })
}

/// Whether a server listens.
pub(super) fn listens(port: u16) -> bool {
    TcpStream::connect_timeout(&loopback(port), PATIENCE).is_ok()
}

/// What an HTTP server says at a path, status line and headers included; nothing when there is no answer.
pub(super) fn ask(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&loopback(port), PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES).read_to_end(&mut answer).ok()?;
    String::from_utf8(answer).ok()
}

/// Whether an HTTP server answers 200 at a path.
pub(super) fn answers(port: u16, path: &str) -> bool {
    ask(port, path).is_some_and(|answer| {
        let status = answer.split(' ').nth(1);
        status == Some("200")
    })
}
