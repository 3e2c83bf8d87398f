//! Memory and threads of a server: bounded, and given back when idle.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use gaur_interop::gaur::{binary, gaur};
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;

const MIB: usize = 1 << 20;
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
/// The longest payload of a request.
const PAYLOAD_MAX: usize = 32 * MIB;
/// `--request-memory` by default, what 100 clients have on top, and what two threads keep for the next
/// request.
const MEMORY_MAX: usize = (256 + 100 + 2 * 64) * MIB;
/// How long a server may take to give back what it does not need.
const PATIENCE: Duration = Duration::from_secs(60);

/// A client that speaks NBD by hand, with simple replies.
struct Client(UnixStream);

impl Client {
    fn new(socket: &str, export: &str) -> Client {
        let mut client = Client(UnixStream::connect(socket).expect("the server listens"));
        let limit = Some(Duration::from_secs(60));
        client.0.set_read_timeout(limit).expect("a limit");
        client.0.set_write_timeout(limit).expect("a limit");
        client.read(18);
        let len = (export.len() as u32).to_be_bytes();
        client.send(&[b"\0\0\0\x03IHAVEOPT\0\0\0\x01", &len[..], export.as_bytes()].concat());
        client.read(10);
        client
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the server receives");
    }

    fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).expect("the server answers");
        bytes
    }

    fn ask(&mut self, kind: u16, offset: u64, len: usize) {
        let kind = kind.to_be_bytes();
        let len = (len as u32).to_be_bytes();
        let parts: [&[u8]; 6] = [
            b"\x25\x60\x95\x13\0\0",
            &kind,
            &[1; 8],
            &offset.to_be_bytes(),
            &len,
            b"",
        ];
        self.send(&parts.concat());
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) {
        self.ask(WRITE, offset, bytes.len());
        self.send(bytes);
        assert_eq!(self.read(16)[4..8], [0; 4], "a write succeeds");
    }

    fn read_at(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.ask(READ, offset, len);
        assert_eq!(self.read(16)[4..8], [0; 4], "a read succeeds");
        self.read(len)
    }
}

fn serve(socket: &str, more: &[&str]) -> Server {
    let mut command = Command::new(binary());
    command.args(["serve", "-t", "-e", "0", "--threads", "2", "-k", socket]);
    command.args(more);
    Server::start(command, socket)
}

fn status(server: &Server, field: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id()));
    let status = status.expect("the server runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|line| line.split_whitespace().nth(1).or(Some(line)));
    let number = number.map(|number| number.trim_start_matches(':').trim());
    number.and_then(|number| number.parse().ok()).expect(field)
}

/// Memory that it has, in bytes.
fn memory(server: &Server) -> usize {
    status(server, "VmRSS") << 10
}

#[track_caller]
fn falls(server: &Server, below: usize) {
    let start = Instant::now();
    while memory(server) > below {
        let now = memory(server) / MIB;
        let limit = below / MIB;
        assert!(start.elapsed() < PATIENCE, "{now} MiB, not {limit}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn image(scratch: &Scratch, name: &str) -> String {
    let path = scratch.path(name);
    gaur(&["create", "-q", "-f", "qcow2", &path, "10G"]).ok();
    path
}

/// Slow clients take all the memory there is and stop there. New clients are served all the same, and
/// when the others are gone their memory and threads are as well.
fn others_stall(stall: impl Fn(&mut Client)) {
    let scratch = Scratch::new("memory");
    let (image, socket) = (image(&scratch, "a.qcow2"), scratch.path("s"));
    let server = serve(&socket, &[&image]);
    let (memory_before, threads_before) = (memory(&server), status(&server, "Threads"));
    let stalled: Vec<Client> = (0..100)
        .map(|_| {
            let mut client = Client::new(&socket, "");
            stall(&mut client);
            client
        })
        .collect();
    let grown = memory(&server).saturating_sub(memory_before);
    assert!(grown < MEMORY_MAX, "{} MiB", grown / MIB);
    // What the ring of a thread has for sockets, and for files.
    let threads = status(&server, "Threads").saturating_sub(threads_before);
    assert!(threads <= 24, "{threads} threads");
    let mut client = Client::new(&socket, "");
    for (offset, len) in [(0, 4096), (MIB as u64, MIB), (64 << 20, PAYLOAD_MAX)] {
        let bytes: Vec<u8> = (0..len).map(|at| (at / 1000) as u8).collect();
        client.write_at(offset, &bytes);
        assert!(client.read_at(offset, len) == bytes);
    }
    drop((stalled, client));
    falls(&server, memory_before + 16 * MIB);
    let start = Instant::now();
    while status(&server, "Threads") > threads_before + 4 {
        assert!(start.elapsed() < PATIENCE, "the threads are still there");
        std::thread::sleep(Duration::from_millis(200));
    }
    server.stop();
}

/// A hundred clients that sent all but the last byte of their writes held 3.2 GB and 84 threads.
#[test]
fn clients_that_do_not_finish_a_write_hold_bounded_memory() {
    let payload = vec![7; PAYLOAD_MAX - 1];
    others_stall(|client| {
        client.ask(WRITE, 0, PAYLOAD_MAX);
        client.send(&payload);
    });
}

/// The same with clients that ask and do not take the answers.
#[test]
fn clients_that_take_no_replies_hold_bounded_memory() {
    others_stall(|client| client.ask(READ, 0, PAYLOAD_MAX));
}

/// With 400 exports of which each had four small requests a server grew from 49 to 314 MB, and stayed
/// there when it had nothing to do and when half of the exports were removed.
#[test]
fn exports_that_are_idle_or_gone_give_memory_back() {
    const EXPORTS: usize = 200;
    let scratch = Scratch::new("memory");
    let (first, socket) = (image(&scratch, "0.qcow2"), scratch.path("s"));
    let control = scratch.path("control");
    let path = |number: usize| scratch.path(&format!("{number}.qcow2"));
    for number in 1..EXPORTS {
        std::fs::copy(&first, path(number)).expect("scratch is writable");
    }
    let images: Vec<String> = (0..EXPORTS)
        .map(|number| format!("{number}={}", path(number)))
        .collect();
    let mut arguments = vec!["--control", &control];
    arguments.extend(images.iter().map(String::as_str));
    let server = serve(&socket, &arguments);
    let before = memory(&server);
    let clients: Vec<Client> = (0..EXPORTS)
        .map(|number| {
            let mut client = Client::new(&socket, &number.to_string());
            client.write_at(0, &[1; 4096]);
            client.write_at(1 << 30, &[2; 4096]);
            client.read_at(0, 4096);
            client.ask(FLUSH, 0, 0);
            client.read(16);
            client
        })
        .collect();
    // The clients are there, and their exports' metadata. It was 600 KiB for each.
    falls(&server, before + EXPORTS * 400 * 1024);
    let idle = memory(&server);
    let remove = |numbers: std::ops::Range<usize>| {
        for number in numbers {
            gaur(&[
                "export",
                "remove",
                "--control",
                &control,
                &number.to_string(),
            ])
            .ok();
        }
    };
    remove(0..EXPORTS / 2);
    falls(&server, before + (idle - before) * 2 / 3);
    let bytes = Client::new(&socket, &(EXPORTS - 1).to_string()).read_at(1 << 30, 4096);
    assert_eq!(bytes, [2; 4096]);
    drop(clients);
    remove(EXPORTS / 2..EXPORTS);
    falls(&server, before);
    server.stop();
}
