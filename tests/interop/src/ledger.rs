//! A load that keeps book: threads write to a block device past the kernel's cache and remember what
//! was acknowledged and what was flushed, so that afterwards every block can be judged.
//!
//! Each thread has a region of its own, in blocks of 4 KiB; writes are of 1 to 16 blocks. Every
//! sector of 512 bytes carries the number of the write and its place, so that old data, data of
//! another place and torn blocks are distinguished.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crate::random::Random;

const BLOCK: usize = 4096;
const SECTOR: usize = 512;
const BLOCKS_MAX: u64 = 16;
/// Past the cache, so that what is acknowledged was acknowledged by the device.
const O_DIRECT: i32 = 0o40000;
/// How a stamped sector starts.
const MARK: u64 = 0x6c65_6467_6572_2121;

/// What a device has to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Everything that was acknowledged: the device goes on as if nothing had happened.
    Acknowledged,
    /// What one server has acknowledged and then flushed; of every sector written since, any version.
    Flushed,
}

/// The book of one thread.
#[derive(Debug)]
struct Region {
    first_block: u64,
    random: Random,
    /// Of every block the writes that may be seen, the newest last.
    seen: Vec<Vec<Write>>,
    next: u64,
}

/// A write that was acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Write {
    /// 0 stands for what was there before the first write.
    number: u64,
    /// Which server it was sent to.
    server: u64,
}

/// What the threads of a load share.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    server: AtomicU64,
}

/// A load on a device, running or not.
#[derive(Debug)]
pub struct Ledger {
    device: String,
    regions: Vec<Region>,
    shared: Arc<Shared>,
    running: Vec<JoinHandle<Region>>,
}

impl Ledger {
    /// A book of the first `len_bytes` of a device, with that many threads.
    pub fn new(device: &str, len_bytes: u64, threads: u64, seed: u64) -> Ledger {
        let blocks = len_bytes / BLOCK as u64 / threads;
        let region = |number| Region {
            first_block: number * blocks,
            random: Random::new(seed * threads + number),
            seen: vec![vec![Write::default()]; blocks as usize],
            next: 1,
        };
        Ledger {
            device: device.to_owned(),
            regions: (0..threads).map(region).collect(),
            shared: Arc::default(),
            running: Vec::new(),
        }
    }

    /// Lets the threads go on.
    pub fn start(&mut self) {
        self.shared.stop.store(false, Ordering::Relaxed);
        for mut region in self.regions.drain(..) {
            let file = open(&self.device);
            let shared = Arc::clone(&self.shared);
            self.running.push(std::thread::spawn(move || {
                while !shared.stop.load(Ordering::Relaxed) {
                    region.step(&file, &shared.server);
                }
                region
            }));
        }
    }

    /// Lets the threads finish the requests they are at.
    #[track_caller]
    pub fn pause(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.running.drain(..) {
            let region = thread.join().expect("no request fails");
            self.regions.push(region);
        }
    }

    /// The server has died or is about to: what it has not flushed another one's flush does not cover.
    /// To be called before and after.
    pub fn server_dies(&self) {
        self.shared.server.fetch_add(1, Ordering::SeqCst);
    }

    /// Writes acknowledged so far.
    pub fn writes(&self) -> u64 {
        self.regions.iter().map(|region| region.next - 1).sum()
    }

    /// Judges every block, and takes what is there as what has to be there from now on.
    #[track_caller]
    pub fn verify(&mut self, promise: Expected) {
        let device = self.device.clone();
        self.verify_at(&device, promise);
    }

    /// The same on a device that shows the same image now.
    #[track_caller]
    pub fn verify_at(&mut self, device: &str, promise: Expected) {
        let file = open(device);
        file.sync_data().expect("no flush fails");
        for region in &mut self.regions {
            let mut blocks = 0;
            while blocks < region.seen.len() {
                blocks += region.judge(&file, blocks, promise);
            }
        }
    }
}

impl Region {
    /// One write, now and then a flush.
    fn step(&mut self, file: &File, server: &AtomicU64) {
        let blocks = self.seen.len() as u64;
        let len = (1 + self.random.below(BLOCKS_MAX)).min(blocks);
        let at = self.random.below(blocks - len + 1);
        let number = self.next;
        self.next += 1;
        let mut memory = Aligned::new(len as usize * BLOCK);
        for (index, sector) in memory.bytes().chunks_exact_mut(SECTOR).enumerate() {
            let place = (self.first_block + at) * (BLOCK / SECTOR) as u64 + index as u64;
            stamp(sector, number, place);
        }
        let offset = (self.first_block + at) * BLOCK as u64;
        let now = || server.load(Ordering::SeqCst);
        let server = now();
        file.write_all_at(memory.bytes(), offset)
            .expect("no write fails");
        for seen in &mut self.seen[at as usize..(at + len) as usize] {
            seen.push(Write { number, server });
        }
        if self.random.one_in(32) {
            let server = now();
            file.sync_data().expect("no flush fails");
            if now() == server {
                self.settle(server);
            }
        }
    }

    /// A server has flushed: what it acknowledged last is what has to be seen.
    fn settle(&mut self, server: u64) {
        for seen in &mut self.seen {
            if seen.last().is_some_and(|write| write.server == server) {
                seen.drain(..seen.len() - 1);
            }
        }
    }

    /// Judges some blocks from the region's block `at` on; returns how many.
    #[track_caller]
    fn judge(&mut self, file: &File, at: usize, promise: Expected) -> usize {
        let count = (self.seen.len() - at).min(256);
        let mut memory = Aligned::new(count * BLOCK);
        let first = self.first_block + at as u64;
        file.read_exact_at(memory.bytes(), first * BLOCK as u64)
            .expect("no read fails");
        for (index, block) in memory.bytes().chunks_exact(BLOCK).enumerate() {
            let seen = &mut self.seen[at + index];
            let oldest = match promise {
                Expected::Acknowledged => seen.len() - 1,
                Expected::Flushed => 0,
            };
            let allowed: Vec<u64> = seen[oldest..].iter().map(|write| write.number).collect();
            let found = judge_block(block, first + index as u64, &allowed);
            seen.retain(|write| found.contains(&write.number));
        }
        count
    }
}

/// The numbers that a block's sectors carry; all of them are allowed ones.
#[track_caller]
fn judge_block(block: &[u8], index: u64, allowed: &[u64]) -> Vec<u64> {
    let mut found = Vec::new();
    for (sector, bytes) in block.chunks_exact(SECTOR).enumerate() {
        let place = index * (BLOCK / SECTOR) as u64 + sector as u64;
        let number = stamped(bytes, place).unwrap_or(0);
        assert!(
            allowed.contains(&number),
            "sector {place} (byte {}) holds write {number}, allowed are {allowed:?}; it starts {:02x?}",
            place * SECTOR as u64,
            &bytes[..24]
        );
        found.push(number);
    }
    found
}

fn stamp(sector: &mut [u8], number: u64, place: u64) {
    let mut noise = Random::new(number ^ place << 32);
    for (index, word) in sector.chunks_exact_mut(8).enumerate() {
        let value = match index {
            0 => MARK,
            1 => number,
            2 => place,
            _ => noise.number(),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// The number of the write that left a sector as it is, if it is one of this place.
fn stamped(sector: &[u8], place: u64) -> Option<u64> {
    let number = u64::from_le_bytes(sector[8..16].try_into().expect("eight bytes"));
    let mut whole = [0; SECTOR];
    stamp(&mut whole, number, place);
    (whole[..] == *sector).then_some(number)
}

#[track_caller]
fn open(device: &str) -> File {
    File::options()
        .read(true)
        .write(true)
        .custom_flags(O_DIRECT)
        .open(device)
        .expect("the device opens")
}

/// Memory that starts where a transfer past the cache may start.
#[derive(Debug)]
struct Aligned {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn new(len: usize) -> Aligned {
        let memory = vec![0; len + BLOCK];
        let start = memory.as_ptr().align_offset(BLOCK);
        Aligned { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misplaced_or_torn_sector_is_rejected() {
        let mut sector = [0; SECTOR];
        stamp(&mut sector, 7, 9);
        assert_eq!(stamped(&sector, 9), Some(7));
        assert_eq!(stamped(&sector, 8), None);
        sector[400] ^= 1;
        assert_eq!(stamped(&sector, 9), None);
    }

    #[test]
    #[should_panic(expected = "holds write 1, allowed are [2]")]
    fn an_old_write_is_noticed() {
        let mut block = [0; BLOCK];
        for (index, sector) in block.chunks_exact_mut(SECTOR).enumerate() {
            stamp(sector, if index == 3 { 1 } else { 2 }, index as u64);
        }
        judge_block(&block, 0, &[2]);
    }
}
