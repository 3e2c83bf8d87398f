//! Requests whose memory lies in many pieces, on a device that takes its time.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::ptr::NonNull;
use std::rc::Rc;

use gaur_block::{Device, DeviceLimits, Errno, Payload, Request, Status, Tag};
use gaur_reactor::{Config, Reactor, spawn, yield_now};

use super::random::Random;
use crate::device::Memory;
use crate::virtio::execute::{Terms, read, write};
use crate::virtio::memory::Run;
use crate::virtio::station::Station;

const DISK_BYTES: usize = 4 << 20;
const TERMS: Terms = Terms {
    tag: Tag(0),
    read_only: false,
    write_through: false,
};

/// A disk in memory that lets others go first for a while, and fails in one place.
struct Slow {
    disk: Memory,
    random: RefCell<Random>,
    fails: RefCell<Range<u64>>,
    running: Cell<usize>,
    most_running: Cell<usize>,
}

impl Slow {
    fn new(seed: u64) -> Slow {
        Slow {
            disk: Memory::new(DISK_BYTES as u64),
            random: RefCell::new(Random(seed)),
            fails: RefCell::new(0..0),
            running: Cell::new(0),
            most_running: Cell::new(0),
        }
    }
}

impl Device for Slow {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn limits(&self) -> DeviceLimits {
        self.disk.limits()
    }

    async fn submit(&self, tag: Tag, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        self.running.set(self.running.get() + 1);
        self.most_running
            .set(self.most_running.get().max(self.running.get()));
        let turns = self.random.borrow_mut().below(5);
        for _ in 0..turns {
            yield_now().await;
        }
        self.running.set(self.running.get() - 1);
        let offset = match request {
            Request::Read { offset_bytes } | Request::Write { offset_bytes, .. } => offset_bytes,
            _ => 0,
        };
        if self.fails.borrow().contains(&offset) {
            return Err(Errno::ENOSPC);
        }
        self.disk.submit(tag, request, payload).await
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Status, Errno> {
        self.disk.status(offset_bytes, len_bytes).await
    }
}

/// Memory of a guest, in pieces.
struct Pieces(Vec<Box<[u8]>>);

impl Pieces {
    /// `len` bytes in pieces of up to `longest`.
    fn new(random: &mut Random, len: usize, longest: usize) -> Pieces {
        let mut pieces = Vec::new();
        let mut left = len;
        while left > 0 {
            let piece = left.min(1 + random.below(longest as u64) as usize);
            pieces.push(vec![0; piece].into_boxed_slice());
            left -= piece;
        }
        Pieces(pieces)
    }

    fn fill(&mut self, random: &mut Random) {
        for byte in self.0.iter_mut().flatten() {
            *byte = random.next() as u8;
        }
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.concat()
    }

    fn runs(&mut self) -> Vec<Run> {
        let run = |piece: &mut Box<[u8]>| Run {
            start: NonNull::from(&mut piece[0]),
            len: piece.len(),
        };
        self.0.iter_mut().map(run).collect()
    }
}

fn station(seed: u64, bounce_bytes: usize) -> Station<Slow> {
    Station::new(Slow::new(seed), false, "", bounce_bytes, None)
}

fn on_a_reactor(test: impl Future<Output = ()>) {
    let reactor = Reactor::new(&Config::default()).expect("a reactor can be made");
    reactor.block_on(test);
}

/// Writes and reads pieces of any length anywhere; what is read is what was written.
async fn write_and_read(station: &Station<Slow>, random: &mut Random) {
    let mut expected = vec![0; DISK_BYTES];
    for _ in 0..20 {
        let longest = [512, 5000, 70_000, 300_000][random.below(4) as usize];
        let len = 1 + random.below(1 << 20) as usize;
        let at = random.below((DISK_BYTES - len) as u64) as usize;
        let mut source = Pieces::new(random, len, longest);
        source.fill(random);
        let done = write(station, TERMS, at as u64, &source.runs()).await;
        assert_eq!(done, Ok(()));
        expected[at..at + len].copy_from_slice(&source.bytes());
        let len = 1 + random.below(1 << 20) as usize;
        let at = random.below((DISK_BYTES - len) as u64) as usize;
        let mut target = Pieces::new(random, len, longest);
        let done = read(station, TERMS, at as u64, &target.runs()).await;
        assert_eq!(done, Ok(()));
        assert!(target.bytes() == expected[at..at + len]);
    }
}

#[test]
fn they_come_and_go_in_whatever_order() {
    for (seed, bounce_bytes) in [(1, 0), (2, 300 << 10), (3, 16 << 20)] {
        let station = station(seed, bounce_bytes);
        on_a_reactor(write_and_read(&station, &mut Random(seed + 10)));
        let most = station.device.most_running.get();
        assert_eq!(most, 4, "transfers at once");
    }
}

#[test]
fn a_failure_is_of_its_request_alone() {
    let station = station(4, 300 << 10);
    let mut random = Random(14);
    on_a_reactor(async {
        let mut pieces = Pieces::new(&mut random, 1 << 20, 5000);
        pieces.fill(&mut random);
        for fails in [0..1, 400_000..600_000, (1 << 20) - 150_000..1 << 20] {
            station.device.fails.replace(fails.clone());
            let runs = pieces.runs();
            assert_eq!(write(&station, TERMS, 0, &runs).await, Err(Errno::ENOSPC));
            assert_eq!(read(&station, TERMS, 0, &runs).await, Err(Errno::ENOSPC));
            assert_eq!(station.device.running.get(), 0, "all of it has ended");
        }
        station.device.fails.replace(0..0);
        pieces.fill(&mut random);
        assert_eq!(write(&station, TERMS, 0, &pieces.runs()).await, Ok(()));
        let mut found = Pieces::new(&mut random, 1 << 20, 3000);
        assert_eq!(read(&station, TERMS, 0, &found.runs()).await, Ok(()));
        assert!(found.bytes() == pieces.bytes());
    });
}

/// With room for a single piece, clients take turns: who has just been served does not come before
/// those who wait.
#[test]
fn nobody_is_overtaken() {
    const CLIENTS: usize = 5;
    const REQUESTS: usize = 20;
    let station = Rc::new(station(5, 0));
    let order = Rc::new(RefCell::new(Vec::new()));
    on_a_reactor(async {
        for client in 0..CLIENTS {
            let (station, order) = (station.clone(), order.clone());
            spawn(async move {
                let mut random = Random(client as u64 + 100);
                let mut pieces = Pieces::new(&mut random, 100_000, 5000);
                for _ in 0..REQUESTS {
                    let done = write(&station, TERMS, 0, &pieces.runs()).await;
                    assert_eq!(done, Ok(()));
                    order.borrow_mut().push(client);
                }
            });
        }
        while order.borrow().len() < CLIENTS * REQUESTS {
            yield_now().await;
        }
    });
    // Not all have come when the first begins, and not all are there when the last ends.
    let order = order.borrow();
    for round in order[CLIENTS..order.len() - CLIENTS].windows(CLIENTS) {
        let mut round = round.to_vec();
        round.sort_unstable();
        assert!(round.iter().copied().eq(0..CLIENTS), "{order:?}");
    }
}
