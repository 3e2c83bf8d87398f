//! Requests allocate nothing once a connection is warm.

#![cfg(feature = "nbd")]

mod harness;

use std::io::{Read, Write};

use gaur_export::device::Null;
use harness::counting::{Counting, allocations};
use harness::*;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DEPTH: usize = 32;
const BLOCK: usize = 4096;

/// Rounds of pipelined reads, writes and everything else; returns allocations of the whole process.
fn rounds(client: &mut Client, requests: &[u8], replies: &mut [u8], count: u64) -> u64 {
    let before = allocations();
    for _ in 0..count {
        client.stream.write_all(requests).unwrap();
        client.stream.read_exact(replies).unwrap();
    }
    allocations() - before
}

/// Requests of every kind, and how long their replies are with simple replies.
fn simple_requests() -> (Vec<u8>, usize) {
    let mut requests = Vec::new();
    for cookie in 0..DEPTH as u64 {
        requests.extend(request(0, READ, cookie, cookie << 20, BLOCK as u32));
        requests.extend(request(FUA, WRITE, cookie, cookie << 20, BLOCK as u32));
        requests.extend([7; BLOCK]);
        requests.extend(request(0, FLUSH, cookie, 0, 0));
        requests.extend(request(0, WRITE_ZEROES, cookie, cookie << 20, 1 << 20));
        requests.extend(request(0, TRIM, cookie, cookie << 20, 1 << 20));
        // One that is refused, and one large.
        requests.extend(request(0, READ, cookie, 1 << 40, 1));
    }
    requests.extend(request(0, READ, 99, 0, 1 << 20));
    (requests, DEPTH * (6 * 16 + BLOCK) + 16 + (1 << 20))
}

/// Reads of data and of a hole, and block status, with structured replies.
fn structured_requests() -> (Vec<u8>, usize) {
    let mut requests = Vec::new();
    for cookie in 0..DEPTH as u64 {
        requests.extend(request(0, READ, cookie, cookie << 20, BLOCK as u32));
        requests.extend(request(0, READ, cookie, cookie << 20, 1 << 20));
        requests.extend(request(0, BLOCK_STATUS, cookie, 0, 1 << 31));
    }
    (requests, DEPTH * (28 + BLOCK + 32 + 32))
}

#[test]
fn requests_allocate_nothing_after_warm_up() {
    let mut options = options();
    options.threads = 1;
    let server = Server::start(Mode::Reactor, options, Null::new(1 << 40));
    let simple = (Client::simple(&server.socket, ""), simple_requests());
    let structured = (
        Client::structured(&server.socket, ""),
        structured_requests(),
    );
    for (mut client, (requests, reply_bytes)) in [simple, structured] {
        let mut replies = vec![0; reply_bytes];
        rounds(&mut client, &requests, &mut replies, 200);
        let allocated = rounds(&mut client, &requests, &mut replies, 500);
        assert_eq!(allocated, 0, "in 500 rounds");
    }
    server.finish();
}
