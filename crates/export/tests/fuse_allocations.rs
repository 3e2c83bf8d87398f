//! Requests allocate nothing once a file has been served for a while.

#![cfg(feature = "fuse")]

mod harness;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use gaur_export::device::Null;
use harness::counting::{Counting, allocations};
use harness::covered::*;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Requests of every kind; returns allocations of the whole process.
fn rounds(file: &File, bytes: &mut [u8], count: u64) -> u64 {
    let before = allocations();
    for round in 0..count {
        let offset = (round % 64) << 20;
        file.read_exact_at(&mut bytes[..4096], offset)
            .expect("a read");
        file.write_all_at(&bytes[..4096], offset).expect("a write");
        file.read_exact_at(bytes, offset).expect("a long read");
        file.write_all_at(bytes, offset).expect("a long write");
        file.sync_data().expect("a flush");
        file.metadata().expect("facts");
        // SAFETY: no memory is passed.
        unsafe {
            let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let at = offset as i64;
            assert_eq!(libc::fallocate(file.as_raw_fd(), punch, at, 1 << 20), 0);
            assert!(libc::lseek(file.as_raw_fd(), at, libc::SEEK_HOLE) >= 0);
        }
    }
    allocations() - before
}

#[test]
fn requests_allocate_nothing_after_warm_up() {
    let place = Place::new();
    let mut options = place.options();
    options.threads = 2;
    let server = cover(options, Null::new(1 << 40));
    let file = OpenOptions::new().read(true).write(true).open(&place.file);
    let file = file.expect("it can be opened");
    let mut bytes = vec![7; 1 << 20];
    rounds(&file, &mut bytes, 200);
    assert_eq!(rounds(&file, &mut bytes, 500), 0, "in 500 rounds");
    drop(file);
    finish(server);
}
