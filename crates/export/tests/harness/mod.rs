//! A server in a thread of the test, and a client that speaks the protocol by hand.

#![allow(dead_code, reason = "every test uses another part of it")]

pub mod gate;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use gaur_block::Device;
use gaur_export::nbd::{self, Export, Listen, Listener, Options, Outcome, Place, ServeError, Stop};

/// How a server runs its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Reactor,
    Blocking,
}

pub const MODES: [Mode; 2] = [Mode::Reactor, Mode::Blocking];

/// A running server.
pub struct Server {
    pub socket: PathBuf,
    pub uri: String,
    pub stop: Stop,
    pub log: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<Result<Outcome, ServeError>>>,
}

/// A socket path that nobody else uses.
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
        let switch = stop.clone();
        let thread = std::thread::spawn(move || match mode {
            Mode::Reactor => nbd::serve_uring(listener, options, &switch, devices),
            Mode::Blocking => nbd::serve_blocking(listener, options, &switch, devices),
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

/// Waits until something holds, ten seconds at most.
pub fn eventually(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..1000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("never happened: {what}");
}

/// Runs a program that must be there and must succeed; returns what it printed.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout")
        .arg("120")
        .arg(program)
        .args(arguments)
        .output()
        .expect("timeout (coreutils) is installed");
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;
pub const FUA: u16 = 1;

/// A client that speaks the protocol by hand.
pub struct Client {
    pub stream: UnixStream,
}

/// A chunk of a structured reply.
#[derive(Debug, PartialEq, Eq)]
pub struct Chunk {
    pub done: bool,
    pub kind: u16,
    pub cookie: u64,
    pub content: Vec<u8>,
}

impl Client {
    /// Connects and reads nothing yet.
    pub fn connect(socket: &Path) -> Client {
        let stream = UnixStream::connect(socket).expect("connect");
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .expect("timeout");
        Client { stream }
    }

    /// Connects and chooses an export, with simple replies.
    pub fn simple(socket: &Path, export: &str) -> Client {
        let mut client = Client::connect(socket);
        client.greet();
        client.go(export);
        client
    }

    /// Connects and chooses an export, with structured replies and `base:allocation`.
    pub fn structured(socket: &Path, export: &str) -> Client {
        let mut client = Client::connect(socket);
        client.greet();
        client.option(8, b"");
        assert_eq!(client.option_replies(), [1]);
        let name = [&(export.len() as u32).to_be_bytes(), export.as_bytes()].concat();
        client.option(
            10,
            &[&name, &b"\0\0\0\x01\0\0\0\x0fbase:allocation"[..]].concat(),
        );
        assert_eq!(client.option_replies(), [4, 1]);
        client.go(export);
        client
    }

    pub fn greet(&mut self) {
        assert_eq!(self.read(18), b"NBDMAGICIHAVEOPT\0\x03");
        self.send(&[0, 0, 0, 3]);
    }

    pub fn go(&mut self, export: &str) {
        let name = [
            &(export.len() as u32).to_be_bytes(),
            export.as_bytes(),
            b"\0\0",
        ]
        .concat();
        self.option(7, &name);
        assert_eq!(
            self.option_replies().last(),
            Some(&1),
            "the export is there"
        );
    }

    pub fn option(&mut self, option: u32, data: &[u8]) {
        let len = (data.len() as u32).to_be_bytes();
        self.send(&[b"IHAVEOPT", &option.to_be_bytes()[..], &len, data].concat());
    }

    /// Types of the replies up to an acknowledgement or an error.
    pub fn option_replies(&mut self) -> Vec<u32> {
        let mut types = Vec::new();
        loop {
            let header = self.read(20);
            let field = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            types.push(field(12));
            self.read(field(16) as usize);
            if field(12) == 1 || field(12) & 0x8000_0000 != 0 {
                return types;
            }
        }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("send");
    }

    pub fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("receive");
        bytes
    }

    /// Whether the server has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 1]), Ok(0) | Err(_))
    }

    pub fn request(&mut self, flags: u16, kind: u16, cookie: u64, offset: u64, len: u32) {
        self.send(&request(flags, kind, cookie, offset, len));
    }

    /// Error and cookie of a simple reply.
    pub fn reply(&mut self) -> (u32, u64) {
        let bytes = self.read(16);
        assert_eq!(bytes[..4], [0x67, 0x44, 0x66, 0x98], "a simple reply");
        let error = u32::from_be_bytes(bytes[4..8].try_into().unwrap());
        (error, u64::from_be_bytes(bytes[8..].try_into().unwrap()))
    }

    pub fn chunk(&mut self) -> Chunk {
        let bytes = self.read(20);
        assert_eq!(bytes[..4], [0x66, 0x8e, 0x33, 0xef], "a chunk");
        let len = u32::from_be_bytes(bytes[16..].try_into().unwrap());
        Chunk {
            done: bytes[5] & 1 != 0,
            kind: u16::from_be_bytes(bytes[6..8].try_into().unwrap()),
            cookie: u64::from_be_bytes(bytes[8..16].try_into().unwrap()),
            content: self.read(len as usize),
        }
    }

    /// Reads with simple replies; the error or the data.
    pub fn read_at(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        self.request(0, READ, 77, offset, len);
        match self.reply() {
            (0, 77) => Ok(self.read(len as usize)),
            (error, _) => Err(error),
        }
    }

    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> Result<(), u32> {
        let mut bytes = request(0, WRITE, 78, offset, data.len() as u32).to_vec();
        bytes.extend(data);
        self.send(&bytes);
        match self.reply() {
            (0, 78) => Ok(()),
            (error, _) => Err(error),
        }
    }
}

pub fn request(flags: u16, kind: u16, cookie: u64, offset: u64, len: u32) -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[..4].copy_from_slice(&[0x25, 0x60, 0x95, 0x13]);
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// Bytes that tell where they belong.
pub fn pattern(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64)
        .map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8)
        .collect()
}
