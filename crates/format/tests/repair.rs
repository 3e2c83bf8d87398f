//! Repair of damaged images: what could be read reads as the same, whatever happens; what can be repaired is
//! clean afterwards, for this crate's checker and for QEMU's.
//!
//! `qemu-img` and `qemu-io` must be on the PATH; without them these tests fail.

#![allow(clippy::disallowed_methods, reason = "tests look at files")]

#[path = "repair/bitmaps.rs"]
mod bitmaps;
#[path = "repair/damage.rs"]
mod damage;
#[path = "repair/image.rs"]
mod image;
mod qemu;
#[path = "repair/random.rs"]
mod random;
#[path = "repair/shared_tables.rs"]
mod shared_tables;
#[path = "repair/snapshots.rs"]
mod snapshots;

use std::collections::BTreeSet;

use gaur_format::check::{Finding, Repair, RepairMode, RepairStep, Report, Severity};
use image::{
    Flushes, after_power_cut, assert_kept, check, contents, contents_of, part, repair, repair_cut,
};
use qemu::Scratch;
use random::Random;

/// Images with data, zeros, compressed clusters, snapshots, in all widths of refcounts that can count them.
fn images(scratch: &Scratch) -> Vec<(&'static str, Vec<u8>)> {
    let options = [
        "compat=0.10,cluster_size=4k",
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=8",
        "cluster_size=64k",
        "cluster_size=16k,extended_l2=on,refcount_bits=64",
        "cluster_size=4k,refcount_bits=2",
    ];
    options
        .map(|options| (options, image_with(scratch, options)))
        .into()
}

fn image_with(scratch: &Scratch, options: &str) -> Vec<u8> {
    let path = scratch.path("made.qcow2");
    qemu::img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "2M"]);
    qemu::io(&path, &["write -P 1 0 300k"]);
    // Many compressed clusters share one, more than a narrow refcount can say.
    if !options.ends_with("bits=2") {
        qemu::io(&path, &["write -c -P 9 512k 64k"]);
    }
    qemu::img(&["snapshot", "-c", "first", &path]);
    let zero = match options.contains("0.10") {
        true => "discard 64k 64k",
        false => "write -z 64k 64k",
    };
    qemu::io(&path, &["write -P 3 100k 70k", zero, "write -P 4 1M 90k"]);
    std::fs::read(&path).unwrap()
}

fn assert_qemu_clean(scratch: &Scratch, file: &[u8], what: &str) {
    let path = scratch.path("judged.qcow2");
    std::fs::write(&path, file).unwrap();
    let theirs = qemu::check(&path);
    for key in ["corruptions", "leaks", "check-errors"] {
        assert_eq!(theirs.number(key), 0, "{what}: {}", qemu::check_text(&path));
    }
}

/// Compares with what QEMU's repair makes of the same damage; `false` where it gives up.
fn reads_as_after_qemu(scratch: &Scratch, damaged: &[u8], ours: &[u8], what: &str) -> bool {
    let path = scratch.path("theirs.qcow2");
    std::fs::write(&path, damaged).unwrap();
    if !qemu::repair(&path) {
        return false;
    }
    let theirs = std::fs::read(&path).unwrap();
    assert!(contents(&theirs) == contents(ours), "{what}");
    true
}

#[test]
fn mild_damage_is_repaired_wholly_and_nothing_reads_differently() {
    let scratch = Scratch::new("repair");
    let mut compared = 0;
    for (options, whole) in images(&scratch) {
        assert!(check(&whole).is_clean(), "{options}");
        for seed in 0..100 {
            let random = &mut Random::new(seed);
            let mut file = whole.clone();
            (0..=random.below(3)).for_each(|_| damage::mild(&mut file, random));
            let what = format!("{options}, seed {seed}");
            let (before, damaged) = (contents(&file), file.clone());
            let repaired = repair(&mut file, RepairMode::All);
            assert_kept(&before, &file, &what);
            let report = check(&file);
            assert!(report.is_clean(), "{what}: {report:#?} after {repaired:#?}");
            assert_eq!(repaired.after, report, "{what}");
            if seed % 10 == 0 {
                assert_qemu_clean(&scratch, &file, &what);
                compared += u32::from(reads_as_after_qemu(&scratch, &damaged, &file, &what));
            }
        }
    }
    assert!(compared > 20, "QEMU repaired {compared}");
}

/// Corruptions and check errors. A copied flag that is clear costs a copy and harms nothing; where two structures
/// claim a table, nothing is written to it.
fn harm(report: &Report) -> u64 {
    let harmless = |finding: &&Finding| finding.message.contains("copied flag is clear");
    let harmless = report.messages.iter().filter(harmless);
    let harmless: u64 = harmless.map(|finding| finding.times).sum();
    report.corruptions + report.check_errors - harmless
}

#[test]
fn wild_damage_loses_nothing_that_could_be_read() {
    let scratch = Scratch::new("repair");
    let mut clean = 0;
    for (options, whole) in images(&scratch) {
        for seed in 0..150 {
            let random = &mut Random::new(seed);
            let mut file = whole.clone();
            (0..=random.below(3)).for_each(|_| damage::wild(&mut file, random));
            let what = format!("{options}, seed {seed}");
            let (before, old) = (contents(&file), check(&file));
            let repaired = repair(&mut file, RepairMode::All);
            assert_kept(&before, &file, &format!("{what}: {:#?}", repaired.actions));
            let report = check(&file);
            assert!(
                harm(&report) <= harm(&old),
                "{what}: {old:#?} became {report:#?} by {:#?}",
                repaired.actions
            );
            clean += u32::from(report.is_clean());
            // What a repair leaves it leaves for good.
            let left = file.clone();
            let again = repair(&mut file, RepairMode::All);
            assert_eq!(again.corruptions_fixed, 0, "{what}: {again:#?}");
            assert!(
                left == file,
                "{what}: a second repair changes something: {again:#?}"
            );
        }
    }
    assert!(clean > 300, "most of it can be repaired: {clean}");
}

#[test]
fn leaks_alone_are_repaired_without_a_change_of_anything_else() {
    let scratch = Scratch::new("repair");
    for (options, whole) in images(&scratch) {
        for seed in 0..40 {
            let random = &mut Random::new(seed);
            let mut file = whole.clone();
            (0..=random.below(3)).for_each(|_| damage::mild(&mut file, random));
            let what = format!("{options}, seed {seed}");
            let (before, old) = (contents(&file), check(&file));
            let repaired = repair(&mut file, RepairMode::Leaks);
            assert_kept(&before, &file, &what);
            let report = check(&file);
            assert!(
                report.corruptions <= old.corruptions,
                "{what}: {repaired:#?}"
            );
            assert!(report.leaks <= old.leaks, "{what}: {repaired:#?}");
            if old.check_errors == 0 && old.corruptions == 0 {
                assert!(report.is_clean(), "{what}: {repaired:#?}");
            }
        }
    }
}

#[test]
fn a_power_cut_at_any_write_leaves_an_image_that_is_no_worse() {
    let scratch = Scratch::new("repair");
    let mut cuts = 0;
    for (options, whole) in images(&scratch) {
        for seed in 0..12 {
            let random = &mut Random::new(seed);
            let mut file = whole.clone();
            (0..=random.below(3)).for_each(|_| damage::mild(&mut file, random));
            let before = contents(&file);
            let low = undercounted(&file);
            repair_cut(
                &mut file,
                RepairMode::All,
                Flushes::Work,
                |number, recent, durable| {
                    let what = format!("{options}, seed {seed}, write {number}");
                    let mut left = after_power_cut(durable, recent, random);
                    assert_kept(&before, &left, &what);
                    let lower = &undercounted(&left) - &low;
                    assert!(lower.is_empty(), "{what}: clusters {lower:?}");
                    repair(&mut left, RepairMode::All);
                    assert_kept(&before, &left, &what);
                    assert!(check(&left).is_clean(), "{what}: {:#?}", check(&left));
                    cuts += 1;
                },
            );
        }
    }
    assert!(cuts > 150, "writes were interrupted: {cuts}");
}

/// Clusters with fewer refcounts than references: what a writer takes for free, or for its own.
fn undercounted(file: &[u8]) -> BTreeSet<u64> {
    let report = check(file);
    let number = |finding: &Finding| {
        let rest = finding.message.strip_prefix("cluster ")?;
        rest.split(' ').next()?.parse().ok()
    };
    let found = report.messages.iter();
    found
        .filter(|finding| finding.severity == Severity::Corruption)
        .filter_map(number)
        .collect()
}

#[test]
fn a_repair_without_flushes_is_noticed() {
    let scratch = Scratch::new("repair");
    let mut worse = 0;
    for (_, whole) in images(&scratch) {
        for seed in 0..12 {
            let random = &mut Random::new(seed);
            let mut file = whole.clone();
            (0..=random.below(3)).for_each(|_| damage::mild(&mut file, random));
            let low = undercounted(&file);
            repair_cut(
                &mut file,
                RepairMode::All,
                Flushes::Ignored,
                |_, recent, durable| {
                    let left = after_power_cut(durable, recent, random);
                    worse += usize::from(!undercounted(&left).is_subset(&low));
                },
            );
        }
    }
    assert!(worse > 0, "the judge sees what flushes are for");
}

#[test]
fn a_dry_run_writes_nothing_and_tells_what_a_repair_does() {
    let scratch = Scratch::new("repair");
    for (options, whole) in images(&scratch) {
        for seed in 0..30 {
            let mut file = whole.clone();
            damage::mild(&mut file, &mut Random::new(seed));
            let mut dry = Repair::new(&file, file.len() as u64, RepairMode::All, true).unwrap();
            let told = loop {
                match dry.next() {
                    RepairStep::Need { offset, len } => dry.feed(&part(&file, offset, len)),
                    RepairStep::Done(told) => break told,
                    step => panic!("{options}, seed {seed}: {step:?}"),
                }
            };
            let done = repair(&mut file, RepairMode::All);
            let fixed = (done.corruptions_fixed, told.corruptions_fixed);
            assert_eq!(
                fixed.0 > 0,
                fixed.1 > 0,
                "{options}, seed {seed}: {told:#?}"
            );
            assert_eq!(told.before, done.before, "{options}, seed {seed}");
        }
    }
}

/// A header that leads to no refcount table; whatever interrupts the repair, the next one makes one.
#[test]
fn a_refcount_table_that_the_header_lost_is_made_anew() {
    let scratch = Scratch::new("repair");
    for (options, whole) in images(&scratch) {
        let expected = contents(&whole);
        let losses: [(usize, &[u8]); 4] = [
            (56, &[0; 4]),
            (56, &[0xff; 4]),
            (48, &[0; 8]),
            (48, &0x1_0001_u64.to_be_bytes()),
        ];
        for (at, bytes) in losses {
            let mut file = whole.clone();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            let (damaged, len) = (file.clone(), file.len() as u64);
            assert!(Repair::new(&file, len, RepairMode::Leaks, false).is_err());
            let mut left = Vec::new();
            let repaired = repair_cut(
                &mut file,
                RepairMode::All,
                Flushes::Work,
                |_, recent, durable| {
                    let random = &mut Random::new(recent.len() as u64);
                    left.push(after_power_cut(durable, recent, random));
                },
            );
            assert!(repaired.after.is_clean(), "{options}: {repaired:#?}");
            assert!(contents(&file) == expected, "{options}");
            assert_qemu_clean(&scratch, &file, options);
            assert!(file[..damaged.len()][..72] != damaged[..72]);
            assert!(left.len() > 2, "{options}");
            for mut file in left {
                repair(&mut file, RepairMode::All);
                assert!(
                    check(&file).is_clean() && contents(&file) == expected,
                    "{options}"
                );
            }
        }
    }
}

#[test]
fn a_copied_flag_without_a_table_is_cleared() {
    let scratch = Scratch::new("repair");
    let mut cleared = 0;
    for (options, whole) in images(&scratch) {
        let mut file = whole.clone();
        let l1 = image::l1_tables(&file)[0].0;
        let entries = (0..image::l1_tables(&file)[0].1).map(|index| l1 + index * 8);
        let Some(at) = entries
            .into_iter()
            .find(|at| image::u64_at(&file, *at) == 0)
        else {
            continue;
        };
        image::put(&mut file, at, &(1_u64 << 63).to_be_bytes());
        assert_eq!(check(&file).corruptions, 1, "{options}");
        let repaired = repair(&mut file, RepairMode::All);
        assert!(
            repaired.after.is_clean() && file == whole,
            "{options}: {repaired:#?}"
        );
        cleared += 1;
    }
    assert!(cleared > 0);
}

/// Images with three snapshots, each of another disk. Behind the table of snapshots there are zeros.
fn images_with_snapshots(scratch: &Scratch) -> Vec<(&'static str, Vec<u8>)> {
    let options = [
        "compat=0.10,cluster_size=4k",
        "cluster_size=4k",
        "cluster_size=16k,extended_l2=on,refcount_bits=64",
    ];
    let make = |options| {
        let path = scratch.path("made.qcow2");
        qemu::img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "2M"]);
        for (number, name) in ["first", "second", "third"].iter().enumerate() {
            let write = format!("write -P {} {}k 80k", number + 1, number * 40);
            qemu::io(&path, &[&write]);
            qemu::img(&["snapshot", "-c", name, &path]);
        }
        qemu::io(&path, &["write -P 7 20k 50k"]);
        (options, std::fs::read(&path).unwrap())
    };
    options.map(make).into()
}

/// Whether this damage is none in an image of this version.
fn is_none(options: &str, what: &str) -> bool {
    options.contains("0.10") && what.ends_with("incomplete")
}

#[test]
fn a_damaged_snapshot_table_loses_only_what_cannot_be_read() {
    let scratch = Scratch::new("repair");
    for (options, whole) in images_with_snapshots(&scratch) {
        for what in snapshots::DAMAGES {
            let mut file = whole.clone();
            let left = snapshots::damage(&mut file, what);
            let expected = contents_of(&whole, &left);
            let what = &format!("{options}, {what}");
            let repaired = repair(&mut file, RepairMode::All);
            assert!(repaired.after.is_clean(), "{what}: {repaired:#?}");
            assert!(check(&file).is_clean(), "{what}");
            assert!(
                contents(&file) == expected,
                "{what}: {:#?}",
                repaired.actions
            );
            assert_qemu_clean(&scratch, &file, what);
            let before = file.clone();
            let again = repair(&mut file, RepairMode::All);
            assert!(before == file && again.actions.is_empty(), "{what}");
            assert_eq!(
                repaired.corruptions_fixed == 0,
                is_none(options, what),
                "{what}"
            );
        }
    }
}

#[test]
fn a_snapshot_that_is_dropped_is_named_also_by_a_dry_run_and_its_space_is_free() {
    let scratch = Scratch::new("repair");
    let (_, whole) = images_with_snapshots(&scratch).swap_remove(1);
    let mut file = whole.clone();
    snapshots::damage(&mut file, "unaligned");
    let damaged = file.clone();
    let mut dry = Repair::new(&file, file.len() as u64, RepairMode::All, true).unwrap();
    let told = loop {
        match dry.next() {
            RepairStep::Need { offset, len } => dry.feed(&part(&file, offset, len)),
            RepairStep::Done(told) => break told,
            step => panic!("{step:?}"),
        }
    };
    let done = repair(&mut file, RepairMode::All);
    assert_eq!(told.actions[0], done.actions[0]);
    assert!(
        done.actions[0]
            .text
            .starts_with("snapshot 2 ('second') is dropped: "),
        "{done:#?}"
    );
    assert!(
        told.leaks_fixed > 0 && done.leaks_fixed > told.leaks_fixed,
        "the old table as well"
    );
    let names: Vec<_> = snapshots::snapshots(&file)
        .into_iter()
        .map(|one| one.name)
        .collect();
    assert_eq!(names, [b"first".to_vec(), b"third".to_vec()]);
    let mut leaks = damaged.clone();
    let repaired = repair(&mut leaks, RepairMode::Leaks);
    assert!(
        repaired.actions.is_empty() && leaks == damaged,
        "{repaired:#?}"
    );
}

/// Repairs that are cut off at every write, with every other sector since the last flush.
#[derive(Default)]
struct Cuts {
    /// Those with flushes that work.
    judged: usize,
    /// Those after which something was lost.
    worse: usize,
}

impl Cuts {
    /// Cuts off the repair of `damaged`. `keeps` gets what is left, what it is and whether flushes worked, and repairs it
    /// again: whether nothing is lost, which is only wrong without flushes.
    fn add(
        &mut self,
        damaged: &[u8],
        (what, seed): (&str, u64),
        mut keeps: impl FnMut(Vec<u8>, &str, bool) -> bool,
    ) {
        let random = &mut Random::new(seed);
        for flushes in [Flushes::Work, Flushes::Ignored] {
            let is_judged = flushes == Flushes::Work;
            let mut file = damaged.to_vec();
            repair_cut(
                &mut file,
                RepairMode::All,
                flushes,
                |number, recent, durable| {
                    let left = after_power_cut(durable, recent, random);
                    let kept = keeps(left, &format!("{what}, write {number}"), is_judged);
                    self.judged += usize::from(is_judged);
                    self.worse += usize::from(!kept);
                },
            );
        }
    }

    fn assert_more_than(&self, judged: usize) {
        assert!(
            self.judged > judged,
            "writes were interrupted: {}",
            self.judged
        );
        assert!(self.worse > 0, "the judge sees what flushes are for");
    }
}

#[test]
fn a_power_cut_while_a_snapshot_table_is_replaced_loses_nothing() {
    let scratch = Scratch::new("repair");
    let mut cuts = Cuts::default();
    for (options, whole) in images_with_snapshots(&scratch) {
        for (what, seed) in snapshots::DAMAGES.iter().zip(0..) {
            let mut damaged = whole.clone();
            let left = snapshots::damage(&mut damaged, what);
            let (active, expected) = (&left[..1], contents_of(&whole, &left));
            let case = (&*format!("{options}, {what}"), seed);
            cuts.add(&damaged, case, |mut left, what, is_judged| {
                if is_judged {
                    // Whatever number of snapshots the header has.
                    let mut disk = left.clone();
                    image::put(&mut disk, gaur_format::header::field::NB_SNAPSHOTS, &[0; 4]);
                    let disk = contents_of(&disk, active);
                    assert!(disk == contents_of(&whole, active), "{what}");
                }
                let repaired = repair(&mut left, RepairMode::All);
                let kept = contents(&left) == expected && repaired.after.is_clean();
                assert!(kept || !is_judged, "{what}: {repaired:#?}");
                kept
            });
        }
    }
    cuts.assert_more_than(100);
}

/// Images with three bitmaps. With a backing file the extension that leads to them lies behind the first sector.
fn images_with_bitmaps(scratch: &Scratch) -> Vec<(&'static str, Vec<u8>)> {
    let base = scratch.path("base.qcow2");
    qemu::img(&["create", "-q", "-f", "qcow2", &base, "2M"]);
    let make = |options: &'static str| {
        let path = scratch.path("made.qcow2");
        let mut create = vec!["create", "-q", "-f", "qcow2", "-o", options];
        if options.ends_with("16k") {
            create.extend(["-b", &base, "-F", "qcow2"]);
        }
        create.extend([path.as_str(), "2M"]);
        qemu::img(&create);
        qemu::io(&path, &["write -P 1 0 80k"]);
        for name in ["first", "second", "third"] {
            qemu::img(&["bitmap", "--add", "-g", "512", &path, name]);
        }
        qemu::io(&path, &["write -P 7 20k 50k", "write -P 8 1M 9k"]);
        (options, std::fs::read(&path).unwrap())
    };
    ["cluster_size=4k", "cluster_size=16k"].map(make).into()
}

/// What stays of the bitmaps of `whole`.
fn bitmaps_left(whole: &[u8], loses_all: bool) -> Vec<gaur_format::bitmap::Bitmap> {
    let mut all = bitmaps::bitmaps(whole);
    assert_eq!(all.len(), 3);
    all.remove(1);
    all.retain(|_| !loses_all);
    all
}

#[test]
fn a_damaged_bitmap_is_removed_and_the_others_stay() {
    let scratch = Scratch::new("repair");
    for (options, whole) in images_with_bitmaps(&scratch) {
        for (what, loses_all) in bitmaps::DAMAGES {
            let mut file = whole.clone();
            bitmaps::damage(&mut file, what);
            let what = &format!("{options}, {what}");
            let repaired = repair(&mut file, RepairMode::All);
            assert!(repaired.after.is_clean(), "{what}: {repaired:#?}");
            assert!(check(&file).is_clean(), "{what}");
            assert!(contents(&file) == contents(&whole), "{what}");
            let action = match loses_all {
                true => "bitmap directory is dropped, with all bitmaps: ",
                false => "bitmap 'second' is removed: ",
            };
            let first = &repaired.actions[0];
            assert!(first.text.starts_with(action), "{what}: {repaired:#?}");
            assert_eq!(
                bitmaps::bitmaps(&file),
                bitmaps_left(&whole, loses_all),
                "{what}"
            );
            assert_qemu_clean(&scratch, &file, what);
            let before = file.clone();
            let again = repair(&mut file, RepairMode::All);
            assert!(before == file && again.actions.is_empty(), "{what}");
        }
    }
}

#[test]
fn a_power_cut_while_a_bitmap_is_removed_loses_no_other() {
    let scratch = Scratch::new("repair");
    let mut cuts = Cuts::default();
    for (options, whole) in images_with_bitmaps(&scratch) {
        let disk = contents(&whole);
        for ((what, loses_all), seed) in bitmaps::DAMAGES.into_iter().zip(0..) {
            let mut damaged = whole.clone();
            bitmaps::damage(&mut damaged, what);
            let case = (&*format!("{options}, {what}"), seed);
            cuts.add(&damaged, case, |mut left, what, is_judged| {
                assert!(contents(&left) == disk, "{what}");
                let repaired = repair(&mut left, RepairMode::All);
                let kept = bitmaps::bitmaps(&left) == bitmaps_left(&whole, loses_all);
                let kept = kept && repaired.after.is_clean();
                assert!(kept || !is_judged, "{what}: {repaired:#?}");
                kept
            });
        }
    }
    cuts.assert_more_than(60);
}
