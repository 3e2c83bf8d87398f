//! Exports that come and go while clients use others.

#![cfg(feature = "nbd")]

mod harness;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gaur_block::{Device, Errno};
use gaur_export::device::{Memory, Null};
use gaur_export::nbd::{Export, Exports, Listen, Listener, Outcome, ServeError, Stop};
use gaur_reactor::Driver;
use harness::gate::Gated;
use harness::*;

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// A server whose list of exports the test changes.
struct Changing<D> {
    exports: Exports<D>,
    socket: std::path::PathBuf,
    uri: String,
    stop: Stop,
    thread: JoinHandle<Result<Outcome, ServeError>>,
}

impl<D: Device + 'static> Changing<D>
where
    Exports<D>: Send,
{
    fn start(mode: Mode) -> Changing<D> {
        let socket = socket_path();
        let listener = Listener::bind(&Listen::Unix(socket.clone())).expect("bind");
        let uri = listener.uri("");
        let (exports, stop) = (Exports::<D>::new(), Stop::new());
        let (theirs, switch) = (exports.clone(), stop.clone());
        let mut options = options();
        options.reactor.driver = match mode {
            Mode::Reactor => Driver::Ring,
            Mode::Fallback | Mode::Blocking => Driver::Fallback,
        };
        let thread = std::thread::spawn(move || match mode {
            Mode::Blocking => theirs.serve_blocking(listener, options, &switch),
            _ => theirs.serve_uring(listener, options, &switch),
        });
        Changing {
            exports,
            socket,
            uri,
            stop,
            thread,
        }
    }

    fn finish(self) {
        self.stop.drain();
        let outcome = self.thread.join().expect("the server does not panic");
        assert_eq!(outcome, Ok(Outcome::Drained));
    }
}

fn names(uri: &str) -> Vec<String> {
    let list = run("nbdinfo", &["--list", "--json", uri]);
    let names = list.lines().filter_map(|line| {
        let (_, rest) = line.split_once("\"export-name\": \"")?;
        rest.split('"').next().map(str::to_owned)
    });
    names.collect()
}

#[test]
fn the_list_is_the_current_one() {
    for mode in MODES {
        let server = Changing::<Null>::start(mode);
        assert_eq!(names(&server.uri), [""; 0]);
        for name in ["one", "two", "three"] {
            let added = server
                .exports
                .add(Export::new(name), |_| Ok(Null::new(MIB)));
            assert_eq!(added, Ok(()));
        }
        assert_eq!(names(&server.uri), ["one", "two", "three"]);
        assert_eq!(server.exports.remove("two", PATIENCE), Ok(()));
        assert_eq!(names(&server.uri), ["one", "three"]);
        let again = server
            .exports
            .add(Export::new("two"), |_| Ok(Null::new(2 * MIB)));
        assert_eq!(again, Ok(()));
        assert_eq!(names(&server.uri), ["one", "three", "two"]);
        server.finish();
    }
}

#[test]
fn names_are_there_once_and_have_a_limit() {
    let exports = Exports::<Null>::new();
    let add = |name: &str| exports.add(Export::new(name), |_| Ok(Null::new(MIB)));
    assert_eq!(add("one"), Ok(()));
    let twice = add("one").expect_err("twice").to_string();
    assert_eq!(twice, "two exports are called \"one\"");
    assert!(add(&"x".repeat(4097)).is_err());
    let unknown = exports.remove("two", PATIENCE).expect_err("unknown");
    assert_eq!(unknown.to_string(), "there is no export \"two\"");
    assert_eq!(
        (exports.clients("one"), exports.clients("two")),
        (Some(0), None)
    );
}

#[test]
fn an_export_answers_to_the_empty_name_as_long_as_it_is_there() {
    let server = Changing::<Null>::start(Mode::Fallback);
    let add = |name: &str| {
        server
            .exports
            .add(Export::new(name), |_| Ok(Null::new(MIB)))
    };
    add("one").expect("one");
    let refused = || {
        let mut client = Client::connect(&server.socket);
        client.greet();
        client.option(7, b"\0\0\0\0\0\0");
        client.option_replies() == [0x8000_0006]
    };
    assert!(refused());
    server.exports.set_default("one");
    assert!(!refused());
    add("two").expect("two");
    assert!(!refused(), "further ones change nothing");
    server.exports.remove("one", PATIENCE).expect("removed");
    assert!(refused());
    server.finish();
}

/// A client of the removed export has what is under way answered and is hung up on; clients of others
/// notice nothing.
#[test]
fn a_removed_export_finishes_what_is_under_way() {
    for mode in [Mode::Reactor, Mode::Fallback] {
        let server = Changing::<Gated>::start(mode);
        let (going, staying) = (Gated::new(MIB), Gated::new(MIB));
        let gate = going.gate.clone();
        let device = |gated: &Gated| {
            let gated = gated.clone();
            move |_| Ok(gated.clone())
        };
        server
            .exports
            .add(Export::new("going"), device(&going))
            .expect("added");
        server
            .exports
            .add(Export::new("staying"), device(&staying))
            .expect("added");
        let mut client = Client::simple(&server.socket, "going");
        let mut idle = Client::simple(&server.socket, "going");
        let mut other = Client::simple(&server.socket, "staying");
        eventually("all are counted", || {
            server.exports.clients("going") == Some(2)
        });
        gate.close();
        client.request(0, WRITE, 1, 0, 4096);
        client.send(&[9; 4096]);
        eventually("the write has begun", || {
            gate.begun.load(Ordering::Acquire) == 1
        });
        let exports = server.exports.clone();
        let removed = Arc::new(AtomicBool::new(false));
        let flag = removed.clone();
        let remover = std::thread::spawn(move || {
            let outcome = exports.remove("going", PATIENCE);
            flag.store(true, Ordering::Release);
            outcome
        });
        assert!(idle.is_closed(), "a connection at rest is closed");
        assert_eq!(other.write_at(0, b"still here"), Ok(()));
        client.request(0, READ, 2, 0, 512);
        assert_eq!(client.reply(), (108, 2), "refused, the export is going");
        assert!(
            !removed.load(Ordering::Acquire),
            "somebody still waits for an answer"
        );
        let mut late = Client::connect(&server.socket);
        late.greet();
        late.option(7, b"\0\0\0\x05going\0\0");
        assert_eq!(late.option_replies(), [0x8000_0006], "nobody is let in");
        gate.open();
        assert_eq!(client.reply(), (0, 1), "what was under way is answered");
        assert!(client.is_closed());
        assert_eq!(remover.join().expect("no panic"), Ok(()));
        assert!(gate.flushes.load(Ordering::Acquire) > 0, "it was flushed");
        assert_eq!(other.read_at(0, 10), Ok(b"still here".to_vec()));
        server.finish();
    }
}

#[test]
fn a_client_that_takes_no_replies_is_not_waited_for() {
    let server = Changing::<Memory>::start(Mode::Reactor);
    let memory = Memory::new(64 * MIB);
    let device = move |_| Ok(memory.clone());
    server.exports.add(Export::new("x"), device).expect("added");
    let mut client = Client::simple(&server.socket, "x");
    for cookie in 0..8 {
        client.request(0, READ, cookie, 0, 16 << 20);
    }
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    let removed = server.exports.remove("x", Duration::from_millis(300));
    assert_eq!(removed, Ok(()));
    assert!(start.elapsed() >= Duration::from_millis(300));
    server.finish();
}

/// The devices of a removed export are gone when the removal returns: its image can be closed.
#[test]
fn devices_come_with_clients_and_are_gone_with_the_export() {
    for mode in MODES {
        let server = Changing::<Counted>::start(mode);
        let alive = Arc::new(AtomicUsize::new(0));
        let made = Arc::new(AtomicUsize::new(0));
        let (count, total) = (alive.clone(), made.clone());
        let device = move |_| {
            total.fetch_add(1, Ordering::AcqRel);
            Ok(Counted::new(&count))
        };
        server.exports.add(Export::new("x"), device).expect("added");
        assert_eq!(made.load(Ordering::Acquire), 0, "nobody needs one yet");
        for round in 0..20 {
            let clients: Vec<Client> = (0..3)
                .map(|_| Client::simple(&server.socket, "x"))
                .collect();
            // Their handshake may be over a little before.
            eventually("devices come with clients", || {
                alive.load(Ordering::Acquire) > 0
            });
            if round % 2 == 0 {
                drop(clients);
                eventually("devices go with their clients", || {
                    alive.load(Ordering::Acquire) == 0
                });
            } else {
                assert_eq!(server.exports.remove("x", PATIENCE), Ok(()));
                assert_eq!(alive.load(Ordering::Acquire), 0);
                let count = alive.clone();
                let device = move |_| Ok(Counted::new(&count));
                server.exports.add(Export::new("x"), device).expect("added");
            }
        }
        server.finish();
    }
}

#[test]
fn failed_flush_is_told_to_the_command_that_removes_the_export() {
    let server = Changing::<Gated>::start(Mode::Fallback);
    let device = Gated::new(MIB);
    let gate = device.gate.clone();
    let make = move |_| Ok(device.clone());
    server.exports.add(Export::new("x"), make).expect("added");
    let mut client = Client::simple(&server.socket, "x");
    assert_eq!(client.write_at(0, b"x"), Ok(()));
    gate.fail(Errno::EIO);
    let error = server.exports.remove("x", PATIENCE).expect_err("it failed");
    assert!(
        error.to_string().contains("flush of export \"x\" failed"),
        "{error}"
    );
    // It was told once and is not told again at the end.
    server.finish();
}

/// Clients connect, work and are cut off while exports come and go under them.
#[test]
fn exports_come_and_go_under_load() {
    for mode in MODES {
        let server = Changing::<Memory>::start(mode);
        let over = Arc::new(AtomicBool::new(false));
        let disks: Vec<Memory> = (0..4).map(|_| Memory::new(MIB)).collect();
        let add = |number: usize| {
            let disk = disks[number].clone();
            let name = format!("disk{number}");
            let added = server
                .exports
                .add(Export::new(name), move |_| Ok(disk.clone()));
            added.expect("added");
        };
        (0..4).for_each(add);
        let served = Arc::new(AtomicUsize::new(0));
        let clients: Vec<JoinHandle<()>> = (0..4)
            .map(|number| {
                let (uri, over, served) = (server.uri.clone(), over.clone(), served.clone());
                std::thread::spawn(move || load(&uri, number, &over, &served))
            })
            .collect();
        let deadline = Instant::now() + Duration::from_millis(1500);
        let mut round = 0;
        while Instant::now() < deadline {
            let number = round % 4;
            let removed = server.exports.remove(&format!("disk{number}"), PATIENCE);
            assert_eq!(removed, Ok(()));
            add(number);
            round += 1;
        }
        over.store(true, Ordering::Release);
        for client in clients {
            client.join().expect("a client ends well");
        }
        assert!(served.load(Ordering::Acquire) > 0);
        server.finish();
    }
}

/// Works on an export as long as it lets it.
fn load(uri: &str, number: usize, over: &AtomicBool, served: &AtomicUsize) {
    let socket = uri.split("socket=").nth(1).expect("a path");
    let name = format!("disk{number}");
    let go = [&(name.len() as u32).to_be_bytes(), name.as_bytes(), b"\0\0"].concat();
    while !over.load(Ordering::Acquire) {
        let mut client = Client::connect(std::path::Path::new(socket));
        client.greet();
        client.option(7, &go);
        if client.option_replies().last() != Some(&1) {
            continue;
        }
        while !over.load(Ordering::Acquire) {
            let mut bytes = request(0, WRITE, 5, 0, 4096).to_vec();
            bytes.extend([number as u8; 4096]);
            let sent = std::io::Write::write_all(&mut client.stream, &bytes);
            let mut reply = [0; 16];
            let got = std::io::Read::read_exact(&mut client.stream, &mut reply);
            if sent.is_err() || got.is_err() {
                break;
            }
            let error = u32::from_be_bytes([reply[4], reply[5], reply[6], reply[7]]);
            assert!([0, 108].contains(&error), "served or refused, not {error}");
            served.fetch_add(usize::from(error == 0), Ordering::AcqRel);
        }
    }
}

/// A null device that is counted.
struct Counted {
    inner: Null,
    alive: Arc<AtomicUsize>,
}

impl Counted {
    fn new(alive: &Arc<AtomicUsize>) -> Counted {
        alive.fetch_add(1, Ordering::AcqRel);
        Counted {
            inner: Null::new(MIB),
            alive: Arc::clone(alive),
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Device for Counted {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn limits(&self) -> gaur_block::DeviceLimits {
        self.inner.limits()
    }

    async fn submit(
        &self,
        request: gaur_block::Request,
        payload: gaur_block::Payload<'_>,
    ) -> Result<(), Errno> {
        self.inner.submit(request, payload).await
    }

    async fn status(&self, offset: u64, len: u64) -> Result<gaur_block::Status, Errno> {
        self.inner.status(offset, len).await
    }
}

/// A client that has listed the exports may choose one that came afterwards.
#[test]
fn an_export_that_comes_during_a_handshake_can_be_chosen() {
    let server = Changing::<Null>::start(Mode::Reactor);
    let mut client = Client::connect(&server.socket);
    client.greet();
    client.option(3, b"");
    assert_eq!(client.option_replies(), [1], "there is none");
    let lines = Arc::new(Mutex::new(0));
    let seen = lines.clone();
    let device = move |_| {
        *seen.lock().expect("no panic") += 1;
        Ok(Null::new(MIB))
    };
    server
        .exports
        .add(Export::new("new"), device)
        .expect("added");
    client.option(3, b"");
    assert_eq!(client.option_replies(), [2, 1]);
    client.go("new");
    assert_eq!(client.read_at(0, 512), Ok(vec![0; 512]));
    assert!(*lines.lock().expect("no panic") > 0);
    drop(client);
    server.finish();
}
