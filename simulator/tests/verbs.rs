//! Verbs under power cuts, and their rules broken on purpose.
#![cfg(feature = "broken-order")]

use gaur_simulator::verbs::{
    Cuts, Merge, amend, change_keys, commit_or_rebase, repair, repair_bitmaps, repair_snapshots,
};

/// Nothing is wrong with any seed, and there were at least so many cuts.
fn survives(seeds: u64, cuts_min: u64, verb: impl Fn(u64, bool) -> Cuts) {
    let cuts = |seed| verb(seed, false).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    let cuts: u64 = (0..seeds).map(cuts).sum();
    assert!(cuts > cuts_min, "{cuts} cuts");
}

/// A broken order of writes is noticed.
fn notices(seeds: u64, verb: impl Fn(u64, bool) -> Cuts) {
    let noticed = (0..seeds).find(|seed| verb(*seed, true).is_err());
    println!("noticed by seed {}", noticed.expect("rule O5 is broken"));
}

#[test]
fn a_power_cut_during_an_amendment_leaves_a_whole_image() {
    survives(200, 1500, amend);
}

#[test]
fn a_switch_to_refcounts_that_are_not_durable_is_noticed() {
    notices(300, amend);
}

#[test]
fn a_power_cut_during_a_change_of_keys_leaves_one_that_opens() {
    survives(60, 150, change_keys);
}

#[test]
fn a_key_slot_marked_active_before_its_key_is_durable_is_noticed() {
    notices(60, change_keys);
}

#[test]
fn a_power_cut_during_a_repair_loses_nothing_that_could_be_read() {
    survives(300, 1000, repair);
}

#[test]
fn a_power_cut_while_a_snapshot_table_is_replaced_loses_no_snapshot() {
    survives(120, 100, repair_snapshots);
}

#[test]
fn a_switch_to_a_snapshot_table_that_is_not_durable_is_noticed() {
    notices(300, repair_snapshots);
}

#[test]
fn a_power_cut_while_a_directory_of_bitmaps_is_replaced_loses_no_good_bitmap() {
    survives(120, 300, repair_bitmaps);
}

#[test]
fn a_switch_to_a_directory_of_bitmaps_that_is_not_durable_is_noticed() {
    notices(300, repair_bitmaps);
}

#[test]
fn a_power_cut_during_commit_or_rebase_leaves_the_same_disk() {
    for what in Merge::ALL {
        survives(200, 1000, |seed, breaks| {
            commit_or_rebase(seed, what, breaks)
        });
    }
}

#[test]
fn a_backing_file_named_before_its_name_is_durable_is_noticed() {
    notices(200, |seed, breaks| {
        commit_or_rebase(seed, Merge::Rebase, breaks)
    });
}
