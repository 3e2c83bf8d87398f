//! Who is let in and when it is over: limits, the end of a server, its sockets, and what it refuses
//! to start with.

#![cfg(feature = "nbd")]

mod harness;

use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gaur_export::device::{Memory, Null};
use gaur_export::nbd::{Export, Listen, Listener, Options, Outcome, Place};
use harness::gate::Gated;
use harness::*;

const MIB: u64 = 1 << 20;

#[test]
fn a_client_that_never_chooses_is_hung_up_on() {
    for mode in MODES {
        let mut options = options();
        options.handshake_timeout = Duration::from_millis(200);
        let server = Server::start(mode, options, Memory::new(MIB));
        let mut chosen = Client::simple(&server.socket, "");
        let mut idle = Client::connect(&server.socket);
        idle.greet();
        let begin = Instant::now();
        assert!(idle.is_closed());
        assert!(begin.elapsed() < Duration::from_secs(5));
        assert_eq!(
            chosen.read_at(0, 1),
            Ok(vec![0]),
            "the limit is for the handshake alone"
        );
        server.finish();

        let mut options = crate::options();
        options.handshake_timeout = Duration::ZERO;
        let server = Server::start(mode, options, Memory::new(MIB));
        let mut idle = Client::connect(&server.socket);
        idle.greet();
        std::thread::sleep(Duration::from_millis(100));
        idle.go("");
        assert_eq!(idle.read_at(0, 1), Ok(vec![0]), "zero is no limit");
        server.finish();
    }
}

#[test]
fn clients_beyond_the_limit_wait_for_their_turn() {
    for mode in MODES {
        let mut options = options();
        options.shared = 2;
        let server = Server::start(mode, options, Memory::new(MIB));
        let first = Client::simple(&server.socket, "");
        let _second = Client::simple(&server.socket, "");
        let mut third = Client::connect(&server.socket);
        third
            .stream
            .set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let mut byte = [0];
        let waits = std::io::Read::read(&mut third.stream, &mut byte);
        assert!(waits.is_err(), "not greeted while two are there");
        drop(first);
        third
            .stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        third.greet();
        third.go("");
        assert_eq!(third.read_at(0, 1), Ok(vec![0]));
        server.finish();
    }
}

#[test]
fn a_server_that_is_not_persistent_ends_with_its_last_client() {
    for mode in MODES {
        let device = Gated::new(MIB);
        let gate = device.gate.clone();
        let mut options = Options::new(vec![Export::new("")]);
        options.shared = 2;
        let server = Server::start(mode, options, device);
        // A client that only looks does not end it.
        let mut looker = Client::connect(&server.socket);
        looker.greet();
        looker.option(2, b"");
        assert_eq!(looker.option_replies(), [1]);
        assert!(looker.is_closed());
        let mut first = Client::simple(&server.socket, "");
        let second = Client::simple(&server.socket, "");
        drop(second);
        assert_eq!(first.write_at(0, b"x"), Ok(()));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!server.has_ended(), "one client is still there");
        first.request(0, DISC, 0, 0, 0);
        drop(first);
        let socket = server.socket.clone();
        assert_eq!(server.join(), Ok(Outcome::LastClientLeft));
        assert!(
            gate.flushes.load(Ordering::Acquire) > 0,
            "flushed before the end"
        );
        assert!(!socket.exists(), "the socket file is gone");
    }
}

#[test]
fn a_drain_finishes_what_is_under_way_and_refuses_the_rest() {
    let device = Gated::new(MIB);
    let gate = device.gate.clone();
    let server = Server::start(Mode::Reactor, options(), device);
    let mut client = Client::structured(&server.socket, "");
    let mut idle = Client::simple(&server.socket, "");
    gate.close();
    client.request(0, WRITE, 1, 0, 4096);
    client.send(&[9; 4096]);
    eventually("the write has begun", || {
        gate.begun.load(Ordering::Acquire) == 1
    });
    server.stop.drain();
    assert!(idle.is_closed(), "a connection at rest is closed");
    eventually("nobody is let in", || {
        std::os::unix::net::UnixStream::connect(&server.socket).is_err()
    });
    client.request(0, WRITE, 2, 0, 100_000);
    client.send(&[1; 100_000]);
    client.request(0, READ, 3, 0, 512);
    for cookie in [2, 3] {
        let chunk = client.chunk();
        assert_eq!((chunk.kind, chunk.cookie), (0x8001, cookie));
        assert_eq!(chunk.content[..4], 108_u32.to_be_bytes());
    }
    assert!(!server.has_ended());
    gate.open();
    assert_eq!(client.reply(), (0, 1), "what was under way is finished");
    assert!(client.is_closed());
    assert_eq!(server.join(), Ok(Outcome::Drained));
    assert!(gate.flushes.load(Ordering::Acquire) > 0);
}

#[test]
fn a_second_stop_is_immediate() {
    for mode in MODES {
        let device = Gated::new(MIB);
        let gate = device.gate.clone();
        let server = Server::start(mode, options(), device);
        let mut client = Client::simple(&server.socket, "");
        gate.close();
        client.request(0, READ, 1, 0, 512);
        eventually("the read has begun", || {
            gate.begun.load(Ordering::Acquire) == 1
        });
        server.stop.drain();
        std::thread::sleep(Duration::from_millis(100));
        assert!(!server.has_ended(), "a drain waits");
        server.stop.drain();
        assert_eq!(server.join(), Ok(Outcome::Forced));
        assert!(client.is_closed());
        gate.open();
    }
}

#[test]
fn a_drain_does_not_wait_for_ever_for_a_client_that_takes_no_replies() {
    for mode in MODES {
        let mut options = options();
        options.drain_timeout = Duration::from_millis(300);
        let device = Gated::new(64 * MIB);
        let gate = device.gate.clone();
        let server = Server::start(mode, options, device);
        let mut client = Client::simple(&server.socket, "");
        client.request(0, READ, 1, 0, 32 << 20);
        eventually("the read has begun", || {
            gate.begun.load(Ordering::Acquire) > 0
        });
        server.finish();
        drop(client);
    }
}

#[test]
fn a_dead_socket_file_is_replaced_and_a_live_one_is_not() {
    let path = socket_path();
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "a dead socket file");
    let listener = Listener::bind(&Listen::Unix(path.clone())).unwrap();
    let refused = || {
        let refused = Listener::bind(&Listen::Unix(path.clone()));
        let error = refused.err().expect("the path is taken").to_string();
        error.replace(&path.display().to_string(), "PATH")
    };
    assert_eq!(
        refused(),
        "cannot listen on unix socket PATH: another program is listening there"
    );
    drop(listener);
    assert!(!path.exists());
    std::fs::write(&path, b"precious").unwrap();
    assert_eq!(
        refused(),
        "cannot listen on unix socket PATH: a file that is no socket is in the way"
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn tcp_serves_too() {
    let listener = Listener::bind(&Listen::Tcp {
        bind: "127.0.0.1".to_owned(),
        port: 0,
    })
    .unwrap();
    let port = listener.port().unwrap();
    assert_eq!(listener.uri("a b"), format!("nbd://127.0.0.1:{port}/a%20b"));
    let stop = gaur_export::nbd::Stop::new();
    let switch = stop.clone();
    let server = std::thread::spawn(move || {
        gaur_export::nbd::serve_uring(listener, options(), &switch, |_| Ok(Null::new(MIB)))
    });
    let bind = "127.0.0.1".to_owned();
    let taken = Listener::bind(&Listen::Tcp { bind, port })
        .err()
        .map(|error| error.to_string());
    let expected =
        format!("cannot listen on 127.0.0.1:{port}: Address already in use by another program");
    assert_eq!(taken, Some(expected));
    let size = run("nbdinfo", &["--size", &format!("nbd://127.0.0.1:{port}/")]);
    assert_eq!(size.trim(), MIB.to_string());
    stop.drain();
    assert_eq!(server.join().unwrap(), Ok(Outcome::Drained));
}

#[test]
fn a_device_that_cannot_be_made_is_an_error_in_words() {
    let refuse = |_| Err::<Null, _>("disk.qcow2 is gone".to_owned());
    let server = Server::start_with(Mode::Reactor, options(), refuse);
    assert_eq!(server.join().unwrap_err().to_string(), "disk.qcow2 is gone");
    // In blocking mode devices are made when a client asks; it is told, and others may try again.
    let server = Server::start_with(Mode::Blocking, options(), refuse);
    let mut client = Client::connect(&server.socket);
    client.greet();
    client.option(7, b"\0\0\0\0\0\0");
    assert_eq!(client.option_replies(), [0x8000_0006]);
    server.finish();
}

#[test]
fn a_device_maker_that_panics_ends_the_server_with_an_error() {
    let server = Server::start_with::<Null, _>(Mode::Reactor, options(), |place| match place {
        Place { thread: 0, .. } => Ok(Null::new(MIB)),
        _ => panic!("as the test wants"),
    });
    let error = server.join().unwrap_err().to_string();
    assert_eq!(error, "a serving thread failed while it opened the exports");
}

/// The child of the next test: a process that was handed a socket.
#[test]
#[ignore = "run by a_socket_can_be_handed_over"]
fn child_that_inherits_a_socket() {
    let listener = Listener::bind(&Listen::Inherited).unwrap();
    assert!(
        Listener::bind(&Listen::Inherited).is_err(),
        "it is taken once"
    );
    let options = Options::new(vec![Export::new("")]);
    let stop = gaur_export::nbd::Stop::new();
    let outcome = gaur_export::nbd::serve_uring(listener, options, &stop, |_| Ok(Null::new(MIB)));
    assert_eq!(outcome, Ok(Outcome::LastClientLeft));
}

#[test]
fn a_socket_can_be_handed_over() {
    let path = socket_path();
    let socket: std::os::fd::OwnedFd = UnixListener::bind(&path).unwrap().into();
    let mut child = std::process::Command::new("sh")
        .arg("-c")
        .arg(
            "exec 3<&0; export LISTEN_PID=$$ LISTEN_FDS=1; \
             exec \"$0\" --ignored --exact child_that_inherits_a_socket",
        )
        .arg(std::env::current_exe().unwrap())
        .stdin(std::process::Stdio::from(socket))
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut client = Client::simple(&path, "");
    assert_eq!(client.read_at(0, 512), Ok(vec![0; 512]));
    drop(client);
    assert!(child.wait().unwrap().success());
    std::fs::remove_file(&path).expect("a socket that was handed over is not removed");
    assert!(
        Listener::bind(&Listen::Inherited).is_err(),
        "nothing was handed to this process"
    );
}

#[test]
fn invalid_options_are_refused() {
    let refused = |change: fn(&mut Options)| {
        let mut options = options();
        change(&mut options);
        let server = Server::start(Mode::Reactor, options, Null::new(MIB));
        server.join().unwrap_err().to_string()
    };
    assert_eq!(
        refused(|options| options.exports.clear()),
        "there is nothing to export"
    );
    assert_eq!(
        refused(|options| options.exports.push(Export::new(""))),
        "two exports are called \"\""
    );
    assert!(refused(|options| options.exports[0].name = "x".repeat(4097)).contains("4096"));
    assert!(refused(|options| options.depth = 0).contains("depth"));
    assert!(refused(|options| options.connection_memory_bytes = 1).contains("32 MiB"));
    assert!(refused(|options| options.default_export = Some(7)).contains("default export"));
}

/// A write that was answered is there, also when the server was stopped meanwhile.
#[test]
fn a_drain_under_load_loses_nothing_that_was_acknowledged() {
    for mode in MODES {
        for round in 0..5 {
            let memory = Memory::new(64 * MIB);
            let server = Server::start(mode, options(), memory.clone());
            let mut client = Client::simple(&server.socket, "");
            let mut sender = Client {
                stream: client.stream.try_clone().unwrap(),
            };
            let writer = std::thread::spawn(move || {
                for cookie in 0..10_000_u64 {
                    let mut bytes = request(0, WRITE, cookie, cookie * 6000, 6000).to_vec();
                    bytes.extend([cookie as u8 | 1; 6000]);
                    if std::io::Write::write_all(&mut sender.stream, &bytes).is_err() {
                        break;
                    }
                }
            });
            let stop = server.stop.clone();
            let mut done = Vec::new();
            let mut reply = [0; 16];
            while std::io::Read::read_exact(&mut client.stream, &mut reply).is_ok() {
                let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
                let cookie = u64::from_be_bytes(reply[8..].try_into().unwrap());
                match error {
                    0 => done.push(cookie),
                    error => assert_eq!(error, 108, "the only error is the shutdown"),
                }
                if done.len() == 100 + 300 * round {
                    stop.drain();
                }
            }
            assert_eq!(server.join(), Ok(Outcome::Drained));
            writer.join().unwrap();
            assert!(done.len() >= 100 + 300 * round);
            assert!(done.len() < 10_000, "it was stopped on the way");
            let server = Server::start(Mode::Blocking, options(), memory);
            let mut client = Client::simple(&server.socket, "");
            for cookie in done {
                let expected = vec![cookie as u8 | 1; 6000];
                assert_eq!(
                    client.read_at(cookie * 6000, 6000),
                    Ok(expected),
                    "write {cookie}"
                );
            }
            server.finish();
        }
    }
}

#[test]
fn a_drain_is_not_kept_by_a_client_that_never_stops_asking() {
    for mode in MODES {
        let server = Server::start(mode, options(), Null::new(MIB));
        let mut client = Client::simple(&server.socket, "");
        let mut sender = Client {
            stream: client.stream.try_clone().unwrap(),
        };
        let flood = std::thread::spawn(move || {
            let requests = request(0, READ, 1, 0, 512).repeat(64);
            while std::io::Write::write_all(&mut sender.stream, &requests).is_ok() {}
        });
        let stop = server.stop.clone();
        let begin = Instant::now();
        let mut some = vec![0; 65536];
        let mut asked = false;
        while matches!(std::io::Read::read(&mut client.stream, &mut some), Ok(1..)) {
            if !asked && begin.elapsed() > Duration::from_millis(200) {
                stop.drain();
                asked = true;
            }
        }
        assert_eq!(server.join(), Ok(Outcome::Drained));
        assert!(
            begin.elapsed() < Duration::from_secs(10),
            "long before the drain times out"
        );
        flood.join().unwrap();
    }
}
