//! Loads an NBD server with random requests and counts answers; made to cost less than any server.
//!
//! `nbd_load SOCKET read|write BLOCK_BYTES DEPTH CONNECTIONS SECONDS [EXPORT]`
//!
//! One thread per connection keeps DEPTH requests in flight; replies are simple ones. Prints
//! requests per second over all connections.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const REQUEST_BYTES: usize = 28;
const REPLY_BYTES: usize = 16;

#[derive(Clone, Debug)]
struct Load {
    socket: String,
    write: bool,
    block_bytes: usize,
    depth: usize,
    duration: Duration,
    export: String,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [
        socket,
        operation,
        block,
        depth,
        connections,
        seconds,
        rest @ ..,
    ] = &arguments[..]
    else {
        return Err(
            "usage: nbd_load SOCKET read|write BLOCK DEPTH CONNECTIONS SECONDS [EXPORT]".into(),
        );
    };
    let load = Load {
        socket: socket.clone(),
        write: match operation.as_str() {
            "read" => false,
            "write" => true,
            other => return Err(format!("unknown operation {other:?}").into()),
        },
        block_bytes: block.parse()?,
        depth: depth.parse()?,
        duration: Duration::from_secs_f64(seconds.parse()?),
        export: rest.first().cloned().unwrap_or_default(),
    };
    let threads: Vec<_> = (0..connections.parse::<u64>()?)
        .map(|number| {
            let load = load.clone();
            std::thread::spawn(move || run(&load, number))
        })
        .collect();
    let mut total = 0.0;
    for thread in threads {
        total += thread.join().map_err(|_| "a connection panicked")??;
    }
    println!("{total:.0}");
    Ok(())
}

/// Requests per second of one connection.
fn run(load: &Load, number: u64) -> io::Result<f64> {
    let mut stream = UnixStream::connect(&load.socket)?;
    let size_bytes = handshake(&mut stream, &load.export)?;
    let blocks = size_bytes / load.block_bytes as u64;
    let mut seed = 0x9e37_79b9_7f4a_7c15 ^ (number + 1);
    let payload = if load.write { load.block_bytes } else { 0 };
    let one = REQUEST_BYTES + payload;
    let mut requests = vec![0x5a; load.depth * one];
    let reply = REPLY_BYTES + load.block_bytes - payload;
    let mut replies = vec![0; (load.depth * reply).max(64 << 10)];
    let begin = Instant::now();
    let (mut answered, mut rest, mut to_send) = (0_u64, 0, load.depth);
    while begin.elapsed() < load.duration {
        for request in requests[..to_send * one].chunks_exact_mut(one) {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            let offset = (seed % blocks) * load.block_bytes as u64;
            request[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
            request[4..8].copy_from_slice(&u32::from(load.write).to_be_bytes());
            request[16..24].copy_from_slice(&offset.to_be_bytes());
            request[24..28].copy_from_slice(&(load.block_bytes as u32).to_be_bytes());
        }
        stream.write_all(&requests[..to_send * one])?;
        let received = stream.read(&mut replies[rest..])?;
        if received == 0 {
            return Err(io::Error::other("the server closed the connection"));
        }
        let arrived = rest + received;
        to_send = arrived / reply;
        for reply in replies[..arrived].chunks_exact(reply) {
            if reply[..8] != [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0] {
                return Err(io::Error::other(format!("bad reply {:x?}", &reply[..16])));
            }
        }
        rest = arrived % reply;
        replies.copy_within(arrived - rest..arrived, 0);
        answered += to_send as u64;
    }
    Ok(answered as f64 / begin.elapsed().as_secs_f64())
}

/// Chooses the export; returns its size.
fn handshake(stream: &mut UnixStream, export: &str) -> io::Result<u64> {
    stream.read_exact(&mut [0; 18])?;
    stream.write_all(&[0, 0, 0, 3])?;
    stream.write_all(b"IHAVEOPT\0\0\0\x01")?;
    stream.write_all(&(export.len() as u32).to_be_bytes())?;
    stream.write_all(export.as_bytes())?;
    let mut answer = [0; 10];
    stream.read_exact(&mut answer)?;
    let [size @ .., _, _] = answer;
    Ok(u64::from_be_bytes(size))
}
