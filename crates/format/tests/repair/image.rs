//! An image in memory: what its guest reads, and what a repair makes of it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use gaur_format::check::{Check, Repair, RepairMode, RepairStep, Repaired, Report, Step};
use gaur_format::{CompressedDescriptor, Header, L2Entry, l1, l2, snapshot};

use crate::random::Random;

pub const SECTOR: usize = 512;

/// Bytes of a file; zeros after its end.
pub fn part(file: &[u8], offset: u64, len: u64) -> Vec<u8> {
    let start = (offset as usize).min(file.len());
    let end = start.saturating_add(len as usize).min(file.len());
    let mut bytes = file[start..end].to_vec();
    bytes.resize(len as usize, 0);
    bytes
}

pub fn u64_at(file: &[u8], offset: u64) -> u64 {
    u64::from_be_bytes(part(file, offset, 8).try_into().unwrap())
}

pub fn put(file: &mut [u8], offset: u64, bytes: &[u8]) {
    file[offset as usize..][..bytes.len()].copy_from_slice(bytes);
}

fn store(file: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let end = offset as usize + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    put(file, offset, bytes);
}

pub fn header(file: &[u8]) -> Header {
    Header::parse(&file[..file.len().min(2 << 20)]).unwrap()
}

/// The L1 tables: the active one, then those of the snapshots.
pub fn l1_tables(file: &[u8]) -> Vec<(u64, u64)> {
    let header = header(file);
    let mut tables = vec![(header.l1_table_offset.0, u64::from(header.l1_size))];
    if header.nb_snapshots > 0 {
        let rest = &file[header.snapshots_offset.0 as usize..];
        let (snapshots, _) =
            snapshot::parse_table(rest, header.nb_snapshots, &header.geometry()).unwrap();
        let place = |one: &snapshot::Snapshot| (one.l1_table_offset.0, u64::from(one.l1_size));
        tables.extend(snapshots.iter().map(place));
    }
    tables
}

/// What a subcluster reads as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The read fails.
    Unreadable,
    /// What is below it.
    Backing,
    /// Bytes with this hash; zeros without space are bytes like others.
    Bytes(u64),
}

fn bytes_of(file: &[u8], offset: u64, len: u64) -> Content {
    let mut hasher = DefaultHasher::new();
    part(file, offset, len).hash(&mut hasher);
    Content::Bytes(hasher.finish())
}

/// What the guest and all snapshots read, subcluster by subcluster; what is missing is backing.
pub fn contents(file: &[u8]) -> BTreeMap<(usize, u64), Content> {
    contents_of(file, &l1_tables(file))
}

/// The same through these L1 tables.
pub fn contents_of(file: &[u8], tables: &[(u64, u64)]) -> BTreeMap<(usize, u64), Content> {
    let geometry = header(file).geometry();
    let mut all = BTreeMap::new();
    let (size, sub) = (geometry.cluster_size(), geometry.subcluster_size());
    for (number, (offset, entries)) in tables.iter().copied().enumerate() {
        for index in 0..entries {
            let first = index * geometry.l2_entries() * u64::from(geometry.subclusters());
            let table = match l1::decode(u64_at(file, offset + index * 8), &geometry) {
                Ok(None) => continue,
                Ok(Some(table)) => part(file, table.offset.0, size),
                Err(_) => {
                    all.insert((number, first), Content::Unreadable);
                    continue;
                }
            };
            for entry in 0..geometry.l2_entries() {
                let (raw, bitmap) = l2::raw_at(&table, entry, &geometry).unwrap();
                for part_number in 0..u64::from(geometry.subclusters()) {
                    let content = match L2Entry::decode(raw, bitmap, &geometry) {
                        Err(_) => Content::Unreadable,
                        Ok(L2Entry::Compressed(descriptor)) => compressed(file, descriptor),
                        Ok(L2Entry::Cluster {
                            host, alloc, zero, ..
                        }) => match (alloc >> part_number & 1, zero >> part_number & 1) {
                            (1, _) => bytes_of(file, host.unwrap().0 + part_number * sub, sub),
                            (_, 1) => bytes_of(&[], 0, sub),
                            _ => continue,
                        },
                    };
                    let at = first + entry * u64::from(geometry.subclusters()) + part_number;
                    all.insert((number, at), content);
                }
            }
        }
    }
    all
}

/// Compressed data behind the end of the file is no stream.
fn compressed(file: &[u8], descriptor: CompressedDescriptor) -> Content {
    match descriptor.offset < file.len() as u64 {
        true => bytes_of(file, descriptor.offset, descriptor.byte_len()),
        false => Content::Unreadable,
    }
}

/// Whatever could be read still reads as the same.
pub fn assert_kept(before: &BTreeMap<(usize, u64), Content>, file: &[u8], what: &str) {
    let after = contents(file);
    for (at, old) in before {
        let new = after.get(at).copied().unwrap_or(Content::Backing);
        assert!(
            *old == Content::Unreadable || *old == new,
            "{what}: table {}, subcluster {}: {old:?} became {new:?}",
            at.0,
            at.1
        );
    }
    for at in after.keys() {
        // A table that could not be found stands for all its entries.
        assert!(
            before.contains_key(at) || before.values().any(|old| *old == Content::Unreadable),
            "{what}: table {}, subcluster {} came up",
            at.0,
            at.1
        );
    }
}

pub fn check(file: &[u8]) -> Report {
    let mut check = Check::new(&file[..file.len().min(2 << 20)], file.len() as u64).unwrap();
    loop {
        match check.next() {
            Step::Need { offset, len } => check.feed(&part(file, offset, len)),
            Step::Done(report) => return report,
        }
    }
}

/// Whether flushes do something; a broken rule for a test that must notice it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Flushes {
    Work,
    Ignored,
}

/// Runs a repair; `cut` gets every state that a power cut may leave, with its number.
pub fn repair_cut(
    file: &mut Vec<u8>,
    mode: RepairMode,
    flushes: Flushes,
    mut cut: impl FnMut(usize, &[(u64, Vec<u8>)], &[u8]),
) -> Repaired {
    let cluster0 = &file[..file.len().min(2 << 20)];
    let mut repair = Repair::new(cluster0, file.len() as u64, mode, false).unwrap();
    // The file as it is for certain, and the writes since.
    let mut durable = file.clone();
    let mut recent: Vec<(u64, Vec<u8>)> = Vec::new();
    let mut number = 0;
    for _ in 0..1_000_000 {
        match repair.next() {
            RepairStep::Need { offset, len } => repair.feed(&part(file, offset, len)),
            RepairStep::Write { offset, bytes } => {
                store(file, offset, &bytes);
                recent.push((offset, bytes));
                cut(number, &recent, &durable);
                number += 1;
            }
            RepairStep::Flush if flushes == Flushes::Ignored => {}
            RepairStep::Flush => {
                durable.clone_from(file);
                recent.clear();
            }
            RepairStep::Done(repaired) => {
                assert!(recent.is_empty() || flushes == Flushes::Ignored);
                return *repaired;
            }
        }
    }
    panic!("the repair does not end");
}

pub fn repair(file: &mut Vec<u8>, mode: RepairMode) -> Repaired {
    repair_cut(file, mode, Flushes::Work, |_, _, _| ())
}

/// What a power cut leaves: any of the sectors written since the last flush.
pub fn after_power_cut(durable: &[u8], recent: &[(u64, Vec<u8>)], random: &mut Random) -> Vec<u8> {
    let share = random.below(5);
    let mut file = durable.to_vec();
    for (offset, bytes) in recent {
        for (index, sector) in bytes.chunks(SECTOR).enumerate() {
            if random.below(4) < share {
                store(&mut file, offset + (index * SECTOR) as u64, sector);
            }
        }
    }
    file
}
