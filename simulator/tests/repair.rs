//! Repair under power cuts: whatever a cut leaves reads as before, and another repair makes it sound.

use std::path::Path;

use gaur_block::{Access, Host};
use gaur_engine::{Job, repair};
use gaur_format::check::RepairMode;
use gaur_format::{Header, refcount};
use gaur_sim::{DiskProfile, FileImage, Random, Scheduler, SimHost, Stop, Survivors, Trace};
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

/// A machine on which a repair of the image has begun.
fn repairing(seed: u64, file: FileImage, profile: DiskProfile) -> (Scheduler, SimHost) {
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
        let repaired = repair(&file, RepairMode::All, false, &Job::default()).await;
        assert!(repaired.unwrap().after.is_clean(), "seed {seed}");
    });
    (scheduler, host)
}

fn repaired(seed: u64, file: FileImage, profile: DiskProfile) -> FileImage {
    let (mut scheduler, host) = repairing(seed, file, profile);
    assert_eq!(scheduler.run(10_000_000).unwrap(), Stop::Done);
    host.crash_images(Survivors::Nothing, &mut Random::new(seed))[NAME].clone()
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
        let (mut scheduler, host) = repairing(seed, file, profile);
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
