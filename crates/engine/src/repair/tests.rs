//! Repair through files: marks, dirty images, hosts that fail.

use std::cell::RefCell;

use gaur_block::{Device, Errno, Payload, Request, Source, Target};
use gaur_format::check::{RepairMode, TablePart};
use gaur_format::feature::Incompatible;
use gaur_format::header::field;
use gaur_format::plan::CreateOptions;
use gaur_format::snapshot::{Snapshot, encode_table};
use gaur_format::{Header, HostOffset};

use super::{repair, repair_on};
use crate::chain::open;
use crate::create::create;
use crate::error::ErrorKind;
use crate::job::Job;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::references::References;
use crate::test_file::{
    Event, TestFile, TestHost, block_on, cached_limits, check_clean, checked, direct_limits,
};

const SIZE: u64 = 1 << 20;
const WRITTEN: usize = 300_000;

fn opened(file: &TestFile, read_only: bool) -> Result<Queue<TestFile>, crate::ImageError> {
    let mut host = TestHost::default();
    host.add("image", file.clone());
    let options = OpenOptions {
        read_only,
        ..OpenOptions::new(References::Any)
    };
    let opened = block_on(open(&host, "image", &options))?;
    Ok(opened.image.queue(opened.files))
}

/// An image with data, closed in order.
fn whole() -> Vec<u8> {
    whole_with(12)
}

fn whole_with(cluster_bits: u32) -> Vec<u8> {
    let file = TestFile::new(Vec::new(), cached_limits());
    let options = CreateOptions {
        size_bytes: SIZE,
        cluster_bits,
        ..CreateOptions::default()
    };
    block_on(create(&file, &options, &Job::default())).unwrap();
    let queue = opened(&file, false).unwrap();
    let request = Request::Write {
        offset_bytes: 0,
        fua: false,
    };
    let data: Vec<u8> = (0..WRITTEN).map(|at| (at / 7) as u8).collect();
    block_on(queue.submit(request, Payload::Write(Source::memory(&data)))).unwrap();
    block_on(queue.close()).unwrap();
    file.bytes()
}

fn data_of(queue: &Queue<TestFile>) -> Vec<u8> {
    let mut memory = vec![0; SIZE as usize];
    let payload = Payload::Read(Target::memory(&mut memory));
    let request = Request::Read { offset_bytes: 0 };
    block_on(queue.submit(request, payload)).unwrap();
    memory
}

fn u64_at(bytes: &[u8], at: usize) -> usize {
    u64::from_be_bytes(*bytes[at..].first_chunk().unwrap()) as usize
}

fn mark(bytes: &mut [u8], bits: Incompatible) {
    bytes[field::INCOMPATIBLE as usize..][..8].copy_from_slice(&bits.0.to_be_bytes());
}

/// Refcounts of the first block that were never written, as lazy refcounts leave them.
fn lose_refcounts(bytes: &mut [u8]) {
    let table = Header::parse(bytes).unwrap().refcount_table_offset.0 as usize;
    let block = u64_at(bytes, table);
    bytes[block + 2 * 6..block + 2 * 40].fill(0);
}

/// All refcounts, and where they are.
fn lose_table(bytes: &mut [u8]) {
    let table = Header::parse(bytes).unwrap().refcount_table_offset.0 as usize;
    bytes[table..table + 4096].fill(0);
}

#[test]
fn a_dirty_image_is_repaired_when_it_is_opened_for_writing_only() {
    for (round, lose) in [lose_refcounts, lose_table].into_iter().enumerate() {
        let expected = data_of(&opened(&TestFile::new(whole(), cached_limits()), true).unwrap());
        let mut bytes = whole();
        lose(&mut bytes);
        mark(&mut bytes, Incompatible::DIRTY);
        let limits = [cached_limits(), direct_limits(4096)][round];
        let file = TestFile::new(bytes.clone(), limits);
        assert_eq!(data_of(&opened(&file, true).unwrap()), expected);
        assert!(file.bytes() == bytes, "reading repairs nothing");
        let queue = opened(&file, false).unwrap();
        assert_eq!(data_of(&queue), expected);
        assert_eq!(Header::parse(&file.bytes()).unwrap().incompatible.0, 0);
        block_on(queue.close()).unwrap();
        check_clean(&file);
    }
}

#[test]
fn a_dirty_image_that_cannot_be_repaired_is_not_written_to() {
    let mut bytes = whole();
    let l1 = Header::parse(&bytes).unwrap().l1_table_offset.0 as usize;
    // An L2 table that is not at the start of a cluster.
    let entry = (1 << 63 | u64_at(&bytes, l1) as u64) + 512;
    bytes[l1..l1 + 8].copy_from_slice(&entry.to_be_bytes());
    mark(&mut bytes, Incompatible::DIRTY);
    let file = TestFile::new(bytes, cached_limits());
    let error = opened(&file, false).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(format!("{error:#}").contains("read-only"), "{error:#}");
    let left = Header::parse(&file.bytes()).unwrap().incompatible;
    assert!(left.has(Incompatible::DIRTY));
}

#[test]
fn the_corrupt_bit_goes_when_the_image_is_sound() {
    let mut bytes = whole();
    lose_refcounts(&mut bytes);
    mark(&mut bytes, Incompatible::CORRUPT);
    let file = TestFile::new(bytes, cached_limits());
    let error = opened(&file, false).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let leaks = block_on(repair(&file, RepairMode::Leaks, false, &Job::default())).unwrap();
    assert!(!leaks.marks_cleared && leaks.after.corruptions > 0);
    let dry = block_on(repair(&file, RepairMode::All, true, &Job::default())).unwrap();
    assert!(dry.corruptions_fixed > 0 && opened(&file, false).is_err());
    let all = block_on(repair(&file, RepairMode::All, false, &Job::default())).unwrap();
    assert!(all.marks_cleared && all.after.is_clean());
    assert!(opened(&file, false).is_ok());
}

#[test]
fn a_repair_that_fails_or_is_cancelled_is_done_by_the_next() {
    let expected = data_of(&opened(&TestFile::new(whole(), cached_limits()), true).unwrap());
    for lose in [lose_refcounts, lose_table] {
        let mut bytes = whole();
        lose(&mut bytes);
        mark(&mut bytes, Incompatible::DIRTY);
        let mut failed = 0;
        for event in 0.. {
            let file = TestFile::new(bytes.clone(), cached_limits());
            file.fail_from(event, Errno::EIO);
            let outcome = block_on(repair(&file, RepairMode::All, false, &Job::default()));
            let events = file.events().len();
            let wrote = |event: &Event| matches!(event, Event::Write { .. } | Event::Flush);
            failed += usize::from(outcome.is_err());
            let left = TestFile::new(file.bytes(), cached_limits());
            assert_eq!(data_of(&opened(&left, true).unwrap()), expected);
            let again = block_on(repair(&left, RepairMode::All, false, &Job::default())).unwrap();
            assert!(again.after.is_clean(), "event {event}: {again:#?}");
            assert_eq!(data_of(&opened(&left, false).unwrap()), expected);
            if event >= events {
                assert!(file.events().iter().any(wrote));
                break;
            }
        }
        assert!(failed > 3, "{failed} writes and flushes were refused");
        let file = TestFile::new(bytes.clone(), cached_limits());
        let job = Job::default();
        job.cancel();
        let error = block_on(repair(&file, RepairMode::All, false, &job)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        assert!(file.bytes() == bytes);
        assert!(checked(&file).corruptions > 0);
    }
}

/// Looks at all tables of the parts, but for those of the part that `leaves_out` names.
fn look_at(file: &TestFile, parts: &mut [TablePart], leaves_out: Option<usize>) {
    let bytes = file.bytes();
    for (number, part) in parts.iter_mut().enumerate() {
        while Some(number) != leaves_out
            && let Some((offset, len)) = part.next()
        {
            part.feed(&bytes[offset as usize..][..len as usize]);
        }
    }
}

/// What a check in parts leaves out has no references: it would be freed.
#[test]
fn a_repair_that_is_cancelled_while_threads_look_at_tables_changes_nothing() {
    for loses_block in [false, true] {
        let mut bytes = whole_with(9);
        if loses_block {
            let table = Header::parse(&bytes).unwrap().refcount_table_offset.0 as usize;
            bytes[table..table + 8].fill(0);
        } else {
            lose_refcounts(&mut bytes);
        }
        mark(&mut bytes, Incompatible::DIRTY);
        let (alone, parallel) = [(); 2]
            .map(|()| TestFile::new(bytes.clone(), cached_limits()))
            .into();
        let expected = block_on(repair(&alone, RepairMode::All, false, &Job::default())).unwrap();
        let mut looks = 0;
        let look = |parts: &mut [TablePart]| {
            assert!(parts.len() > 1);
            looks += 1;
            look_at(&parallel, parts, None);
        };
        let job = Job::default();
        let repaired = repair_on(&parallel, RepairMode::All, false, &job, 3, look);
        assert_eq!(block_on(repaired).unwrap(), expected);
        assert!(parallel.bytes() == alone.bytes());
        assert!(looks > 1, "{looks} checks in parts");
        for stop_at in 1..=looks {
            let file = TestFile::new(bytes.clone(), cached_limits());
            let mut looked = 0;
            let (job, before) = (Job::default(), RefCell::new(Vec::new()));
            let look = |parts: &mut [TablePart]| {
                looked += 1;
                let stops = looked == stop_at;
                look_at(&file, parts, stops.then_some(0));
                if stops {
                    before.replace(file.bytes());
                    job.cancel();
                }
            };
            let error = block_on(repair_on(&file, RepairMode::All, false, &job, 3, look));
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Cancelled);
            assert!(file.bytes() == *before.borrow(), "nothing more was written");
        }
    }
}

/// The repair that an open for writing does was not asked for.
#[test]
fn a_dirty_image_keeps_a_snapshot_that_a_repair_drops() {
    let mut bytes = whole();
    let at = bytes.len().next_multiple_of(4096);
    bytes.resize(at, 0);
    let snapshot = Snapshot {
        l1_table_offset: HostOffset(0x1200),
        l1_size: 1,
        id: b"1".to_vec(),
        name: b"lost".to_vec(),
        date_sec: 1,
        date_nsec: 0,
        vm_clock_nsec: 0,
        vm_state_size: 0,
        disk_size: Some(SIZE),
        icount: None,
        unknown_extra: Vec::new(),
    };
    bytes.extend_from_slice(&encode_table(&[snapshot]));
    bytes[field::NB_SNAPSHOTS as usize..][..4].copy_from_slice(&1_u32.to_be_bytes());
    bytes[field::SNAPSHOTS_OFFSET as usize..][..8].copy_from_slice(&(at as u64).to_be_bytes());
    mark(&mut bytes, Incompatible::DIRTY);
    let file = TestFile::new(bytes, cached_limits());
    let error = opened(&file, false).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert_eq!(Header::parse(&file.bytes()).unwrap().nb_snapshots, 1);
    let all = block_on(repair(&file, RepairMode::All, false, &Job::default())).unwrap();
    assert!(all.after.is_clean(), "{all:#?}");
    assert_eq!(Header::parse(&file.bytes()).unwrap().nb_snapshots, 0);
    assert!(opened(&file, false).is_ok());
}
