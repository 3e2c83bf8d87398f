//! L2 tables that two entries of the active L1 table share. QEMU takes them for shared with a snapshot, if their
//! refcounts say so, and its checker has nothing to say of them; a program that writes in place would write to both.

use std::collections::BTreeSet;

use gaur_format::check::RepairMode;

use crate::image::{
    Flushes, after_power_cut, assert_kept, check, contents, header, l1_tables, put, repair,
    repair_cut, u64_at,
};
use crate::qemu::{self, Scratch};
use crate::random::Random;

const OPTIONS: [&str; 4] = [
    "compat=0.10,cluster_size=1k",
    "cluster_size=512,refcount_bits=64",
    "cluster_size=4k",
    "cluster_size=16k,extended_l2=on",
];

/// An image in which three entries have one table, and how many of them are flagged as its only owner.
fn image(scratch: &Scratch, options: &str, flagged: u64) -> Vec<u8> {
    let path = scratch.path("shared.qcow2");
    qemu::img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "64M"]);
    let writes = [
        "write -P 1 0 300k",
        "write -P 2 60M 20k",
        "write -c -P 9 20M 64k",
    ];
    qemu::io(&path, &writes);
    qemu::img(&["snapshot", "-c", "first", &path]);
    qemu::io(&path, &["write -P 3 8k 70k"]);
    let mut file = std::fs::read(&path).unwrap();
    let (l1, entries) = l1_tables(&file)[0];
    let table = u64_at(&file, l1) & !(1 << 63);
    for (number, index) in [0, entries / 2, entries - 1].into_iter().enumerate() {
        let flag = u64::from((number as u64) < flagged) << 63;
        put(&mut file, l1 + index * 8, &(table | flag).to_be_bytes());
    }
    file
}

/// Whether each table of the active disk has one owner there.
fn has_own_tables(file: &[u8]) -> bool {
    let (l1, entries) = l1_tables(file)[0];
    let tables = (0..entries).map(|index| u64_at(file, l1 + index * 8) & !(1 << 63));
    let tables: Vec<u64> = tables.filter(|table| *table != 0).collect();
    tables.len() == tables.iter().collect::<BTreeSet<_>>().len()
}

#[test]
fn entries_that_share_an_l2_table_get_one_each() {
    let scratch = Scratch::new("shared");
    for options in OPTIONS {
        for flagged in 0..=3 {
            let what = format!("{options}, {flagged} flags");
            let mut file = image(&scratch, options, flagged);
            assert!(header(&file).nb_snapshots == 1 && !has_own_tables(&file));
            // With refcounts as QEMU's repair makes them, and without.
            let path = scratch.path("counted.qcow2");
            std::fs::write(&path, &file).unwrap();
            assert!(qemu::repair(&path), "{what}");
            let counted = std::fs::read(&path).unwrap();
            assert!(check(&counted).is_clean() && !has_own_tables(&counted));
            for mut file in [counted, std::mem::take(&mut file)] {
                let before = contents(&file);
                let repaired = repair(&mut file, RepairMode::All);
                assert_kept(&before, &file, &what);
                assert!(has_own_tables(&file), "{what}: {repaired:#?}");
                assert!(check(&file).is_clean(), "{what}: {repaired:#?}");
                crate::assert_qemu_clean(&scratch, &file, &what);
                let again = repair(&mut file, RepairMode::All);
                assert_eq!(again.corruptions_fixed, 0, "{what}: {again:#?}");
            }
        }
    }
}

/// The data that such tables have in common is not counted, so that a writer would take it for its own: they stay
/// together, and no program of ours writes to the image.
#[test]
fn tables_whose_data_refcounts_cannot_count_stay_shared() {
    let scratch = Scratch::new("shared");
    for (options, sharers) in [("refcount_bits=1", 2), ("refcount_bits=2", 10)] {
        let path = scratch.path("narrow.qcow2");
        let options = format!("cluster_size=4k,{options}");
        qemu::img(&["create", "-q", "-f", "qcow2", "-o", &options, &path, "64M"]);
        qemu::io(&path, &["write -P 5 0 1M"]);
        let mut file = std::fs::read(&path).unwrap();
        let l1 = l1_tables(&file)[0].0;
        let entry = u64_at(&file, l1);
        for index in 1..sharers {
            put(&mut file, l1 + index * 8, &entry.to_be_bytes());
        }
        let before = contents(&file);
        let repaired = repair(&mut file, RepairMode::All);
        assert_kept(&before, &file, &options);
        assert!(!has_own_tables(&file), "{options}: {repaired:#?}");
        assert!(!check(&file).is_clean(), "{options}");
    }
}

/// A small file must not fill a disk.
#[test]
fn more_shared_tables_than_damage_explains_are_left() {
    let scratch = Scratch::new("shared");
    let path = scratch.path("many.qcow2");
    qemu::img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=2M",
        &path,
        "1P",
    ]);
    qemu::io(&path, &["write -P 5 0 64k"]);
    let mut file = std::fs::read(&path).unwrap();
    let l1 = l1_tables(&file)[0].0;
    let entry = u64_at(&file, l1);
    for index in 1..400 {
        put(&mut file, l1 + index * 8, &entry.to_be_bytes());
    }
    let len = file.len();
    repair(&mut file, RepairMode::All);
    assert!(!has_own_tables(&file) && file.len() == len);
    assert!(check(&file).is_clean());
}

#[test]
fn a_power_cut_while_tables_are_copied_leaves_either() {
    let scratch = Scratch::new("shared");
    let mut cuts = 0;
    for options in OPTIONS {
        for flagged in 0..=3 {
            let mut file = image(&scratch, options, flagged);
            let before = contents(&file);
            let low = crate::undercounted(&file);
            let random = &mut Random::new(flagged);
            let cut = |number: usize, recent: &[(u64, Vec<u8>)], durable: &[u8]| {
                let what = format!("{options}, {flagged} flags, write {number}");
                let mut left = after_power_cut(durable, recent, random);
                assert_kept(&before, &left, &what);
                let lower = &crate::undercounted(&left) - &low;
                assert!(lower.is_empty(), "{what}: clusters {lower:?}");
                repair(&mut left, RepairMode::All);
                assert_kept(&before, &left, &what);
                assert!(check(&left).is_clean() && has_own_tables(&left), "{what}");
                cuts += 1;
            };
            repair_cut(&mut file, RepairMode::All, Flushes::Work, cut);
        }
    }
    assert!(cuts > 100, "writes were interrupted: {cuts}");
}
