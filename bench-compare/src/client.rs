//! A lean NBD client: on two cores fio's own work is half of what is measured, so the same load is
//! also made by a loop that does nothing but keep requests in flight.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gaur_bench::Random;

use crate::nbd::Load;

const BLOCK: usize = 4096;
const REQUEST_BYTES: usize = 28;
const REPLY_BYTES: usize = 16;

/// IOPS of all connections together.
pub fn over_nbd(socket: &Path, load: Load, seconds: u64) -> Result<f64> {
    let threads: Vec<_> = (0..load.connections)
        .map(|index| {
            let socket = socket.to_owned();
            std::thread::spawn(move || Connection::open(&socket)?.load(load, seconds, index as u64))
        })
        .collect();
    let mut iops = 0.0;
    for thread in threads {
        iops += thread
            .join()
            .map_err(|_| anyhow::anyhow!("a client thread panicked"))??;
    }
    Ok(iops)
}

/// One write: when it was sent and when its reply came.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub begin: Instant,
    pub end: Instant,
}

/// Writes 4 KiB at random over the disk, `depth` at a time, until `stop` is set.
pub fn timed_writes(
    socket: &Path,
    size_bytes: u64,
    depth: u32,
    stop: &AtomicBool,
) -> Result<Vec<Sample>> {
    Connection::open(socket)?.timed_writes(size_bytes / BLOCK as u64, depth, stop)
}

struct Connection {
    stream: UnixStream,
    received: Vec<u8>,
    filled: usize,
}

impl Connection {
    /// Connects and chooses the default export with NBD_OPT_EXPORT_NAME.
    fn open(socket: &Path) -> Result<Connection> {
        let mut stream = UnixStream::connect(socket).context("cannot connect")?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
            bail!("not an NBD server of the newstyle kind");
        }
        let mut hello = Vec::new();
        // Fixed newstyle, no zeroes.
        hello.extend_from_slice(&3_u32.to_be_bytes());
        hello.extend_from_slice(b"IHAVEOPT");
        hello.extend_from_slice(&1_u32.to_be_bytes());
        hello.extend_from_slice(&0_u32.to_be_bytes());
        stream.write_all(&hello)?;
        let mut export = [0; 10];
        stream.read_exact(&mut export)?;
        Ok(Connection {
            stream,
            received: vec![0; 1 << 20],
            filled: 0,
        })
    }

    fn load(mut self, load: Load, seconds: u64, seed: u64) -> Result<f64> {
        let blocks = load.size_bytes / BLOCK as u64;
        let mut random = Random::new(seed);
        let payload = vec![0xA5; BLOCK];
        let mut sending = Vec::with_capacity((REQUEST_BYTES + BLOCK) * load.depth as usize);
        let reply = if load.write {
            REPLY_BYTES
        } else {
            REPLY_BYTES + BLOCK
        };
        let mut done = 0_u64;
        let mut free = load.depth as usize;
        let start = Instant::now();
        let end = start + Duration::from_secs(seconds);
        loop {
            sending.clear();
            for _ in 0..free {
                let offset = random.below(blocks) * BLOCK as u64;
                request(&mut sending, load.write, offset);
                if load.write {
                    sending.extend_from_slice(&payload);
                }
            }
            self.stream.write_all(&sending)?;
            free = self.receive(reply)?;
            done += free as u64;
            let now = Instant::now();
            if now >= end {
                return Ok(done as f64 / (now - start).as_secs_f64());
            }
        }
    }

    fn timed_writes(mut self, blocks: u64, depth: u32, stop: &AtomicBool) -> Result<Vec<Sample>> {
        let mut random = Random::new(u64::MAX);
        let payload = vec![0xA5; BLOCK];
        let mut sent = vec![Instant::now(); depth as usize];
        let mut free: Vec<u64> = (0..u64::from(depth)).collect();
        let mut samples = Vec::new();
        let mut sending = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            sending.clear();
            for tag in free.drain(..) {
                let at = sending.len();
                request(&mut sending, true, random.below(blocks) * BLOCK as u64);
                sending[at + 8..at + 16].copy_from_slice(&tag.to_be_bytes());
                sending.extend_from_slice(&payload);
                sent[tag as usize] = Instant::now();
            }
            self.stream.write_all(&sending)?;
            let mut reply = [0; REPLY_BYTES];
            self.stream.read_exact(&mut reply)?;
            let tag = succeeded(&reply)?;
            let begin = *sent.get(tag as usize).context("a reply to no request")?;
            let end = Instant::now();
            samples.push(Sample { begin, end });
            free.push(tag);
        }
        Ok(samples)
    }

    /// Waits for at least one whole reply of `len` bytes; how many came.
    fn receive(&mut self, len: usize) -> Result<usize> {
        loop {
            let count = self.stream.read(&mut self.received[self.filled..])?;
            if count == 0 {
                bail!("the server closed the connection");
            }
            self.filled += count;
            let whole = self.filled / len;
            for reply in self.received[..whole * len].chunks_exact(len) {
                succeeded(reply)?;
            }
            if whole > 0 {
                self.received.copy_within(whole * len..self.filled, 0);
                self.filled -= whole * len;
                return Ok(whole);
            }
        }
    }
}

/// The tag in a reply.
fn succeeded(reply: &[u8]) -> Result<u64> {
    match reply.split_first_chunk() {
        Some(([0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], rest)) => {
            Ok(u64::from_be_bytes(rest[..8].try_into()?))
        }
        _ => bail!("a request failed: {:02x?}", &reply[..8]),
    }
}

fn request(out: &mut Vec<u8>, write: bool, offset: u64) {
    out.extend_from_slice(&0x2560_9513_u32.to_be_bytes());
    out.extend_from_slice(&0_u16.to_be_bytes());
    out.extend_from_slice(&u16::from(write).to_be_bytes());
    out.extend_from_slice(&0_u64.to_be_bytes());
    out.extend_from_slice(&offset.to_be_bytes());
    out.extend_from_slice(&(BLOCK as u32).to_be_bytes());
}
