//! Checks of open images, while requests of several queues go on.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;

use gaur_block::{Device, Payload, Request, Source};
use gaur_format::addr::{ClusterIndex, GuestOffset, HostOffset};
use gaur_format::plan::CreateOptions;
use gaur_format::{Header, refcount};

use super::{Checked, ROUNDS_MAX};
use crate::chain::open;
use crate::create::create;
use crate::error::ErrorKind;
use crate::job::Job;
use crate::options::{Format, OpenOptions};
use crate::queue::Queue;
use crate::references::References;
use crate::snapshot::NewSnapshot;
use crate::test_file::{
    Random, TestFile, TestHost, block_on, cached_limits, check_clean, checked, run_shuffled,
};
use crate::vmstate::VmStateSave;

const SIZE: u64 = 2 << 20;
const SECTOR: u64 = 512;
/// Behind this the load changes nothing.
const LOAD_END: u64 = SIZE - (256 << 10);

fn shapes() -> Vec<CreateOptions> {
    let with = |cluster_bits, extended_l2, refcount_order| CreateOptions {
        size_bytes: SIZE,
        cluster_bits,
        extended_l2,
        refcount_order,
        ..CreateOptions::default()
    };
    vec![
        with(9, false, 4),
        with(12, false, 0),
        with(12, false, 1),
        with(14, true, 6),
        with(16, false, 4),
    ]
}

fn opened(bytes: Vec<u8>, read_only: bool, jitter: (u64, u64)) -> (TestFile, Vec<Queue<TestFile>>) {
    let file = TestFile::new(bytes, cached_limits()).with_jitter(jitter.0, jitter.1);
    let mut host = TestHost::default();
    host.add("disk", file.clone());
    let options = OpenOptions {
        read_only,
        ..OpenOptions::new(References::Any)
    };
    let opened = block_on(open(&host, "disk", &options)).unwrap();
    let queues = (0..3).map(|_| opened.image.queue(opened.files.clone()));
    (file, queues.collect())
}

async fn change(queue: &Queue<TestFile>, random: &mut Random) {
    let len = (1 + random.below(96)) * SECTOR;
    let offset_bytes = random.below((LOAD_END - len) / SECTOR) * SECTOR;
    let memory = vec![random.next() as u8; len as usize];
    let fua = random.below(10) == 0;
    let (request, payload) = match random.below(8) {
        0 => (Request::Flush, Payload::None),
        1 | 2 => {
            let len_bytes = len;
            let request = Request::Discard {
                offset_bytes,
                len_bytes,
            };
            (request, Payload::None)
        }
        _ => {
            let request = Request::Write { offset_bytes, fua };
            (request, Payload::Write(Source::memory(&memory)))
        }
    };
    queue.submit(request, payload).await.unwrap();
}

/// An image with data, and with snapshots where its refcounts can count them; closed.
fn used(options: &CreateOptions, seed: u64) -> Vec<u8> {
    let file = TestFile::new(Vec::new(), cached_limits());
    block_on(create(&file, options, &Job::default())).unwrap();
    let (file, mut queues) = opened(file.bytes(), false, (1, 0));
    let mut random = Random::new(seed);
    let request = Request::Write {
        offset_bytes: LOAD_END,
        fua: false,
    };
    let memory = vec![1; (SIZE - LOAD_END) as usize];
    let payload = Payload::Write(Source::memory(&memory));
    block_on(queues[0].submit(request, payload)).unwrap();
    for name in ["one", "two"] {
        for _ in 0..20 {
            block_on(change(&queues[0], &mut random));
        }
        if options.refcount_order > 0 {
            let new = NewSnapshot {
                name: name.to_owned(),
                ..NewSnapshot::default()
            };
            block_on(queues[0].create_snapshot(&new, &Job::default())).unwrap();
        }
    }
    if options.refcount_order > 0 {
        block_on(queues[0].delete_snapshot("one", &Job::default())).unwrap();
    }
    let last = queues.remove(0);
    drop(queues);
    block_on(last.close()).unwrap();
    check_clean(&file);
    file.bytes()
}

/// Checks over and over while two queues change the image; closes it then.
fn check_beside_load(bytes: Vec<u8>, seed: u64) -> (TestFile, Vec<Checked>) {
    let (file, mut queues) = opened(bytes, false, (seed, 3));
    let found = RefCell::new(Vec::new());
    let changing = Cell::new(2);
    let mut tasks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
    for (number, queue) in queues[1..].iter().enumerate() {
        let (mut random, changing) = (Random::new(seed * 2 + number as u64), &changing);
        tasks.push(Box::pin(async move {
            for _ in 0..150 {
                change(queue, &mut random).await;
            }
            changing.set(changing.get() - 1);
        }));
    }
    tasks.push(Box::pin(async {
        while changing.get() > 0 || found.borrow().is_empty() {
            let checked = queues[0].check(&Job::default()).await.unwrap();
            found.borrow_mut().push(checked);
        }
    }));
    run_shuffled(Random::new(seed), tasks);
    let last = queues.remove(0);
    drop(queues);
    block_on(last.close()).unwrap();
    (file, found.into_inner())
}

fn u64_at(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(*bytes[at as usize..].first_chunk().unwrap())
}

/// Gives a cluster another count.
fn set_count(bytes: &mut [u8], cluster: u64, count: u64) {
    let header = Header::parse(bytes).unwrap();
    let geometry = header.geometry();
    let index = geometry.refcount_table_index(ClusterIndex(cluster));
    let block = u64_at(bytes, header.refcount_table_offset.0 + index * 8) as usize;
    assert!(block > 0, "cluster {cluster} has no count");
    let block = &mut bytes[block..][..geometry.cluster_size() as usize];
    let within = geometry.refcount_block_index(ClusterIndex(cluster));
    refcount::set(block, geometry.refcount_order(), within, count).unwrap();
}

/// The host cluster of the last cluster of the disk.
fn last_data_cluster(bytes: &[u8]) -> u64 {
    let header = Header::parse(bytes).unwrap();
    let geometry = header.geometry();
    let last = GuestOffset(SIZE - 1);
    let table = u64_at(
        bytes,
        header.l1_table_offset.0 + geometry.l1_index(last) * 8,
    );
    let table = table & 0x00ff_ffff_ffff_fe00;
    let entry = u64_at(
        bytes,
        table + geometry.l2_index(last) * geometry.l2_entry_size(),
    );
    geometry
        .cluster_of(HostOffset(entry & 0x00ff_ffff_ffff_fe00))
        .0
}

#[test]
fn a_check_beside_a_load_finds_nothing_in_a_sound_image() {
    let (mut rounds, mut unsettled, mut checks) = (0, 0, 0);
    for (number, options) in shapes().into_iter().enumerate() {
        for seed in 1..11 {
            let (file, all) = check_beside_load(used(&options, seed), seed);
            for checked in all {
                assert!(
                    checked.report.is_clean(),
                    "shape {number} seed {seed}: {checked:#?}"
                );
                assert!(checked.rounds >= 1 && checked.rounds <= ROUNDS_MAX);
                rounds += checked.rounds;
                unsettled += checked.unsettled_clusters;
                checks += 1;
            }
            check_clean(&file);
        }
    }
    assert!(
        checks > 300 && rounds > checks * 3 / 2,
        "{rounds} rounds of {checks} checks"
    );
    assert!(unsettled > 0, "no cluster changed in all rounds");
}

#[test]
fn damage_is_found_while_a_load_goes_on() {
    for (number, options) in shapes().into_iter().enumerate() {
        for seed in 1..6 {
            let mut bytes = used(&options, seed);
            let size = 1_u64 << options.cluster_bits;
            let (missing, leaked) = (last_data_cluster(&bytes), bytes.len() as u64 / size);
            set_count(&mut bytes, missing, 0);
            bytes.resize(bytes.len() + size as usize, 0);
            set_count(&mut bytes, leaked, 1);
            let (file, all) = check_beside_load(bytes, seed);
            for Checked { report, .. } in all {
                let about = |cluster: u64| {
                    // A count of one bit cannot be too high.
                    let too_many = format!("cluster at {:#x} has more references", cluster * size);
                    let text = format!("cluster {cluster} at ");
                    let is_about =
                        |text: &str, told: &str| told.starts_with(text) || told.contains(&too_many);
                    let told = report.messages.iter();
                    told.filter(|one| is_about(&text, &one.message)).count()
                };
                let place = format!("shape {number} seed {seed}: {report:#?}");
                assert_eq!((about(leaked), report.leaks), (1, 1), "{place}");
                assert_eq!(about(missing), 1, "{place}");
                // The copied flag of its entry is wrong, too.
                assert!(
                    report.corruptions <= 3 && report.check_errors == 0,
                    "{place}"
                );
            }
            assert!(checked(&file).corruptions > 0);
        }
    }
}

#[test]
fn an_idle_image_takes_one_round_and_shows_what_the_checker_shows() {
    for options in shapes() {
        let bytes = used(&options, 5);
        for read_only in [true, false] {
            let (file, queues) = opened(bytes.clone(), read_only, (1, 0));
            let job = Job::default();
            let checked_online = block_on(queues[0].check(&job)).unwrap();
            let expected = checked(&file);
            assert_eq!(checked_online.report, expected);
            assert_eq!(
                (checked_online.rounds, checked_online.unsettled_clusters),
                (1, 0)
            );
            let (done, total) = job.progress_bytes();
            assert!(done == total && total > 0, "{done} of {total}");
            job.cancel();
            let error = block_on(queues[0].check(&job)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cancelled);
            assert!(file.bytes() == bytes, "nothing was written");
        }
    }
}

#[test]
fn a_state_being_saved_and_a_raw_image_are_refused() {
    let options = shapes().swap_remove(4);
    let (_, queues) = opened(used(&options, 5), false, (1, 0));
    let save = VmStateSave::begin(queues[0].image()).unwrap();
    let error = block_on(queues[0].check(&Job::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    drop(save);
    let checked = block_on(queues[0].check(&Job::default())).unwrap();
    assert!(checked.report.is_clean());
    let mut host = TestHost::default();
    host.add("disk", TestFile::new(vec![0; 4096], cached_limits()));
    let raw = OpenOptions {
        format: Some(Format::Raw),
        ..OpenOptions::new(References::Any)
    };
    let opened = block_on(open(&host, "disk", &raw)).unwrap();
    let queue = opened.image.queue(opened.files);
    let error = block_on(queue.check(&Job::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
