//! Requests whose memory lies in many pieces, on a device that takes its time.

use std::cell::{Cell, RefCell};
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

use gaur_block::{Device, DeviceLimits, Errno, Payload, Request, Segments, SegmentsMut, Status};
use gaur_reactor::{Config, Reactor, yield_now};

use super::random::Random;
use crate::device::Memory;
use crate::virtio::thread_context::ThreadContext;

const DISK_BYTES: usize = 4 << 20;
const TRANSFER_MAX: usize = 300 << 10;

/// A disk in memory that lets others go first for a while, and fails in one place.
struct Slow {
    disk: Memory,
    random: RefCell<Random>,
    fails: RefCell<Range<u64>>,
    running: Cell<usize>,
}

impl Slow {
    fn new(seed: u64) -> Slow {
        Slow {
            disk: Memory::new(DISK_BYTES as u64),
            random: RefCell::new(Random(seed)),
            fails: RefCell::new(0..0),
            running: Cell::new(0),
        }
    }
}

impl Device for Slow {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            max_transfer: TRANSFER_MAX as u32,
            ..self.disk.limits()
        }
    }

    async fn submit(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        self.running.set(self.running.get() + 1);
        let turns = self.random.borrow_mut().below(5);
        for _ in 0..turns {
            yield_now().await;
        }
        self.running.set(self.running.get() - 1);
        let len = match &payload {
            Payload::Read(target) => target.len(),
            Payload::Write(source) => source.len(),
            Payload::None => 0,
        };
        assert!(len <= TRANSFER_MAX, "a transfer of {len} bytes");
        let offset = match request {
            Request::Read { offset_bytes } | Request::Write { offset_bytes, .. } => offset_bytes,
            _ => 0,
        };
        if self.fails.borrow().contains(&offset) {
            return Err(Errno::ENOSPC);
        }
        self.disk.submit(request, payload).await
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

    fn source(&self) -> Vec<IoSlice<'_>> {
        self.0.iter().map(|piece| IoSlice::new(piece)).collect()
    }

    fn target(&mut self) -> Vec<IoSliceMut<'_>> {
        self.0
            .iter_mut()
            .map(|piece| IoSliceMut::new(piece))
            .collect()
    }
}

async fn write_pieces(
    context: &ThreadContext<Slow>,
    at: usize,
    pieces: &Pieces,
) -> Result<(), Errno> {
    let list = pieces.source();
    let source = Segments::from(&list[..]);
    context.device.write(at as u64, source, false).await
}

async fn read_pieces(
    context: &ThreadContext<Slow>,
    at: usize,
    pieces: &mut Pieces,
) -> Result<(), Errno> {
    let mut list = pieces.target();
    let target = SegmentsMut::from(&mut list[..]);
    context.device.read(at as u64, target).await
}

fn context(seed: u64) -> ThreadContext<Slow> {
    ThreadContext::new(Slow::new(seed), false, None)
}

fn on_a_reactor(test: impl Future<Output = ()>) {
    let reactor = Reactor::new(&Config::default()).expect("a reactor can be made");
    reactor.block_on(test);
}

/// Writes and reads pieces of any length anywhere; what is read is what was written.
async fn write_and_read(context: &ThreadContext<Slow>, random: &mut Random) {
    let mut expected = vec![0; DISK_BYTES];
    for _ in 0..20 {
        let longest = [512, 5000, 70_000, 300_000][random.below(4) as usize];
        let len = 1 + random.below(1 << 20) as usize;
        let at = random.below((DISK_BYTES - len) as u64) as usize;
        let mut source = Pieces::new(random, len, longest);
        source.fill(random);
        let done = write_pieces(context, at, &source).await;
        assert_eq!(done, Ok(()));
        expected[at..at + len].copy_from_slice(&source.bytes());
        let len = 1 + random.below(1 << 20) as usize;
        let at = random.below((DISK_BYTES - len) as u64) as usize;
        let mut target = Pieces::new(random, len, longest);
        let done = read_pieces(context, at, &mut target).await;
        assert_eq!(done, Ok(()));
        assert!(target.bytes() == expected[at..at + len]);
    }
}

#[test]
fn they_come_and_go_in_whatever_order() {
    for seed in 1..4 {
        let context = context(seed);
        on_a_reactor(write_and_read(&context, &mut Random(seed + 10)));
    }
}

#[test]
fn a_failure_is_of_its_request_alone() {
    let context = context(4);
    let mut random = Random(14);
    on_a_reactor(async {
        let mut pieces = Pieces::new(&mut random, 1 << 20, 5000);
        pieces.fill(&mut random);
        for fails in [0..1, 400_000..700_000, (1 << 20) - 150_000..1 << 20] {
            context.device.fails.replace(fails.clone());
            let failed = write_pieces(&context, 0, &pieces).await;
            assert_eq!(failed, Err(Errno::ENOSPC));
            let failed = read_pieces(&context, 0, &mut pieces).await;
            assert_eq!(failed, Err(Errno::ENOSPC));
            assert_eq!(context.device.running.get(), 0, "all of it has ended");
        }
        context.device.fails.replace(0..0);
        pieces.fill(&mut random);
        assert_eq!(write_pieces(&context, 0, &pieces).await, Ok(()));
        let mut found = Pieces::new(&mut random, 1 << 20, 3000);
        assert_eq!(read_pieces(&context, 0, &mut found).await, Ok(()));
        assert!(found.bytes() == pieces.bytes());
    });
}
