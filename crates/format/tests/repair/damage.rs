//! A generator of damage.

use gaur_format::refcount;

use crate::image::{header, l1_tables, part, put, u64_at};
use crate::random::Random;

const COPIED: u64 = 1 << 63;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Offsets of the L2 tables that are in use.
fn l2_tables(file: &[u8]) -> Vec<u64> {
    let geometry = header(file).geometry();
    let entries = l1_tables(file)
        .into_iter()
        .flat_map(|(offset, count)| (0..count).map(move |index| offset + index * 8));
    entries
        .map(|at| u64_at(file, at) & OFFSET)
        .filter(|table| {
            let end = table + geometry.cluster_size();
            *table != 0 && end <= file.len() as u64 && table.is_multiple_of(geometry.cluster_size())
        })
        .collect()
}

/// Offset of an L2 entry that is not empty.
fn some_l2_entry(file: &[u8], random: &mut Random) -> Option<u64> {
    let geometry = header(file).geometry();
    let mut used = Vec::new();
    for table in l2_tables(file) {
        for index in 0..geometry.l2_entries() {
            let at = table + index * geometry.l2_entry_size();
            if u64_at(file, at) != 0 {
                used.push(at);
            }
        }
    }
    let count = used.len() as u64;
    (count > 0).then(|| used[random.below(count) as usize])
}

/// Gives a random cluster of the file a random refcount.
fn edit_refcount(file: &mut [u8], random: &mut Random) {
    let geometry = header(file).geometry();
    let table = header(file).refcount_table_offset.0;
    let cluster = random.below(file.len() as u64 / geometry.cluster_size());
    let index = cluster / geometry.refcount_block_entries();
    let block = u64_at(file, table + index * 8);
    if block == 0 || !block.is_multiple_of(geometry.cluster_size()) || block >= file.len() as u64 {
        return;
    }
    let mut bytes = part(file, block, geometry.cluster_size());
    let value = random.below(4).min(geometry.refcount_max());
    let index = cluster % geometry.refcount_block_entries();
    refcount::set(&mut bytes, geometry.refcount_order(), index, value).unwrap();
    put(file, block, &bytes);
}

/// Damage that a repair of all must undo.
pub fn mild(file: &mut Vec<u8>, random: &mut Random) {
    let geometry = header(file).geometry();
    let size = geometry.cluster_size();
    let table = header(file).refcount_table_offset.0;
    match random.below(9) {
        0..=2 => (0..=random.below(8)).for_each(|_| edit_refcount(file, random)),
        // Lost: one block, or all of them.
        3 => put(file, table, &[0; 8]),
        4 => {
            let len = u64::from(header(file).refcount_table_clusters) * size;
            put(file, table, &vec![0; len as usize]);
        }
        // Somewhere else: not aligned, or outside.
        5 => {
            let bad = [0x201, size / 2, file.len() as u64 + 64 * size][random.below(3) as usize];
            put(file, table, &bad.to_be_bytes());
        }
        6 | 7 => {
            let l1 = l1_tables(file)[0].0;
            let at = match random.below(3) {
                0 => Some(l1),
                _ => some_l2_entry(file, random),
            };
            let Some(at) = at else { return };
            let raw = u64_at(file, at);
            let compressed = raw & 1 << 62 != 0;
            let wrong = match random.below(3) {
                0 if raw & OFFSET != 0 => raw ^ COPIED,
                1 if !compressed => raw | 1 << 57,
                _ if !compressed && raw & 1 == 0 => raw | 4,
                _ => raw | COPIED,
            };
            put(file, at, &wrong.to_be_bytes());
        }
        _ => {
            // Clusters behind the end of all.
            let len = file.len().next_multiple_of(size as usize) + 3 * size as usize;
            file.resize(len, 0x5a);
            edit_refcount(file, random);
        }
    }
}

/// Any damage to tables, whether or not it can be repaired.
pub fn wild(file: &mut [u8], random: &mut Random) {
    let geometry = header(file).geometry();
    let mut places = vec![header(file).refcount_table_offset.0];
    places.extend(l1_tables(file).iter().map(|(offset, _)| *offset));
    places.extend(l2_tables(file));
    places.push(u64_at(file, places[0]) & OFFSET);
    places.retain(|place| place + geometry.cluster_size() <= file.len() as u64);
    let place = places[random.below(places.len() as u64) as usize];
    let at = match random.below(3) {
        0 => some_l2_entry(file, random).unwrap_or(place),
        1 => place + 8 * random.below(4),
        _ => place + 8 * random.below(geometry.cluster_size() / 8),
    };
    let clusters = file.len() as u64 / geometry.cluster_size();
    // Not cluster 0, whose bytes are the header's.
    let some_cluster = (1 + random.below(clusters + 2)) * geometry.cluster_size();
    let raw = u64_at(file, at);
    let wrong = match random.below(6) {
        0 => raw ^ 1 << (9 + random.below(50)),
        1 => raw ^ 1 << random.below(64),
        2 => some_cluster | COPIED,
        3 => some_cluster,
        4 => some_cluster + 512 + random.below(2),
        _ => 0,
    };
    put(file, at, &wrong.to_be_bytes());
}
