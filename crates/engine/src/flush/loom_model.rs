//! Models of flushes that share passes: one that returns `Ok` was covered by a pass that started after
//! it was asked for. A flush that is forgotten shows as a deadlock.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use gaur_model::{block_on, check, thread};

use super::*;
use crate::sync::atomic::AtomicU64;

/// What three writers have written, and what of it a pass has taken to the disk.
#[derive(Default)]
struct Disk {
    group: FlushGroup,
    poison: Poison,
    written: [AtomicU64; 3],
    durable: [AtomicU64; 3],
}

impl Disk {
    fn pass(&self) {
        let copies = self
            .written
            .each_ref()
            .map(|one| one.load(Ordering::Relaxed));
        for (copy, durable) in copies.into_iter().zip(&self.durable) {
            durable.store(copy, Ordering::Relaxed);
        }
    }

    /// Writes `value`, flushes by a pass that ends with `outcome`, and looks at the disk.
    fn write_and_flush(&self, writer: usize, value: u64, outcome: Result<(), Errno>) -> bool {
        self.written[writer].store(value, Ordering::Relaxed);
        let pass = async || {
            outcome?;
            self.pass();
            Ok(())
        };
        let flushed = block_on(self.group.flush(&self.poison, pass));
        if flushed.is_ok() {
            let durable = self.durable[writer].load(Ordering::Relaxed);
            assert_eq!(durable, value, "flushed without its pass");
        }
        flushed.is_ok()
    }
}

#[test]
fn a_flush_covers_what_was_written_before_it() {
    check(|| {
        let disk = Arc::new(Disk::default());
        let other = thread::spawn({
            let disk = Arc::clone(&disk);
            move || assert!(disk.write_and_flush(1, 1, Ok(())))
        });
        assert!(disk.write_and_flush(0, 1, Ok(())));
        assert!(disk.write_and_flush(0, 2, Ok(())));
        other.join().unwrap();
    });
}

#[test]
fn flushes_that_come_while_a_pass_runs_share_the_next() {
    check(|| {
        let disk = Arc::new(Disk::default());
        let threads = [0, 1].map(|writer| {
            let disk = Arc::clone(&disk);
            thread::spawn(move || assert!(disk.write_and_flush(writer, 1, Ok(()))))
        });
        assert!(disk.write_and_flush(2, 1, Ok(())));
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(disk.group.state.lock().started <= 3);
    });
}

#[test]
fn a_failed_pass_fails_every_flush_that_joined_it() {
    check(|| {
        let disk = Arc::new(Disk::default());
        let other = thread::spawn({
            let disk = Arc::clone(&disk);
            move || disk.write_and_flush(1, 1, Ok(()))
        });
        // It may be covered by the other's pass, before which nothing has failed.
        disk.write_and_flush(0, 1, Err(Errno::EIO));
        other.join().unwrap();
        if disk.poison.get().is_some() {
            assert!(!disk.write_and_flush(0, 2, Ok(())));
        }
    });
}

/// A flush whose caller goes away in the middle of the pass that it carries out.
#[test]
fn dropping_a_pass_fails_every_flush_that_waits_for_it() {
    check(|| {
        let disk = Arc::new(Disk::default());
        let going = thread::spawn({
            let disk = Arc::clone(&disk);
            move || {
                let pass = async || std::future::pending().await;
                let mut flush = pin!(disk.group.flush(&disk.poison, pass));
                let context = &mut Context::from_waker(Waker::noop());
                let _ = flush.as_mut().poll(context);
            }
        });
        disk.write_and_flush(0, 1, Ok(()));
        going.join().unwrap();
        let state = disk.group.state.lock();
        assert!(!state.running && state.done == state.started);
    });
}
