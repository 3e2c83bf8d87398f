//! Seeds that differ in what they are about: a load on an image with some of the format's features, or a verb.

use gaur_sim::Random;

use crate::run::{Failure, Options, caught, run_seed};
use crate::stats::Stats;
use crate::verbs::{self, Cuts, Merge};

/// Runs a seed about something that it draws. `options` says what else there is to say.
pub fn run_mixed(seed: u64, options: &Options) -> Result<(Stats, u64), Failure> {
    let mut random = Random::new(seed ^ 0x6d69_7865_6421_0b5f);
    match random.chance(500) {
        true => run_load(seed, options, &mut random),
        false => run_verb(seed, &mut random),
    }
}

fn run_load(seed: u64, options: &Options, random: &mut Random) -> Result<(Stats, u64), Failure> {
    let (data_file, encrypted) = (random.chance(250), random.chance(250));
    let options = Options {
        data_file,
        encrypted: Some(encrypted),
        // There is nothing compressed in either.
        packed: random.chance(500) && !data_file && !encrypted,
        bitmaps: random.chance(500) && !data_file,
        ..options.clone()
    };
    let (mut stats, hash) = run_seed(seed, &options)?;
    for (there, count) in [
        (options.packed, &mut stats.cuts_compressed),
        (options.encrypted == Some(true), &mut stats.cuts_encrypted),
        (options.data_file, &mut stats.cuts_data_file),
        (options.bitmaps, &mut stats.cuts_bitmaps),
    ] {
        *count = if there { stats.crash_points } else { 0 };
    }
    Ok((stats, hash))
}

fn run_verb(seed: u64, random: &mut Random) -> Result<(Stats, u64), Failure> {
    let mut stats = Stats {
        seeds: 1,
        ..Stats::default()
    };
    type Verb = fn(u64) -> Cuts;
    let (verb, count): (Verb, _) = match random.below(8) {
        0 | 1 => (|seed| verbs::amend(seed, false), &mut stats.cuts_amend),
        2 => (|seed| verbs::change_keys(seed, false), &mut stats.cuts_keys),
        3 => (|seed| verbs::repair(seed, false), &mut stats.cuts_repair),
        4 => (
            |seed| verbs::repair_snapshots(seed, false),
            &mut stats.cuts_repair,
        ),
        5 => (
            |seed| verbs::repair_bitmaps(seed, false),
            &mut stats.cuts_repair,
        ),
        6 => (
            |seed| verbs::commit_or_rebase(seed, Merge::Commit, false),
            &mut stats.cuts_commit,
        ),
        _ => (
            |seed| match seed % 2 {
                0 => verbs::commit_or_rebase(seed, Merge::Rebase, false),
                _ => verbs::commit_or_rebase(seed, Merge::StandAlone, false),
            },
            &mut stats.cuts_rebase,
        ),
    };
    *count = caught(seed, || verb(seed))?;
    stats.crash_points = *count;
    Ok((stats, 0))
}
