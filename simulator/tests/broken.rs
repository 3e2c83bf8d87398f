//! The simulator can fail: with a rule of the write order broken on purpose, it does.
#![cfg(feature = "broken-order")]

use gaur_simulator::{Options, Rule, run_seed};

/// Seeds within which a broken rule has to be noticed.
const SEEDS_MAX: u64 = 200;

fn is_noticed(rule: Rule) {
    is_noticed_with(rule, false);
}

fn is_noticed_with(rule: Rule, packed: bool) {
    let options = Options {
        broken: Some(rule),
        packed,
        // The rule is about images that have some.
        bitmaps: rule == Rule::O9,
        ..Options::default()
    };
    let seed = (0..SEEDS_MAX).find(|&seed| run_seed(seed, &options).is_err());
    let seed =
        seed.unwrap_or_else(|| panic!("{SEEDS_MAX} seeds do not notice that {rule:?} is broken"));
    println!("{rule:?}: noticed after {} seeds", seed + 1);
}

#[test]
fn broken_o1_is_noticed() {
    is_noticed(Rule::O1);
}

#[test]
fn broken_o2_is_noticed() {
    is_noticed(Rule::O2);
}

#[test]
fn broken_o3_is_noticed() {
    is_noticed(Rule::O3);
}

#[test]
fn broken_o4_is_noticed() {
    is_noticed(Rule::O4);
}

#[test]
fn broken_o5_is_noticed() {
    is_noticed(Rule::O5);
}

#[test]
fn broken_o8_is_noticed() {
    is_noticed(Rule::O8);
}

#[test]
fn broken_o9_is_noticed() {
    is_noticed(Rule::O9);
}

#[test]
fn a_check_that_is_not_told_of_changes_is_noticed() {
    is_noticed(Rule::Watch);
}

#[test]
fn a_copy_on_read_over_a_write_is_noticed() {
    is_noticed(Rule::Copy);
}

#[test]
fn a_log_whose_marks_are_stored_first_is_noticed() {
    is_noticed(Rule::Log);
}

#[test]
fn broken_rules_are_noticed_where_writes_are_compressed() {
    for rule in [Rule::O1, Rule::O2, Rule::O3] {
        is_noticed_with(rule, true);
    }
}

#[test]
fn missing_flush_of_the_data_file_is_noticed() {
    for encrypted in [false, true] {
        let options = Options {
            broken: Some(Rule::Data),
            data_file: true,
            encrypted: Some(encrypted),
            ..Options::default()
        };
        let seed = (0..SEEDS_MAX).find(|&seed| run_seed(seed, &options).is_err());
        println!("noticed by seed {}", seed.expect("a flush is missing"));
    }
}

#[test]
fn broken_o7_is_noticed() {
    is_noticed(Rule::O7);
}
