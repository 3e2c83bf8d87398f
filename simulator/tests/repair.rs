//! Repair under power cuts: whatever a cut leaves reads as before, and another repair makes it sound.

use std::path::Path;

use gaur_block::{Access, Host};
use gaur_engine::{ImageError, Job, repair};
use gaur_format::check::{RepairMode, Repaired};
use gaur_format::{Header, refcount};
use gaur_sim::{
    DiskProfile, FileImage, Random, Scheduler, SimFile, SimHost, Stop, Survivors, Trace,
};
use gaur_simulator::config::Config;
use gaur_simulator::content::ValueEncoding;
use gaur_simulator::judge;
use gaur_simulator::prepare::prepare;
use gaur_simulator::view::View;

const NAME: &str = "top.qcow2";

fn header(file: &FileImage) -> Header {
    Header::parse(&file.bytes(0, file.len_bytes().min(2 << 20) as usize)).unwrap()
}

fn u64_at(file: &FileImage, offset: u64) -> u64 {
    u64::from_be_bytes(file.bytes(offset, 8).try_into().unwrap())
}

/// Changes refcounts at random, or loses a block or the whole table of them.
fn damage(file: &mut FileImage, random: &mut Random) {
    let header = header(file);
    let (geometry, table) = (header.geometry(), header.refcount_table_offset.0);
    let size = geometry.cluster_size() as usize;
    match random.below(4) {
        0 => file.write(table, &[0; 8]),
        1 => file.write(table, &vec![0; size]),
        _ => {
            let block = u64_at(file, table);
            let mut bytes = file.bytes(block, size);
            for _ in 0..20 {
                let clusters = geometry.clusters_for(file.len_bytes());
                let index = random.below(clusters.min(geometry.refcount_block_entries()));
                let value = random.below(4).min(geometry.refcount_max());
                refcount::set(&mut bytes, geometry.refcount_order(), index, value).unwrap();
            }
            file.write(block, &bytes);
        }
    }
}

/// What is read of an image: the disk and its snapshots.
fn contents(file: &FileImage) -> Vec<Vec<u8>> {
    View::open(file, &[]).unwrap().contents().unwrap()
}

/// A repair of all, with rule O5 broken if the build lets it be.
async fn repair_all(file: &SimFile, _breaks: bool) -> Result<Repaired, ImageError> {
    let (mode, job) = (RepairMode::All, Job::default());
    #[cfg(feature = "broken-order")]
    if _breaks {
        return gaur_engine::repair_breaking(file, mode, &job, Some(gaur_engine::BrokenRule::O5))
            .await;
    }
    repair(file, mode, false, &job).await
}

/// A machine on which a repair of the image has begun.
fn repairing(
    seed: u64,
    file: FileImage,
    profile: DiskProfile,
    breaks: bool,
) -> (Scheduler, SimHost) {
    let scheduler = Scheduler::new(seed, Trace::default());
    let handle = scheduler.handle();
    let host = SimHost::from_images(&handle, [(NAME, file, profile)]);
    let machine = host.clone();
    handle.spawn("repair", async move {
        let access = Access {
            write: true,
            direct: false,
            lock: true,
            force_share: false,
        };
        let file = machine.open(Path::new(NAME), access).await.unwrap();
        let repaired = repair_all(&file, breaks).await;
        assert!(repaired.unwrap().after.is_clean(), "seed {seed}");
    });
    (scheduler, host)
}

fn repaired(seed: u64, file: FileImage, profile: DiskProfile) -> FileImage {
    let (mut scheduler, host) = repairing(seed, file, profile, false);
    assert_eq!(scheduler.run(10_000_000).unwrap(), Stop::Done);
    host.crash_images(Survivors::Nothing, &mut Random::new(seed))[NAME].clone()
}

/// Damages the entry of a snapshot, or says that there are more; what is left to be read afterwards.
fn damage_snapshots(file: &mut FileImage, random: &mut Random) -> Vec<Vec<u8>> {
    let mut left = contents(file);
    let table = header(file).snapshots_offset.0;
    let count = (left.len() as u64 - 1) / 2;
    let lengths = |at: u64| u64_at(file, at + 8) & 0xffff_ffff;
    let mut at = table;
    let number = random.below(count);
    for _ in 0..number {
        let names = (lengths(at) >> 16) + (lengths(at) & 0xffff);
        let extra = u64_at(file, at + 32) & 0xffff_ffff;
        at += (40 + extra + names).next_multiple_of(8);
    }
    let gone = 1 + 2 * number as usize;
    match random.below(4) {
        0 => file.write(at, &(u64_at(file, at) + 8).to_be_bytes()),
        1 => file.write(at, &(1_u64 << 45).to_be_bytes()),
        2 => file.write(at + 8, &[0x7f; 4]),
        _ => {
            file.write(at + 36, &[0xff; 4]);
            left.truncate(gone);
            return left;
        }
    }
    left.drain(gone..gone + 2);
    left
}

/// Repairs with power cuts, and again after each: what reads differently then, or is not sound.
fn cut_while_tables_are_replaced(seed: u64, breaks: bool) -> (u64, Option<String>) {
    let config = Config::draw(seed);
    let random = &mut Random::new(seed);
    let script = ValueEncoding::new(seed, config.unit_bytes);
    let mut file = prepare(&config.image, script, &mut 0, random).file;
    if header(&file).nb_snapshots == 0 {
        return (0, None);
    }
    let expected = damage_snapshots(&mut file, random);
    let profile = DiskProfile::default();
    let (mut scheduler, host) = repairing(seed, file, profile, breaks);
    for cuts in 1.. {
        let stop = scheduler.run(1 + random.below(4)).unwrap();
        let left = host.crash_images(Survivors::draw(random), random)[NAME].clone();
        let whole = repaired(seed, left, profile);
        if contents(&whole) != expected {
            return (cuts, Some("other disks".to_owned()));
        }
        match judge::check(&whole, config.image.shape) {
            Ok(counts) if counts.leaks == 0 => {}
            wrong => return (cuts, Some(format!("{wrong:?}"))),
        }
        if stop == Stop::Done {
            return (cuts, None);
        }
    }
    (0, None)
}

#[test]
fn a_power_cut_while_a_snapshot_table_is_replaced_loses_no_snapshot() {
    let mut cuts = 0;
    for seed in 0..120 {
        let (more, wrong) = cut_while_tables_are_replaced(seed, false);
        assert_eq!(wrong, None, "seed {seed}");
        cuts += more;
    }
    assert!(cuts > 100, "{cuts} cuts were repaired");
}

#[cfg(feature = "broken-order")]
#[test]
fn a_switch_to_a_snapshot_table_that_is_not_durable_is_noticed() {
    let noticed = (0..300).find(|seed| cut_while_tables_are_replaced(*seed, true).1.is_some());
    println!(
        "noticed after {} seeds",
        noticed.expect("rule O5 is broken") + 1
    );
}

#[test]
fn a_power_cut_during_a_repair_loses_nothing_that_could_be_read() {
    let mut cuts = 0;
    for seed in 0..300 {
        let config = Config::draw(seed);
        let random = &mut Random::new(seed);
        let script = ValueEncoding::new(seed, config.unit_bytes);
        let mut file = prepare(&config.image, script, &mut 0, random).file;
        let before = contents(&file);
        damage(&mut file, random);
        let profile = DiskProfile {
            request_alignment: random.pick(&[1, 512]),
            memory_alignment: 512,
            ..DiskProfile::default()
        };
        let (mut scheduler, host) = repairing(seed, file, profile, false);
        loop {
            let stop = scheduler.run(1 + random.below(12)).unwrap();
            let left = host.crash_images(Survivors::draw(random), random)[NAME].clone();
            assert!(contents(&left) == before, "seed {seed}");
            let whole = repaired(seed, left, profile);
            assert!(contents(&whole) == before, "seed {seed}: repaired");
            let counts = judge::check(&whole, config.image.shape);
            assert_eq!(counts.unwrap().leaks, 0, "seed {seed}");
            cuts += 1;
            if stop == Stop::Done {
                break;
            }
        }
        let whole = host.images()[NAME].clone();
        judge::check(&whole, config.image.shape).unwrap_or_else(|what| panic!("{seed}: {what}"));
    }
    assert!(cuts > 1000, "{cuts} cuts were repaired");
}
