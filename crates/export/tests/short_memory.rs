//! Requests for which there is no memory beyond a connection's own: they are served in pieces.
//!
//! A hundred clients that sent most of a 32 MiB write and no more held 3.2 GB of a server for any
//! number of clients. What all of them hold is bounded now, and clients who come when it is used up
//! must notice nothing but time.

#![cfg(feature = "nbd")]

mod harness;

use std::sync::atomic::Ordering;

use gaur_block::Errno;
use gaur_export::device::Memory;
use gaur_export::nbd::{Options, Outcome};
use harness::gate::{Gate, Gated};
use harness::*;

const MIB: u64 = 1 << 20;
/// More than a connection has of its own, and no multiple of it.
const LONG: usize = 1_000_001;
const DF: u16 = 4;

fn without_memory() -> Options {
    let mut options = options();
    options.memory_bytes = 0;
    options
}

/// A server without memory to spare, over a device with a gate.
fn gated(mode: Mode) -> (Server, std::sync::Arc<Gate>) {
    let device = Gated::new(64 * MIB);
    let gate = device.gate.clone();
    (Server::start(mode, without_memory(), device), gate)
}

#[test]
fn long_requests_are_served() {
    for mode in MODES {
        let (server, gate) = gated(mode);
        let mut client = Client::simple(&server.socket, "");
        let data = pattern(3, 32 << 20);
        assert_eq!(client.write_at(3, &data), Ok(()));
        assert_eq!(client.read_at(3, 32 << 20), Ok(data));
        assert!(gate.longest.load(Ordering::Acquire) <= 256 << 10);
        let data = pattern(5, LONG);
        client.request(FUA, WRITE, 1, 5, LONG as u32);
        client.send(&data);
        assert_eq!(client.reply(), (0, 1));
        assert_eq!(gate.flushes.load(Ordering::Acquire), 1);
        client.request(0, CACHE, 2, 0, 5 << 20);
        assert_eq!(client.reply(), (0, 2));
        server.finish();
    }
}

#[test]
fn structured_replies_come_in_chunks_unless_one_is_asked_for() {
    for mode in MODES {
        let server = Server::start(mode, without_memory(), Memory::new(8 * MIB));
        let mut client = Client::structured(&server.socket, "");
        let data = pattern(0, LONG);
        assert_eq!(client.write_at(0, &data), Ok(()));
        client.request(DF, READ, 2, 0, LONG as u32);
        let chunk = client.chunk();
        assert_eq!((chunk.done, chunk.kind, chunk.cookie), (true, 1, 2));
        assert_eq!(chunk.content[8..], data);
        client.request(0, READ, 3, 0, LONG as u32);
        let mut got = Vec::new();
        loop {
            let chunk = client.chunk();
            assert_eq!((chunk.kind, chunk.cookie), (1, 3));
            assert_eq!(chunk.content[..8], (got.len() as u64).to_be_bytes());
            got.extend_from_slice(&chunk.content[8..]);
            if chunk.done {
                break;
            }
        }
        assert!(got == data);
        client.request(0, BLOCK_STATUS, 4, 0, 8 << 20);
        assert_eq!(client.chunk().cookie, 4);
        server.finish();
    }
}

#[test]
fn many_requests_at_once_are_all_answered() {
    for mode in MODES {
        let server = Server::start(mode, without_memory(), Memory::new(64 * MIB));
        let mut client = Client::simple(&server.socket, "");
        let mut sender = Client {
            stream: client.stream.try_clone().unwrap(),
        };
        let lengths = || (0..60_u64).map(|number| (number * MIB, 1 + number as usize * 15_000));
        let writer = std::thread::spawn(move || {
            for (offset, len) in lengths() {
                sender.request(0, WRITE, offset, offset, len as u32);
                sender.send(&pattern(offset, len));
            }
        });
        let mut answered: Vec<u64> = (0..60).map(|_| client.reply().1).collect();
        writer.join().unwrap();
        answered.sort_unstable();
        assert!(answered.into_iter().eq(lengths().map(|(offset, _)| offset)));
        for (offset, len) in lengths() {
            assert_eq!(client.read_at(offset, len as u32), Ok(pattern(offset, len)));
        }
        server.finish();
    }
}

#[test]
fn errors_reach_the_client_and_the_connection_goes_on() {
    for mode in MODES {
        let (server, gate) = gated(mode);
        let mut client = Client::simple(&server.socket, "");
        let mut structured = Client::structured(&server.socket, "");
        gate.fail(Errno::EIO);
        assert_eq!(client.write_at(0, &vec![1; LONG]), Err(5));
        assert_eq!(client.read_at(0, LONG as u32), Err(5));
        structured.request(0, READ, 9, 0, LONG as u32);
        let chunk = structured.chunk();
        assert_eq!((chunk.done, chunk.kind, chunk.cookie), (true, 0x8001, 9));
        server.stop.drain();
        assert!(server.join().is_err(), "the last flush fails");
    }
}

#[test]
fn a_device_that_panics_costs_one_connection() {
    let device = Gated::new(8 * MIB);
    device.gate.panic_at(0);
    let server = Server::start(Mode::Reactor, without_memory(), device);
    let mut other = Client::simple(&server.socket, "");
    let mut client = Client::simple(&server.socket, "");
    client.request(0, READ, 1, 0, LONG as u32);
    assert!(client.is_closed());
    assert_eq!(other.read_at(512, 512), Ok(vec![0; 512]));
    server.finish();
}

#[test]
fn a_drain_finishes_the_request_under_way() {
    for mode in [Mode::Reactor, Mode::Fallback] {
        let (server, gate) = gated(mode);
        let mut client = Client::simple(&server.socket, "");
        gate.close();
        client.request(0, WRITE, 1, 0, LONG as u32);
        let mut sender = client.stream.try_clone().unwrap();
        let sent = std::thread::spawn(move || {
            std::io::Write::write_all(&mut sender, &pattern(0, LONG)).expect("send");
        });
        eventually("the write begins", || {
            gate.begun.load(Ordering::Acquire) > 0
        });
        server.stop.drain();
        gate.open();
        assert_eq!(client.reply(), (0, 1));
        sent.join().expect("all is sent");
        assert_eq!(server.join(), Ok(Outcome::Drained));
    }
}

/// Other clients hold all there is and never go on; a new client is served all the same, and gets memory
/// again when they are gone.
#[test]
fn stalled_clients_do_not_block_others() {
    for mode in MODES {
        let mut options = options();
        options.memory_bytes = 64 << 20;
        let server = Server::start(mode, options, Memory::new(64 * MIB));
        let mut stalled = Vec::new();
        for _ in 0..6 {
            let mut client = Client::simple(&server.socket, "");
            client.request(0, WRITE, 1, 0, 32 << 20);
            client.send(&[1; LONG]);
            stalled.push(client);
            let mut client = Client::simple(&server.socket, "");
            // Fewer than the socket holds, so that sending does not wait for replies.
            for cookie in 0..8 {
                client.request(0, READ, cookie, 0, 8 << 20);
            }
            stalled.push(client);
        }
        let mut client = Client::simple(&server.socket, "");
        let data = pattern(0, 32 << 20);
        assert_eq!(client.write_at(32 * MIB, &data), Ok(()));
        assert_eq!(client.read_at(32 * MIB, 32 << 20), Ok(data));
        drop(stalled);
        server.finish();
    }
}
