//! Areas where they are hard to find: on devices, behind the end of a short file, without counts.

use gaur_block::{Device, FileLimits, Payload, Request, Source, Target};
use gaur_format::plan::CreateOptions;
use gaur_format::{Header, refcount};

use crate::chain::open;
use crate::create::create;
use crate::error::ErrorKind;
use crate::job::Job;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::references::References;
use crate::snapshot::NewSnapshot;
use crate::test_file::{TestFile, TestHost, block_on, cached_limits, check_clean};

fn opened(file: &TestFile) -> Queue<TestFile> {
    let mut host = TestHost::default();
    host.add("disk", file.clone());
    let opened = block_on(open(&host, "disk", &OpenOptions::new(References::Any))).unwrap();
    opened.image.queue(opened.files)
}

fn write(queue: &Queue<TestFile>, offset_bytes: u64, bytes: &[u8]) {
    let request = Request::Write {
        offset_bytes,
        fua: false,
    };
    let payload = Payload::Write(Source::memory(bytes));
    block_on(queue.submit(request, payload)).unwrap();
}

fn read(queue: &Queue<TestFile>, offset_bytes: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    let payload = Payload::Read(Target::memory(&mut bytes));
    block_on(queue.submit(Request::Read { offset_bytes }, payload)).unwrap();
    bytes
}

fn device_limits() -> FileLimits {
    FileLimits {
        resizable: false,
        ..cached_limits()
    }
}

/// One refcount block of a volume with 64 KiB clusters counts 2 GiB. On a smaller volume areas were looked
/// for behind what the blocks count, which is behind its end: snapshots of a disk on a volume of
/// 1 GiB failed with "no space left" although nearly all of it was free.
#[test]
fn a_device_smaller_than_one_refcount_block_counts_has_room_for_snapshots() {
    let file = TestFile::new(vec![0; 16 << 20], device_limits());
    let options = CreateOptions {
        size_bytes: 8 << 20,
        ..CreateOptions::default()
    };
    block_on(create(&file, &options, &Job::default())).unwrap();
    let queue = opened(&file);
    for number in 0..20 {
        write(&queue, number << 16, &[number as u8; 512]);
        let new = NewSnapshot {
            name: format!("number {number}"),
            ..NewSnapshot::default()
        };
        block_on(queue.create_snapshot(&new, &Job::default())).unwrap();
    }
    for number in 0..20 {
        assert_eq!(read(&queue, number << 16, 512), [number as u8; 512]);
    }
    // An L1 table of several clusters in a row.
    block_on(queue.resize(1 << 45, false, &Job::default())).unwrap();
    assert_eq!(read(&queue, (1 << 45) - 512, 512), [0; 512]);
    block_on(queue.close()).unwrap();
    check_clean(&file);
}

/// What a full device lacks is told, and nothing is lost by asking.
#[test]
fn a_device_without_room_for_an_area_refuses_it_and_stays_clean() {
    let file = TestFile::new(vec![0; 1 << 20], device_limits());
    let options = CreateOptions {
        size_bytes: 512 << 10,
        ..CreateOptions::default()
    };
    block_on(create(&file, &options, &Job::default())).unwrap();
    let queue = opened(&file);
    write(&queue, 0, &[7; 512]);
    let error = block_on(queue.resize(1 << 46, false, &Job::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert_eq!(queue.size_bytes(), 512 << 10);
    write(&queue, 65536, &[8; 512]);
    block_on(queue.close()).unwrap();
    check_clean(&file);
}

/// Refcounts may say that clusters behind the end of the file are in use. An area goes around them, and
/// the file does not grow for clusters that it cannot have.
#[test]
fn an_area_goes_around_clusters_in_use_behind_the_end_of_the_file() {
    for used in [vec![0, 1, 2], vec![3], vec![0, 5, 19], (0..200).collect()] {
        let file = TestFile::new(Vec::new(), cached_limits());
        let options = CreateOptions {
            size_bytes: 1 << 20,
            cluster_bits: 9,
            ..CreateOptions::default()
        };
        block_on(create(&file, &options, &Job::default())).unwrap();
        let mut bytes = file.bytes();
        let end = bytes.len() as u64 / 512;
        let header = Header::parse(&bytes).unwrap();
        let at = header.refcount_table_offset.0 as usize;
        let block = u64::from_be_bytes(*bytes[at..].first_chunk().unwrap()) as usize;
        for cluster in &used {
            refcount::set(&mut bytes[block..block + 512], 4, end + cluster, 1).unwrap();
        }
        let file = TestFile::new(bytes, cached_limits());
        let queue = opened(&file);
        // 20 clusters of L1 table.
        block_on(queue.resize(20 * 64 * 64 * 512, false, &Job::default())).unwrap();
        write(&queue, 5 << 20, &[5; 4096]);
        block_on(queue.close()).unwrap();
        let bytes = file.bytes();
        let header = Header::parse(&bytes).unwrap();
        let first = header.l1_table_offset.0 / 512;
        assert_eq!(header.l1_size, 20 * 64);
        for cluster in &used {
            let cluster = end + cluster;
            let taken = (first..first + 20).contains(&cluster);
            assert!(!taken, "cluster {cluster} is part of the l1 table");
        }
        assert_eq!(read(&opened(&file), 5 << 20, 4096), [5; 4096]);
    }
}
