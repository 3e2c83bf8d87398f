//! The promises of a simulated disk: what a flush makes durable, what a power cut may leave, what
//! faults do.

use std::collections::BTreeSet;
use std::path::Path;

use gaur_block::{Access, Errno, File, Host, Source, Target};
use gaur_sim::{
    DiskProfile, FaultKind, Faults, FileImage, Random, Scheduler, SimFile, SimHost, Stop,
    Survivors, Trace,
};

const ACCESS: Access = Access {
    write: true,
    direct: false,
    lock: true,
    force_share: false,
};

fn machine(seed: u64, image: FileImage, profile: DiskProfile) -> (Scheduler, SimHost) {
    let scheduler = Scheduler::new(seed, Trace::default());
    let host = SimHost::new(&scheduler.handle());
    host.add("disk", image, profile);
    (scheduler, host)
}

async fn open(host: &SimHost) -> SimFile {
    host.open(Path::new("disk"), ACCESS)
        .await
        .expect("the file exists and its lock is free")
}

async fn write(file: &SimFile, offset: u64, byte: u8, len: usize) -> Result<(), Errno> {
    file.write_at(offset, Source::memory(&vec![byte; len]))
        .await
}

/// First bytes of the first `count` sectors after many power cuts.
fn survivors(host: &SimHost, count: usize, draws: u64) -> BTreeSet<Vec<u8>> {
    let mut random = Random::new(99);
    let image = |random: &mut Random| {
        let survivors = Survivors::draw(random);
        host.crash_images(survivors, random)
            .remove("disk")
            .expect("the disk is there")
    };
    (0..draws)
        .map(|_| {
            let image = image(&mut random);
            (0..count)
                .map(|sector| image.bytes(sector as u64 * 512, 1)[0])
                .collect()
        })
        .collect()
}

#[test]
fn unflushed_sectors_survive_in_any_combination() {
    let (mut scheduler, host) = machine(1, FileImage::new(4096), DiskProfile::default());
    let inner = host.clone();
    scheduler
        .block_on("test", 1000, async move {
            let file = open(&inner).await;
            write(&file, 0, 1, 1024).await.unwrap();
            write(&file, 0, 2, 512).await.unwrap();
        })
        .unwrap()
        .unwrap();
    let seen = survivors(&host, 2, 2000);
    let all: BTreeSet<Vec<u8>> = [0, 1, 2]
        .iter()
        .flat_map(|&first| [vec![first, 0], vec![first, 1]])
        .collect();
    assert_eq!(seen, all);
}

#[test]
fn writes_completed_before_a_flush_are_durable_after_it() {
    let (mut scheduler, host) = machine(2, FileImage::new(4096), DiskProfile::default());
    let inner = host.clone();
    scheduler
        .block_on("test", 1000, async move {
            let file = open(&inner).await;
            write(&file, 0, 1, 512).await.unwrap();
            write(&file, 0, 2, 512).await.unwrap();
            file.flush().await.unwrap();
            write(&file, 512, 3, 512).await.unwrap();
        })
        .unwrap()
        .unwrap();
    assert_eq!(
        survivors(&host, 2, 500),
        BTreeSet::from([vec![2, 0], vec![2, 3]])
    );
}

/// A flush says nothing about a write that was still in flight when it was asked for, even when the
/// write completes before the flush does.
#[test]
fn a_write_in_flight_during_a_flush_stays_unsettled() {
    let mut lost = 0;
    for seed in 0..50 {
        let (mut scheduler, host) = machine(seed, FileImage::new(4096), DiskProfile::default());
        let (one, two) = (host.clone(), host.clone());
        let handle = scheduler.handle();
        handle.spawn("writer", async move {
            let file = one
                .open(
                    Path::new("disk"),
                    Access {
                        lock: false,
                        ..ACCESS
                    },
                )
                .await
                .unwrap();
            write(&file, 0, 1, 512).await.unwrap();
        });
        handle.spawn("flusher", async move {
            let file = two
                .open(
                    Path::new("disk"),
                    Access {
                        lock: false,
                        ..ACCESS
                    },
                )
                .await
                .unwrap();
            file.flush().await.unwrap();
        });
        assert_eq!(scheduler.run(1000).unwrap(), Stop::Done);
        lost += usize::from(survivors(&host, 1, 200).contains(&vec![0]));
    }
    assert!((1..50).contains(&lost), "both orders happen: {lost}");
}

#[test]
fn a_write_in_flight_at_the_power_cut_may_survive_in_part() {
    let (mut scheduler, host) = machine(3, FileImage::new(4096), DiskProfile::default());
    let inner = host.clone();
    scheduler.handle().spawn("writer", async move {
        let file = open(&inner).await;
        write(&file, 0, 1, 1024).await.unwrap();
    });
    assert_eq!(scheduler.run(1).unwrap(), Stop::Steps);
    let all = [[0, 0], [0, 1], [1, 0], [1, 1]].map(|pair| pair.to_vec());
    assert_eq!(survivors(&host, 2, 500), BTreeSet::from(all));
}

#[test]
fn a_length_is_volatile_until_a_flush() {
    let (mut scheduler, host) = machine(4, FileImage::new(1024), DiskProfile::default());
    let inner = host.clone();
    let lens = |host: &SimHost| {
        let mut random = Random::new(5);
        let image = |random: &mut Random| {
            let survivors = Survivors::draw(random);
            host.crash_images(survivors, random)["disk"].len_bytes()
        };
        (0..300)
            .map(|_| image(&mut random))
            .collect::<BTreeSet<u64>>()
    };
    let file = scheduler
        .block_on("grow", 1000, async move {
            let file = open(&inner).await;
            file.set_len(8192).await.unwrap();
            file
        })
        .unwrap()
        .unwrap();
    assert_eq!(lens(&host), BTreeSet::from([1024, 8192]));
    scheduler
        .block_on("flush", 1000, async move { file.flush().await })
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(lens(&host), BTreeSet::from([8192]));
}

#[test]
fn a_failed_flush_loses_writes_that_a_later_flush_does_not_bring_back() {
    let mut lost = 0;
    for seed in 0..60 {
        let (mut scheduler, host) = machine(seed, FileImage::new(4096), DiskProfile::default());
        host.set_faults(
            "disk",
            Faults {
                nth: Some((FaultKind::Flush, 0)),
                ..Faults::default()
            },
        );
        let inner = host.clone();
        scheduler
            .block_on("test", 1000, async move {
                let file = open(&inner).await;
                write(&file, 0, 1, 512).await.unwrap();
                assert_eq!(file.flush().await, Err(Errno::EIO));
                file.flush().await.unwrap();
            })
            .unwrap()
            .unwrap();
        assert_eq!(host.faults_struck(), 1);
        lost += usize::from(survivors(&host, 1, 200).contains(&vec![0]));
    }
    assert!(
        (10..60).contains(&lost),
        "some are lost, some are not: {lost}"
    );
}

#[test]
fn a_killed_writer_leaves_its_unflushed_writes_in_the_cache() {
    let (mut scheduler, host) = machine(6, FileImage::new(4096), DiskProfile::default());
    let inner = host.clone();
    scheduler
        .block_on("writer", 1000, async move {
            let file = open(&inner).await;
            write(&file, 0, 1, 512).await.unwrap();
        })
        .unwrap()
        .unwrap();
    let next = Scheduler::new(7, Trace::default());
    let host = host.restarted(&next.handle());
    assert_eq!(host.images()["disk"].bytes(0, 1), [1]);
    assert_eq!(survivors(&host, 1, 300), BTreeSet::from([vec![0], vec![1]]));
}

#[test]
#[should_panic(expected = "is not aligned to 512")]
fn a_direct_disk_refuses_an_unaligned_request() {
    let profile = DiskProfile {
        request_alignment: 512,
        memory_alignment: 512,
        ..DiskProfile::default()
    };
    let (mut scheduler, host) = machine(8, FileImage::new(4096), profile);
    let inner = host.clone();
    let _ = scheduler.block_on("test", 1000, async move {
        let file = open(&inner).await;
        let mut buffer = file.buffer(100);
        file.read_at(0, Target::memory(&mut buffer)).await
    });
}

#[test]
fn two_writers_cannot_hold_the_lock_at_once() {
    let (mut scheduler, host) = machine(9, FileImage::new(4096), DiskProfile::default());
    let inner = host.clone();
    scheduler
        .block_on("test", 1000, async move {
            let first = open(&inner).await;
            let second = first.clone();
            drop(first);
            let refused = inner.open(Path::new("disk"), ACCESS).await.unwrap_err();
            assert_eq!(refused.errno, Errno::EAGAIN);
            drop(second);
            open(&inner).await;
        })
        .unwrap()
        .unwrap();
}
