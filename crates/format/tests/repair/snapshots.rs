//! Damage to the table of snapshots.

use gaur_format::header::field;
use gaur_format::snapshot::{Snapshot, encode_table, parse_table};

use crate::image::{header, l1_tables, part, put};

pub const DAMAGES: [&str; 10] = [
    "unaligned",
    "outside",
    "too long",
    "active",
    "shared",
    "extra",
    "endless",
    "incomplete",
    "blank",
    "count",
];

pub fn snapshots(file: &[u8]) -> Vec<Snapshot> {
    let header = header(file);
    let rest = &file[header.snapshots_offset.0 as usize..];
    parse_table(rest, header.nb_snapshots, &header.geometry())
        .unwrap()
        .0
}

/// Bytes of the entry of one snapshot, and where it begins in the table.
fn entry(file: &[u8], number: usize) -> (u64, Vec<u8>) {
    let all = snapshots(file);
    let before = encode_table(&all[..number]).len() as u64;
    let at = header(file).snapshots_offset.0 + before;
    let len = encode_table(&all[number..=number]).len() as u64;
    (at, part(file, at, len))
}

/// Puts `extra` in place of the extra data of an entry of 24 bytes of them; what follows moves.
fn replace_extra(file: &mut [u8], number: usize, extra: &[u8]) {
    let (at, old) = entry(file, number);
    let mut new = old[..36].to_vec();
    new.extend_from_slice(&(extra.len() as u32).to_be_bytes());
    new.extend_from_slice(extra);
    new.extend_from_slice(&old[64..]);
    new.resize(new.len().next_multiple_of(8), 0);
    let after = encode_table(&snapshots(file)[number + 1..]);
    new.extend_from_slice(&after);
    put(file, at, &new);
}

/// Damages the entry of the second of three snapshots, or the table. The L1 tables whose disks stay, by their places
/// before.
pub fn damage(file: &mut [u8], what: &str) -> Vec<(u64, u64)> {
    let mut left = l1_tables(file);
    let (at, _) = entry(file, 1);
    let l1 = |offset: u64| offset.to_be_bytes();
    let count = field::NB_SNAPSHOTS;
    match what {
        "unaligned" => put(file, at, &l1(left[2].0 + 8)),
        "outside" => put(file, at, &l1(file.len() as u64 + (64 << 20))),
        "too long" => put(file, at + 8, &[0x7f; 4]),
        "active" => {
            put(file, at, &l1(left[0].0));
            left[2] = left[0];
            return left;
        }
        "shared" => {
            put(file, at, &l1(left[1].0));
            left[2] = left[1];
            return left;
        }
        "extra" => {
            let (_, old) = entry(file, 1);
            let mut extra = old[40..64].to_vec();
            extra.resize(1100, 0xee);
            replace_extra(file, 1, &extra);
            return left;
        }
        "endless" => {
            put(file, at + 36, &[0xff; 4]);
            left.truncate(3);
        }
        "incomplete" => {
            replace_extra(file, 1, &[]);
            return left;
        }
        "blank" => {
            put(file, count, &5_u32.to_be_bytes());
            return left;
        }
        _ => {
            let most = 70_000_u32;
            put(file, count, &most.to_be_bytes());
            return left;
        }
    }
    left.remove(2);
    left
}
