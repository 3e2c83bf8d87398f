//! Seeds that must run clean: those that found bugs once, and a fixed budget of others.
//!
//! To replay a seed with its trace: `cargo xtask sim --seed S`.

use gaur_simulator::{Options, Stats, run_seed};

/// Crash images in a thousand that QEMU's tools judge as well.
const QEMU_PER_MILLE: u32 = 5;

fn run(seeds: impl IntoIterator<Item = u64>, encrypted: Option<bool>) -> Stats {
    let options = Options {
        encrypted,
        qemu_per_mille: QEMU_PER_MILLE,
        ..Options::default()
    };
    let mut total = Stats::default();
    for seed in seeds {
        match run_seed(seed, &options) {
            Ok((stats, _)) => total += stats,
            Err(failure) => panic!("{failure}\nreplay with: cargo xtask sim --seed {seed}"),
        }
    }
    println!("{total}");
    total
}

#[test]
fn seeds_that_found_bugs_run_clean() {
    let lines = include_str!("../seeds.txt").lines();
    let seeds = lines.filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let numbers: Vec<u64> = seeds
        .map(|line| {
            let first = line.split_whitespace().next();
            first
                .and_then(|number| number.parse().ok())
                .unwrap_or_else(|| panic!("seeds.txt: '{line}' does not start with a seed"))
        })
        .collect();
    assert!(!numbers.is_empty());
    // They are older than encryption.
    run(numbers, Some(false));
}

/// Seeds beyond those that `cargo xtask ci` runs, in parts so that they run at the same time.
const SEEDS_PER_PART: u64 = 40;

fn part(number: u64) {
    let first = 1_000_000 + number * SEEDS_PER_PART;
    let stats = run(first..first + SEEDS_PER_PART, None);
    // A part that crashes hardly ever, or never comes to an end in peace, tests nothing.
    assert!(stats.crash_points > 5 * SEEDS_PER_PART, "{stats}");
    assert!(stats.closes > SEEDS_PER_PART / 2, "{stats}");
    assert!(stats.faults > 0, "{stats}");
    assert!(stats.online_checks > SEEDS_PER_PART / 2, "{stats}");
}

#[test]
fn budget_part_0() {
    part(0);
}

#[test]
fn budget_part_1() {
    part(1);
}

#[test]
fn budget_part_2() {
    part(2);
}

#[test]
fn budget_part_3() {
    part(3);
}

/// Images that QEMU's tools have made, with its own layout, compression and snapshots.
#[test]
fn images_made_by_qemu_run_clean() {
    let options = Options {
        by_qemu: true,
        ..Options::default()
    };
    for seed in 0..25 {
        if let Err(failure) = run_seed(seed, &options) {
            panic!("{failure}\nreplay with: cargo xtask sim --seed {seed} --by-qemu");
        }
    }
}

/// Whatever a seed is about.
#[test]
#[cfg(feature = "broken-order")]
fn mixed_seeds_run_clean() {
    let mut total = Stats::default();
    // A check of the open image began while a machine's state was being saved; an encrypted data file grew while a
    // write to its end was on its way.
    let found = [1_795_434_395_595, 1_795_435_004_129];
    for seed in (0..60).chain(found) {
        match gaur_simulator::run_mixed(seed, &Options::default()) {
            Ok((stats, _)) => total += stats,
            Err(failure) => panic!("{failure}\nreplay with: cargo xtask sim --seed {seed} --mixed"),
        }
    }
    let loads = [
        total.cuts_compressed,
        total.cuts_encrypted,
        total.cuts_data_file,
        total.cuts_bitmaps,
    ];
    let verbs = [
        total.cuts_amend,
        total.cuts_keys,
        total.cuts_repair,
        total.cuts_commit,
        total.cuts_rebase,
    ];
    assert!(loads.iter().chain(&verbs).all(|cuts| *cuts > 0), "{total}");
}

/// Without this a seed in a report would be worth nothing.
#[test]
fn a_seed_gives_the_same_trace_each_time() {
    for seed in 20..30 {
        let options = Options::default();
        let first = run_seed(seed, &options).unwrap();
        let second = run_seed(seed, &options).unwrap();
        assert_eq!(first, second);
    }
}

#[test]
fn encrypted_images_survive_power_cuts() {
    let stats = run(2_000_000..2_000_060, Some(true));
    assert!(stats.crash_points > 300, "{stats}");
    assert!(stats.closes > 30, "{stats}");
}

/// The flushes of two files, and mappings whose places never change.
#[test]
fn images_with_a_data_file_run_clean() {
    // A write in place landed on what had been filled after its mapping was given up; it is one of an encrypted image.
    let found = 1_795_449_662_535;
    for encrypted in [false, true] {
        let options = Options {
            data_file: true,
            encrypted: Some(encrypted),
            ..Options::default()
        };
        let mut total = Stats::default();
        for seed in (0..40).chain([found]) {
            match run_seed(seed, &options) {
                Ok((stats, _)) => total += stats,
                Err(failure) => {
                    panic!("{failure}\nreplay with: cargo xtask sim --data-file [--encrypted]")
                }
            }
        }
        assert!(total.crash_points > 200, "{total}");
    }
}
