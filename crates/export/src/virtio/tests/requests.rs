//! Requests of a driver that keeps to the rules, or nearly.

use super::driver::{FEATURES, FREE, Machine, RING, count};
use crate::device::Memory;
use crate::virtio::wire::{descriptor, feature, kind, status};

const DATA: u64 = FREE + 0x1000;

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 3) as u8 ^ seed).collect()
}

#[test]
fn what_is_written_in_pieces_is_read_in_others() {
    let mut machine = Machine::new();
    let bytes = pattern(200 << 10, 7);
    machine.put(DATA, &bytes);
    // Long and short parts, some of them neighbours, none of them a whole number of sectors.
    let cuts = [0, 100, 70_100, 70_200, 150_000, 200 << 10];
    let parts: Vec<(u64, u32)> = cuts
        .windows(2)
        .map(|cut| (DATA + cut[0], (cut[1] - cut[0]) as u32))
        .collect();
    let result = machine.request(0, kind::OUT, 8, &parts, &[]);
    assert_eq!(result, (status::OK, 1));

    let target = DATA + 0x40000;
    let gaps: Vec<(u64, u32)> = [
        (0, 512),
        (0x1000, 3584),
        (0x3000, 131_072),
        (0x30000, 69_632),
    ]
    .map(|(at, len)| (target + at, len))
    .to_vec();
    let (code, written) = machine.request(1, kind::IN, 8, &[], &gaps);
    assert_eq!((code, written), (status::OK, (200 << 10) + 1));
    let read: Vec<u8> = gaps
        .iter()
        .flat_map(|(at, len)| machine.get(*at, *len as usize))
        .collect();
    assert!(read == bytes);
}

#[test]
fn requests_beyond_the_disk_or_its_blocks_fail_alone() {
    let mut machine = Machine::new();
    let end = (1 << 20) / 512;
    for (code, kind, sector, len) in [
        (status::IOERR, kind::IN, end, 512),
        (status::IOERR, kind::IN, end - 1, 1024),
        (status::IOERR, kind::IN, u64::MAX, 512),
        (status::IOERR, kind::IN, u64::MAX / 512, 512),
        (status::IOERR, kind::IN, 0, 511),
        (status::OK, kind::IN, end - 1, 512),
        (status::UNSUPP, 3, 0, 512),
        (status::UNSUPP, u32::MAX, 0, 512),
    ] {
        let result = machine.request(0, kind, sector, &[], &[(DATA, len)]);
        assert_eq!(
            result.0, code,
            "kind {kind}, {len} bytes at sector {sector}"
        );
    }
    let result = machine.request(0, kind::OUT, end, &[(DATA, 512)], &[]);
    assert_eq!(result.0, status::IOERR);
}

#[test]
fn the_serial_number_is_cut_to_the_room_for_it() {
    let mut machine = Machine::new();
    let result = machine.request(0, kind::GET_ID, 0, &[], &[(DATA, 20)]);
    assert_eq!(result, (status::OK, 21));
    assert_eq!(
        machine.get(DATA, 20),
        b"gaur\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    );
    let result = machine.request(0, kind::GET_ID, 0, &[], &[(DATA + 100, 2), (DATA + 200, 1)]);
    assert_eq!(result, (status::OK, 4));
    assert_eq!(machine.get(DATA + 200, 2), b"u\0");
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend_from_slice(&sectors.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes
}

#[test]
fn ranges_are_zeroed_all_or_none() {
    let mut machine = Machine::new();
    machine.put(DATA, &[1; 8192]);
    machine.request(0, kind::OUT, 0, &[(DATA, 8192)], &[]);
    let list = DATA + 0x4000;
    let first = |machine: &mut Machine| {
        machine.request(0, kind::IN, 0, &[], &[(DATA, 8192)]);
        machine.get(DATA, 8192)
    };
    for (kind, ranges, code) in [
        // The second range is beyond the end.
        (
            kind::DISCARD,
            [range(0, 2, 0), range(2048, 1, 0)],
            status::IOERR,
        ),
        // A discard has no flags, and nothing has reserved ones.
        (
            kind::DISCARD,
            [range(0, 2, 0), range(4, 2, 1)],
            status::UNSUPP,
        ),
        (
            kind::WRITE_ZEROES,
            [range(0, 2, 0), range(4, 2, 2)],
            status::UNSUPP,
        ),
        (
            kind::WRITE_ZEROES,
            [range(0, 2, 0), range(4, u32::MAX, 0)],
            status::IOERR,
        ),
    ] {
        machine.put(list, &ranges.concat());
        let result = machine.request(0, kind, 0, &[(list, 32)], &[]);
        assert_eq!(result.0, code, "kind {kind}: {ranges:?}");
        assert!(first(&mut machine) == vec![1; 8192]);
    }
    machine.put(list, &[range(0, 2, 0), range(4, 2, 1)].concat());
    let result = machine.request(
        0,
        kind::WRITE_ZEROES,
        0,
        &[(list, 20), (list + 20, 12)],
        &[],
    );
    assert_eq!(result, (status::OK, 1));
    let mut expected = vec![1; 8192];
    expected[..1024].fill(0);
    expected[2048..3072].fill(0);
    assert!(first(&mut machine) == expected);
    for len in [0, 15, 17, 16 * 33] {
        let result = machine.request(0, kind::DISCARD, 0, &[(list, len)], &[]);
        assert_eq!(result.0, status::IOERR, "{len} bytes of ranges");
    }
}

#[test]
fn a_table_elsewhere_is_followed() {
    let mut machine = Machine::new();
    let table = DATA + 0x8000;
    let (next, write) = (descriptor::NEXT, descriptor::WRITE);
    machine.put(FREE, &[0; 16]);
    machine.put(FREE + 16, &[9]);
    // Out of order in the table.
    let parts = [
        (FREE, 16, next, 2),
        (FREE + 16, 1, write, 0),
        (DATA, 512, next | write, 1),
    ];
    for (index, (at, len, flags, next)) in parts.into_iter().enumerate() {
        let bytes = Machine::descriptor_bytes(at, len, flags, next);
        machine.put(table + 16 * index as u64, &bytes);
    }
    machine.describe(0, 3, (table, 48, descriptor::INDIRECT, 0));
    machine.offer(0, 3);
    machine.kick(0);
    assert_eq!(machine.used(0), (3, 513));
    assert_eq!(machine.get(FREE + 16, 1), [status::OK]);
}

#[test]
fn completions_are_announced_only_where_the_driver_wants_it() {
    let mut machine = Machine::halted(Memory::new(1 << 20));
    machine.start(0, FEATURES & !feature::EVENT_IDX);
    // No interrupts, please.
    machine.put(0x1400, &1_u16.to_le_bytes());
    machine.request(0, kind::FLUSH, 0, &[], &[]);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(count(&machine.rings[0].call), 0);
    machine.put(0x1400, &0_u16.to_le_bytes());
    machine.request(0, kind::FLUSH, 0, &[], &[]);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(count(&machine.rings[0].call), 1);
    machine.stop(0);

    machine.start(0, FEATURES);
    // After the fourth completion: two have been.
    machine.put(0x1404 + 2 * u64::from(RING), &3_u16.to_le_bytes());
    for expected in [0, 1] {
        machine.request(0, kind::FLUSH, 0, &[], &[]);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(count(&machine.rings[0].call), expected);
    }
}

#[test]
fn a_ring_goes_on_where_it_stopped() {
    let mut machine = Machine::new();
    for round in 1..40_u16 {
        machine.request(0, kind::FLUSH, 0, &[], &[]);
        if round % 7 == 0 {
            assert_eq!(machine.stop(0), Some(round));
            assert_eq!(machine.stop(0), None);
            machine.start(0, FEATURES);
        }
    }
}
