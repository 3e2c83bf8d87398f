//! Models of the locks on blocks: a request that rewrites a block sees what was written to it before, and
//! no request's bytes are undone. A wake-up that is lost shows as a deadlock.

use std::sync::Arc;
use std::task::{Context, Waker};

use gaur_model::{Strength, block_on, check, check_weakened, thread};

use super::*;

const BLOCK: u64 = 512;
/// What a write of a whole block leaves there.
const WHOLE: u64 = 1;
/// What a write of part of a block adds to it.
const PART: u64 = 10;

/// A file of two blocks.
#[derive(Default)]
struct Blocks {
    locks: SectorLocks,
    bytes: [AtomicU64; 2],
}

impl Blocks {
    /// As `align` does it: without waiting if no request rewrites blocks.
    fn write_whole(&self, block: usize) {
        let at = block as u64 * BLOCK;
        let write = || self.bytes[block].store(WHOLE, Ordering::Relaxed);
        block_on(async {
            match self.locks.enter() {
                Some(_guard) => write(),
                None => {
                    let _guard = self.locks.lock(at..at + BLOCK).await;
                    write();
                }
            }
        });
    }

    /// Reads blocks and writes them back with something added.
    fn rewrite(&self, blocks: Range<usize>) {
        let bytes = blocks.start as u64 * BLOCK..blocks.end as u64 * BLOCK;
        block_on(async {
            let _guard = self.locks.lock(bytes).await;
            for block in &self.bytes[blocks] {
                let before = block.load(Ordering::Relaxed);
                block.store(before + PART, Ordering::Relaxed);
            }
        });
    }

    fn check_idle(&self) {
        assert_eq!(self.locks.writers.load(Ordering::Relaxed), 0);
        assert!(self.locks.table().claims.is_empty());
    }
}

fn a_whole_block_and_a_part() {
    let blocks = Arc::new(Blocks::default());
    let whole = thread::spawn({
        let blocks = Arc::clone(&blocks);
        move || blocks.write_whole(0)
    });
    blocks.rewrite(0..1);
    whole.join().unwrap();
    let bytes = blocks.bytes[0].load(Ordering::Relaxed);
    // The whole write came first, or last.
    assert!([WHOLE + PART, WHOLE].contains(&bytes), "undone: {bytes}");
    blocks.check_idle();
}

#[test]
fn a_whole_block_is_written_before_or_after_it_is_rewritten() {
    check(a_whole_block_and_a_part);
}

#[test]
#[should_panic = "undone"]
fn the_count_of_writers_needs_its_orderings() {
    check_weakened(Strength::Relaxed, a_whole_block_and_a_part);
}

/// One of them overlaps both others.
#[test]
fn ranges_that_overlap_are_rewritten_one_after_the_other() {
    check(|| {
        let blocks = Arc::new(Blocks::default());
        let threads = [0..2, 0..1].map(|range| {
            let blocks = Arc::clone(&blocks);
            thread::spawn(move || blocks.rewrite(range))
        });
        blocks.rewrite(1..2);
        for thread in threads {
            thread.join().unwrap();
        }
        for block in &blocks.bytes {
            assert_eq!(block.load(Ordering::Relaxed), 2 * PART);
        }
        blocks.check_idle();
    });
}

/// Two that count themselves in and out again are in the way of one that waits: the last to leave
/// lets it go on.
#[test]
fn the_last_writer_wakes_all_waiters() {
    check(|| {
        let blocks = Arc::new(Blocks::default());
        let threads = [0, 1].map(|block| {
            let blocks = Arc::clone(&blocks);
            thread::spawn(move || blocks.write_whole(block))
        });
        blocks.rewrite(0..2);
        for thread in threads {
            thread.join().unwrap();
        }
        for block in &blocks.bytes {
            let bytes = block.load(Ordering::Relaxed);
            assert!([WHOLE + PART, WHOLE].contains(&bytes), "undone: {bytes}");
        }
        blocks.check_idle();
    });
}

/// A wait that is given up takes its claim along, also when it has just been granted.
#[test]
fn a_dropped_wait_blocks_no_other_request() {
    check(|| {
        let blocks = Arc::new(Blocks::default());
        let rewriting = thread::spawn({
            let blocks = Arc::clone(&blocks);
            move || blocks.rewrite(0..1)
        });
        let giving_up = thread::spawn({
            let blocks = Arc::clone(&blocks);
            move || {
                let mut wait = std::pin::pin!(blocks.locks.lock(0..2 * BLOCK));
                let context = &mut Context::from_waker(Waker::noop());
                let _ = wait.as_mut().poll(context);
            }
        });
        blocks.rewrite(1..2);
        rewriting.join().unwrap();
        giving_up.join().unwrap();
        for block in &blocks.bytes {
            assert_eq!(block.load(Ordering::Relaxed), PART);
        }
        blocks.check_idle();
    });
}
