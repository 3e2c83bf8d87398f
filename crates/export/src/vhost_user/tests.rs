//! Clients that keep to the protocol, and clients that do not.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::message::{feature, protocol, request};
use super::{Options, start};
use crate::device::Memory;
use crate::front::Front;

static SOCKETS: AtomicU32 = AtomicU32::new(0);

struct Running {
    server: Option<Box<crate::Server>>,
    socket: PathBuf,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Running {
    fn start() -> Running {
        let number = SOCKETS.fetch_add(1, Ordering::Relaxed);
        let name = format!("gaur-vhost-user-{}-{number}", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let lines = Arc::new(Mutex::new(Vec::new()));
        let mut options = Options::new(&socket);
        options.queues = 2;
        let log = lines.clone();
        options.log = Some(Arc::new(move |line: &str| {
            log.lock().expect("no panic").push(line.to_owned());
        }));
        let server = start(options, |_| Ok(Memory::new(1 << 20)));
        Running {
            server: Some(Box::new(server.expect("the socket is free"))),
            socket,
            lines,
        }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).expect("the server listens");
        let limit = Some(Duration::from_secs(10));
        stream.set_read_timeout(limit).expect("a time limit");
        stream
    }

    #[track_caller]
    fn expect_line(&self, part: &str) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let lines = self.lines.lock().expect("no panic").clone();
            if lines.iter().any(|line| line.contains(part)) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "no line about {part:?} in {lines:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The next client finds everything in order.
    #[track_caller]
    fn serves(&self) {
        let mut client = self.connect();
        let features = ask(&mut client, request::GET_FEATURES, &[]);
        assert_ne!(number(&features) & feature::PROTOCOL, 0);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let server = self.server.take().expect("it is there until now");
        server.stop();
        let ended = server.finish();
        if !std::thread::panicking() {
            assert_eq!(ended, Ok(()));
            assert!(!self.socket.exists(), "the socket goes with the server");
        }
    }
}

fn bytes(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [request, flags, payload.len() as u32] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.extend_from_slice(payload);
    bytes
}

fn tell(client: &mut UnixStream, request: u32, payload: &[u8]) {
    let message = bytes(request, 1, payload);
    client.write_all(&message).expect("the server reads");
}

#[track_caller]
fn ask(client: &mut UnixStream, request: u32, payload: &[u8]) -> Vec<u8> {
    tell(client, request, payload);
    let mut head = [0; 12];
    client.read_exact(&mut head).expect("an answer");
    assert_eq!(head[..4], request.to_ne_bytes());
    assert_eq!(head[4], 5, "a reply of version 1");
    let mut content = vec![0; usize::from(head[8])];
    client.read_exact(&mut content).expect("an answer");
    content
}

fn number(content: &[u8]) -> u64 {
    u64::from_ne_bytes(content.try_into().expect("8 bytes"))
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

#[test]
fn the_configuration_says_what_the_disk_is_like() {
    let running = Running::start();
    let mut client = running.connect();
    let offered = number(&ask(&mut client, request::GET_PROTOCOL_FEATURES, &[]));
    assert_eq!(offered, protocol::ALL);
    tell(
        &mut client,
        request::SET_PROTOCOL_FEATURES,
        &offered.to_ne_bytes(),
    );
    assert_eq!(number(&ask(&mut client, request::GET_QUEUE_NUM, &[])), 2);
    let mut question = words(&[0, 96, 0]);
    question.extend_from_slice(&[0; 96]);
    let config = ask(&mut client, request::GET_CONFIG, &question);
    assert_eq!(config.len(), 12 + 96);
    let config = &config[12..];
    assert_eq!(config[..8], 2048_u64.to_le_bytes(), "sectors");
    assert_eq!(config[20..24], 512_u32.to_le_bytes(), "block size");
    assert_eq!(config[32], 1, "the write cache is on");
    assert_eq!(config[34..36], 2_u16.to_le_bytes(), "queues");
    assert!(config[60..].iter().all(|byte| *byte == 0));
    // The write cache is switched off.
    let mut change = words(&[32, 1, 0]);
    change.push(0);
    tell(&mut client, request::SET_CONFIG, &change);
    let config = ask(&mut client, request::GET_CONFIG, &question);
    assert_eq!(config[12 + 32], 0);
}

#[test]
fn an_acknowledgement_comes_when_it_was_agreed_on() {
    let running = Running::start();
    let mut client = running.connect();
    let need_reply = 9;
    // Nothing is agreed on yet, so nothing comes; the next answer is the next request's.
    client
        .write_all(&bytes(request::SET_OWNER, need_reply, &[]))
        .expect("the server reads");
    ask(&mut client, request::GET_FEATURES, &[]);
    let agreed = protocol::REPLY_ACK.to_ne_bytes();
    tell(&mut client, request::SET_PROTOCOL_FEATURES, &agreed);
    for (ring, answer) in [(1_u32, 0_u64), (2, 1)] {
        let message = bytes(request::SET_VRING_NUM, need_reply, &words(&[ring, 8]));
        client.write_all(&message).expect("the server reads");
        let mut reply = [0; 20];
        client.read_exact(&mut reply).expect("an answer");
        assert_eq!(number(&reply[12..]), answer, "ring {ring} of 2");
    }
    running.expect_line("the client is hung up on: ring 2 of 2");
}

/// Messages that no client should send, and what is said of them.
fn violations() -> Vec<(Vec<u8>, &'static str)> {
    vec![
        (
            bytes(request::GET_FEATURES, 2, &[]),
            "a message of version 2",
        ),
        (bytes(request::GET_FEATURES, 5, &[]), "a reply to request 1"),
        (words(&[5, 1, u32::MAX]), "a message of 4294967295 bytes"),
        (bytes(99, 1, &[]), "request 99 is not known"),
        (
            bytes(request::SET_FEATURES, 1, &[0; 7]),
            "too short for its request",
        ),
        (
            bytes(request::SET_FEATURES, 1, &[0xff; 8]),
            "were not offered",
        ),
        (
            bytes(request::SET_PROTOCOL_FEATURES, 1, &[0xff; 8]),
            "were not offered",
        ),
        (
            bytes(request::SET_VRING_NUM, 1, &words(&[7, 8])),
            "ring 7 of 2",
        ),
        (
            bytes(request::SET_VRING_BASE, 1, &words(&[0, 65_536])),
            "ring base 65536",
        ),
        (
            bytes(request::SET_VRING_KICK, 1, &[0; 8]),
            "a message with 0 descriptors",
        ),
        (
            bytes(request::SET_VRING_KICK, 1, &256_u64.to_ne_bytes()),
            "is to be polled",
        ),
        (
            bytes(request::SET_MEM_TABLE, 1, &words(&[9, 0])),
            "a memory table of 9 regions",
        ),
        (
            bytes(request::SET_MEM_TABLE, 1, &words(&[1, 0])),
            "1 regions and 0 files",
        ),
        (
            bytes(request::GET_CONFIG, 1, &words(&[0, 257, 0])),
            "beyond any configuration",
        ),
        (
            bytes(request::GET_CONFIG, 1, &words(&[u32::MAX, 1, 0])),
            "beyond any",
        ),
        (
            bytes(request::SET_INFLIGHT_FD, 1, &[0xff; 20]),
            "a log of requests in flight",
        ),
        (
            bytes(request::SET_LOG_BASE, 1, &[0; 16]),
            "a message with 0 descriptors",
        ),
        (
            bytes(request::SET_BACKEND_REQ_FD, 1, &[]),
            "a message with 0 descriptors",
        ),
    ]
}

#[test]
fn clients_that_break_the_protocol_are_hung_up_on() {
    for (message, reason) in violations() {
        let running = Running::start();
        let mut client = running.connect();
        client.write_all(&message).expect("the server reads");
        running.expect_line("the client is hung up on: ");
        running.expect_line(reason);
        let mut rest = Vec::new();
        let end = client.read_to_end(&mut rest);
        assert!(
            end.is_err() || rest.is_empty(),
            "nothing is said to such a client"
        );
        running.serves();
    }
}

#[test]
fn client_that_leaves_in_the_middle_leaves_the_server_running() {
    let running = Running::start();
    let message = bytes(request::SET_FEATURES, 1, &[0; 8]);
    for len in 0..message.len() {
        let mut client = running.connect();
        client.write_all(&message[..len]).expect("the server reads");
    }
    running.expect_line("the client left in the middle of a message");
    running.serves();
}

#[test]
fn a_ring_without_memory_cannot_start() {
    let running = Running::start();
    let mut client = running.connect();
    // Without the protocol feature rings are enabled from the start.
    tell(&mut client, request::SET_FEATURES, &0_u64.to_ne_bytes());
    tell(&mut client, request::SET_VRING_NUM, &words(&[0, 8]));
    let mut address = words(&[0, 0]);
    address.extend_from_slice(&[0; 32]);
    tell(&mut client, request::SET_VRING_ADDR, &address);
    // Nothing runs, so it stops where it was set.
    tell(&mut client, request::SET_VRING_BASE, &words(&[0, 17]));
    let base = ask(&mut client, request::GET_VRING_BASE, &words(&[0, 0]));
    assert_eq!(base, words(&[0, 17]));
}

#[test]
fn a_server_stops_with_a_client_connected_and_without() {
    let running = Running::start();
    let mut client = running.connect();
    ask(&mut client, request::GET_FEATURES, &[]);
    drop(running);
    assert_eq!(client.read(&mut [0; 1]).expect("an end"), 0);
    drop(Running::start());
}

#[test]
fn client_that_cannot_be_told_of_a_new_size_is_named() {
    let running = Running::start();
    let server = running.server.as_ref().expect("it runs");
    assert_eq!(server.resized(), Ok(()), "nobody is there");
    let mut client = running.connect();
    ask(&mut client, request::GET_FEATURES, &[]);
    let error = server.resized().expect_err("there is no channel for that");
    assert!(error.to_string().contains("takes no messages"), "{error}");
}

/// A client that took no replies kept the server from taking another, and from its end.
#[test]
fn a_client_that_never_reads_is_hung_up_on() {
    let running = Running::start();
    let mut client = running.connect();
    let limit = Some(Duration::from_millis(500));
    client.set_write_timeout(limit).expect("a time limit");
    let message = bytes(request::GET_FEATURES, 1, &[]);
    // Until both directions are full.
    while client.write_all(&message).is_ok() {}
    running.expect_line("cannot reply: timed out");
    running.serves();
}
