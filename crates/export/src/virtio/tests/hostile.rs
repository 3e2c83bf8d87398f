//! Rings that no driver should write: the ring is given up with a reason, and the other one goes on.

use super::driver::{FREE, Machine, Part, READ_ONLY, RING, count};
use super::random::Random;
use crate::virtio::wire::{descriptor, kind, status};

const NEXT: u16 = descriptor::NEXT;
const WRITE: u16 = descriptor::WRITE;
const INDIRECT: u16 = descriptor::INDIRECT;
const TABLE: u64 = FREE + 0x1000;

/// Offers a chain from descriptor 0 on, with a table at [`TABLE`].
#[track_caller]
fn refused(parts: &[Part], table: &[Part], reason: &str) {
    let mut machine = Machine::new();
    for (index, part) in parts.iter().enumerate() {
        machine.describe(0, index as u16, *part);
    }
    for (index, (at, len, flags, next)) in table.iter().enumerate() {
        let bytes = Machine::descriptor_bytes(*at, *len, *flags, *next);
        machine.put(TABLE + 16 * index as u64, &bytes);
    }
    machine.offer(0, 0);
    machine.kick(0);
    given_up(&mut machine, reason);
}

/// The first ring is given up, and the second is not.
#[track_caller]
fn given_up(machine: &mut Machine, reason: &str) {
    machine.expect_line(&format!("ring 0 is given up: {reason}"));
    assert_eq!(count(&machine.rings[0].error), 1);
    let result = machine.request(1, kind::FLUSH, 0, &[], &[]);
    assert_eq!(result, (status::OK, 1));
    assert!(
        machine.stop(0).is_some(),
        "a ring that is given up still stops"
    );
}

#[test]
fn chains_that_run_in_a_circle() {
    refused(
        &[(FREE, 16, NEXT, 0)],
        &[],
        "a chain of descriptors is too long",
    );
    refused(
        &[(FREE, 16, NEXT, 1), (FREE, 16, NEXT, 0)],
        &[],
        "a chain of descriptors is too long",
    );
    refused(
        &[(TABLE, 32, INDIRECT, 0)],
        &[(FREE, 16, NEXT, 1), (FREE, 16, NEXT, 0)],
        "a chain of descriptors is too long",
    );
}

#[test]
fn descriptors_that_are_not_there() {
    refused(&[(FREE, 16, NEXT, RING)], &[], "descriptor 16 of 16");
    refused(&[(FREE, 16, NEXT, 0xffff)], &[], "descriptor 65535 of 16");
    refused(
        &[(TABLE, 16, INDIRECT, 0)],
        &[(FREE, 16, NEXT, 1)],
        "descriptor 1 of 1",
    );
}

#[test]
fn memory_that_is_not_there() {
    let outside = "bytes at guest address";
    for (at, len) in [
        (u64::MAX, 16),
        (u64::MAX - 8, 16),
        (READ_ONLY + 0x1000, 16),
        (READ_ONLY + 0xff8, 16),
        (FREE, u32::MAX),
        (1 << 63, 1),
    ] {
        let reason = format!("{len} {outside} {at:#x}");
        refused(&[(at, len, 0, 0)], &[], &reason);
        refused(&[(FREE, 16, NEXT, 1), (at, len, WRITE, 0)], &[], &reason);
    }
    // What may only be read.
    refused(
        &[(FREE, 16, NEXT, 1), (READ_ONLY, 512, WRITE, 0)],
        &[],
        "512 bytes at guest address",
    );
    refused(
        &[(u64::MAX, 16, INDIRECT, 0)],
        &[],
        "16 bytes at guest address",
    );
}

#[test]
fn tables_that_are_none() {
    for len in [0, 15, 17, 16 * 1025, u32::MAX, u32::MAX - 15] {
        let reason = format!("an indirect table of {len} bytes");
        refused(&[(TABLE, len, INDIRECT, 0)], &[], &reason);
    }
    let twice = "an indirect table where none may be";
    refused(
        &[(TABLE, 16, INDIRECT | NEXT, 1), (FREE, 1, WRITE, 0)],
        &[],
        twice,
    );
    refused(
        &[(TABLE, 16, INDIRECT, 0)],
        &[(TABLE, 16, INDIRECT, 0)],
        twice,
    );
}

#[test]
fn requests_without_a_beginning_or_an_end() {
    refused(
        &[(FREE, 15, NEXT, 1), (FREE, 1, WRITE, 0)],
        &[],
        "a request header of 15 bytes",
    );
    refused(&[(FREE, 1, WRITE, 0)], &[], "a request header of 0 bytes");
    refused(
        &[(FREE, 16, 0, 0)],
        &[],
        "a request has no room for its status",
    );
    refused(
        &[(FREE, 16, NEXT, 1), (FREE, 0, WRITE, 0)],
        &[],
        "a request has no room",
    );
    refused(
        &[
            (FREE, 16, NEXT, 1),
            (FREE, 1, WRITE | NEXT, 2),
            (FREE, 16, 0, 0),
        ],
        &[],
        "a part to read follows a part to write",
    );
}

#[test]
fn indices_that_make_no_sense() {
    let mut machine = Machine::new();
    machine.set_available(0, RING + 1);
    machine.kick(0);
    given_up(&mut machine, "available index 17 is too far from 0");

    let mut machine = Machine::new();
    machine.offer(0, RING);
    machine.kick(0);
    given_up(&mut machine, "descriptor 16 of 16");
}

#[test]
fn a_request_that_is_offered_twice() {
    let mut machine = Machine::new();
    machine.describe(0, 0, (FREE, 16, NEXT, 1));
    machine.put(FREE, &kind::FLUSH.to_le_bytes());
    machine.describe(0, 1, (FREE + 16, 1, WRITE, 0));
    machine.offer(0, 0);
    machine.offer(0, 0);
    machine.kick(0);
    given_up(&mut machine, "descriptor 0 is offered again");
    // The first one was done all the same.
    assert_eq!(machine.used(0), (0, 1));
}

impl Random {
    /// A descriptor that is nearly right.
    fn part(&mut self) -> Part {
        let address = match self.below(8) {
            0 => self.next(),
            1 => READ_ONLY - 0x100 + self.below(0x1200),
            _ => FREE + self.below(0x2000),
        };
        let len = match self.below(8) {
            0 => self.next() as u32,
            _ => self.below(0x1000) as u32,
        };
        let flags = match self.below(16) {
            0 => self.next() as u16,
            1 => INDIRECT,
            _ => self.below(4) as u16,
        };
        (address, len, flags, self.below(u64::from(RING) + 1) as u16)
    }
}

#[test]
fn hostile_ring_leaves_other_rings_alone() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut machine = Machine::new();
    for _ in 0..400 {
        for index in 0..RING {
            machine.describe(0, index, random.part());
        }
        for at in 0..0x200 {
            let (address, len, flags, next) = random.part();
            let bytes = Machine::descriptor_bytes(address, len, flags, next);
            machine.put(FREE + at * 16, &bytes);
        }
        for _ in 0..random.below(u64::from(RING)) {
            let head = random.below(u64::from(RING)) as u16;
            machine.offer(0, head);
        }
        machine.kick(0);
        // Whatever became of it, it stops, and starts where the driver is.
        assert!(machine.stop(0).is_some());
        machine.restart_blank(0);
        let result = machine.request(1, kind::FLUSH, 0, &[], &[]);
        assert_eq!(result, (status::OK, 1));
    }
}

/// The server lives, and has another guest.
#[test]
fn memory_that_is_taken_away() {
    let machine = Machine::new();
    machine.guest.truncate();
    machine.kick(0);
    machine.kick(1);
    for ring in 0..2 {
        machine.expect_line(&format!(
            "ring {ring} is given up: the file of its memory was made shorter"
        ));
    }
    let mut other = Machine::new();
    let result = other.request(1, kind::FLUSH, 0, &[], &[]);
    assert_eq!(result, (status::OK, 1));
}
