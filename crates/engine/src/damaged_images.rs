//! Damaged images in use: whatever bytes their metadata holds, requests end with success or an
//! error, and nothing panics, loops or takes memory without bound.

use gaur_block::{Device, Errno, Payload, Request, Source, Target};
use gaur_format::check::RepairMode;
use gaur_format::plan::{CreateOptions, Preallocation};
use gaur_format::{Header, Version};

use crate::chain::open;
use crate::corruption::{Finding, Structure};
use crate::create::create;
use crate::error::ErrorKind;
use crate::job::Job;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::references::References;
use crate::repair::repair;
use crate::test_file::{Random, TestFile, TestHost, block_on, cached_limits, direct_limits};

const SIZE: u64 = 1 << 20;

fn shapes() -> Vec<CreateOptions> {
    let base = CreateOptions {
        size_bytes: SIZE,
        ..CreateOptions::default()
    };
    let small = CreateOptions {
        cluster_bits: 9,
        ..base.clone()
    };
    let old = CreateOptions {
        version: Version::V2,
        cluster_bits: 12,
        ..base.clone()
    };
    let extended = CreateOptions {
        extended_l2: true,
        cluster_bits: 14,
        ..base.clone()
    };
    let bits = CreateOptions {
        refcount_order: 0,
        cluster_bits: 12,
        ..base.clone()
    };
    let full = CreateOptions {
        preallocation: Preallocation::Metadata,
        ..base.clone()
    };
    vec![base, small, old, extended, bits, full]
}

/// One random request; its result does not matter here.
async fn request(queue: &Queue<TestFile>, random: &mut Random, memory: &mut [u8]) {
    let size = queue.size_bytes();
    let unit = [1, 512, 65536][random.below(3) as usize];
    let offset_bytes = random.below(size.min(2 * SIZE) / unit + 1) * unit;
    let len_bytes = (1 + random.below(40_000)).min(size.saturating_sub(offset_bytes));
    let part = &mut memory[..len_bytes as usize];
    let (fua, may_unmap) = (random.below(9) == 0, random.below(2) == 0);
    let (request, payload) = match random.below(8) {
        0..=2 => (
            Request::Read { offset_bytes },
            Payload::Read(Target::memory(part)),
        ),
        3 | 4 => (
            Request::Write { offset_bytes, fua },
            Payload::Write(Source::memory(part)),
        ),
        5 => (
            Request::WriteZeroes {
                offset_bytes,
                len_bytes,
                fua,
                may_unmap,
            },
            Payload::None,
        ),
        6 => (
            Request::Discard {
                offset_bytes,
                len_bytes,
            },
            Payload::None,
        ),
        _ => (Request::Flush, Payload::None),
    };
    let _ = queue.submit(request, payload).await;
    if size > offset_bytes {
        let _ = queue.map(offset_bytes, len_bytes.max(1)).await;
    }
}

/// Opens the image, uses it, closes it; whether it could be opened.
fn open_and_use(file: &TestFile, seed: u64, requests: usize) -> bool {
    let mut random = Random::new(seed);
    let mut memory = vec![0x5a; 40_000];
    let mut host = TestHost::default();
    host.add("image", file.clone());
    let Ok(opened) = block_on(open(&host, "image", &OpenOptions::new(References::Any))) else {
        return false;
    };
    let queue = opened.image.queue(opened.files);
    for _ in 0..requests {
        block_on(request(&queue, &mut random, &mut memory));
    }
    if random.below(4) == 0 {
        let size = random.below(4 * SIZE / 512) * 512;
        let _ = block_on(queue.resize(size, true, &Job::default()));
        block_on(request(&queue, &mut random, &mut memory));
    }
    let _ = block_on(queue.close());
    true
}

/// Where the metadata of an image is: its header, and every table that the header leads to.
fn metadata(bytes: &[u8]) -> Vec<(usize, usize)> {
    let header = Header::parse(bytes).expect("the image is whole");
    let geometry = header.geometry();
    let cluster = geometry.cluster_size() as usize;
    let mut places = vec![(0, 112)];
    let u64_at = |at: usize| u64::from_be_bytes(*bytes[at..].first_chunk().expect("inside"));
    for (table, entries) in [
        (header.l1_table_offset.0 as usize, header.l1_size as usize),
        (header.refcount_table_offset.0 as usize, cluster / 8),
    ] {
        places.push((table, entries * 8));
        for entry in 0..entries {
            let next = (u64_at(table + entry * 8) & 0x00ff_ffff_ffff_fe00) as usize;
            if next != 0 {
                places.push((next, cluster));
            }
        }
    }
    places
}

fn damage(bytes: &mut [u8], places: &[(usize, usize)], random: &mut Random) {
    for _ in 0..=random.below(3) {
        let (start, len) = places[random.below(places.len() as u64) as usize];
        // Tables are mostly empty: the first entries are the ones in use.
        let reach = if random.below(2) == 0 {
            len.min(64)
        } else {
            len
        };
        let at = start + random.below(reach as u64) as usize;
        match random.below(3) {
            0 => bytes[at] = random.next() as u8,
            1 => bytes[at] ^= 1 << random.below(8),
            _ => {
                let entry = at & !7;
                let aligned = random.next() << (9 + random.below(12));
                bytes[entry..entry + 8].copy_from_slice(&aligned.to_be_bytes());
            }
        }
    }
}

/// Visits images that were used and then damaged, each with a seed of its own.
fn each_damaged_image(mut visit: impl FnMut(u64, Vec<u8>)) {
    for (shape, options) in shapes().iter().enumerate() {
        let file = TestFile::new(Vec::new(), cached_limits());
        block_on(create(&file, options, &Job::default())).unwrap();
        assert!(
            open_and_use(&file, 77, 40),
            "the image is whole before it is damaged"
        );
        let whole = file.bytes();
        let places = metadata(&whole);
        for round in 0..40 {
            let seed = (shape * 1000 + round) as u64;
            let mut bytes = whole.clone();
            damage(&mut bytes, &places, &mut Random::new(seed));
            visit(seed, bytes);
        }
    }
}

#[test]
fn requests_on_a_damaged_image_end_with_success_or_an_error() {
    let mut opened = 0;
    each_damaged_image(|seed, bytes| {
        // The seed of a shape's first image is a multiple of 1000.
        let limits = if seed % 1000 % 3 == 0 {
            direct_limits(4096)
        } else {
            cached_limits()
        };
        let file = TestFile::new(bytes, limits);
        opened += usize::from(open_and_use(&file, seed, 25));
        assert!(
            file.bytes().len() < 256 << 20,
            "seed {seed}: the file exploded"
        );
    });
    assert!(
        opened > 80,
        "most damage is met in use, not at open: {opened}"
    );
}

/// What can be read of an image, sector by sector; nothing if it cannot be opened.
fn readable(bytes: &[u8]) -> Option<Vec<Result<Vec<u8>, Errno>>> {
    let mut host = TestHost::default();
    host.add("image", TestFile::new(bytes.to_vec(), cached_limits()));
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::new(References::Any)
    };
    let opened = block_on(open(&host, "image", &options)).ok()?;
    let queue = opened.image.queue(opened.files);
    let sectors = (0..queue.size_bytes().min(2 * SIZE) / 512).map(|sector| {
        let mut memory = vec![0; 512];
        let offset_bytes = sector * 512;
        let payload = Payload::Read(Target::memory(&mut memory));
        block_on(queue.submit(Request::Read { offset_bytes }, payload))?;
        Ok(memory)
    });
    Some(sectors.collect())
}

#[test]
fn repair_keeps_what_could_be_read_of_a_damaged_image() {
    let (mut sound, mut repaired_images) = (0, 0);
    each_damaged_image(|seed, bytes| {
        let before = readable(&bytes);
        let file = TestFile::new(bytes, cached_limits());
        let job = Job::default();
        let all = repair(&file, RepairMode::All, false, &job);
        // Of a header that is damaged nothing is known.
        let Ok(repaired) = block_on(all) else { return };
        repaired_images += 1;
        sound += usize::from(repaired.after.is_clean());
        let Some(before) = before else { return };
        let after = readable(&file.bytes()).expect("it could be opened before");
        for (sector, (old, new)) in before.iter().zip(&after).enumerate() {
            assert!(
                old.is_err() || old == new,
                "seed {seed}, sector {sector}: {:#?}",
                repaired.actions
            );
        }
        assert_eq!(before.len(), after.len(), "seed {seed}");
    });
    assert!(
        sound > 80,
        "{sound} of {repaired_images} are sound afterwards"
    );
}

/// An image with data in its first cluster, whose file was then changed at the given host offset.
fn with_bad_u64(at: impl FnOnce(&[u8]) -> usize, value: u64) -> (Queue<TestFile>, usize) {
    let file = TestFile::new(Vec::new(), cached_limits());
    let options = CreateOptions {
        size_bytes: SIZE,
        ..CreateOptions::default()
    };
    block_on(create(&file, &options, &Job::default())).unwrap();
    let mut host = TestHost::default();
    host.add("image", file.clone());
    let opened = block_on(open(&host, "image", &OpenOptions::new(References::Any))).unwrap();
    let queue = opened.image.queue(opened.files);
    block_on(write(&queue, 0)).unwrap();
    block_on(queue.close()).unwrap();
    let mut bytes = file.bytes();
    let at = at(&bytes);
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    let mut host = TestHost::default();
    host.add("image", TestFile::new(bytes, cached_limits()));
    let opened = block_on(open(&host, "image", &OpenOptions::new(References::Any))).unwrap();
    (opened.image.queue(opened.files), at)
}

async fn write(queue: &Queue<TestFile>, offset_bytes: u64) -> Result<(), Errno> {
    let request = Request::Write {
        offset_bytes,
        fua: false,
    };
    let payload = Payload::Write(Source::memory(&[7; 512]));
    queue.submit(request, payload).await
}

fn u64_at(bytes: &[u8], at: usize) -> usize {
    u64::from_be_bytes(*bytes[at..].first_chunk().unwrap()) as usize
}

/// The L2 entry of the first guest cluster.
fn first_l2_entry(bytes: &[u8]) -> usize {
    let l1 = Header::parse(bytes).unwrap().l1_table_offset.0 as usize;
    u64_at(bytes, l1) & 0x00ff_ffff_ffff_fe00
}

#[test]
fn a_bad_l2_entry_is_reported_with_structure_and_offset() {
    const UNALIGNED: u64 = 1 << 63 | 0x51200;
    for is_read in [true, false] {
        let (queue, at) = with_bad_u64(first_l2_entry, UNALIGNED);
        assert_eq!(queue.image().corruption(), None);
        let mut memory = [0; 512];
        let result = match is_read {
            true => {
                let payload = Payload::Read(Target::memory(&mut memory));
                let request = Request::Read { offset_bytes: 0 };
                block_on(queue.submit(request, payload))
            }
            false => block_on(write(&queue, 0)),
        };
        assert_eq!(result, Err(Errno::EIO));
        let report = queue.image().corruption().expect("a report");
        assert_eq!((report.layer, report.structure), (0, Structure::L2Table));
        assert_eq!(report.host_offset, at as u64);
        let Finding::Entry(entry) = report.finding else {
            panic!("an entry: {report}");
        };
        assert_eq!(entry.raw, UNALIGNED);
        assert_eq!(
            report.to_string(),
            format!(
                "image: l2 table at offset {at}: l2 entry points to a data cluster that is not \
                 cluster aligned ({UNALIGNED:#018x})"
            )
        );
        let error = block_on(queue.close()).expect_err("writes are refused");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(
            format!("{error:#}").contains(&report.to_string()),
            "{error:#}"
        );
    }
}

#[test]
fn data_mapped_to_metadata_is_reported_with_the_cluster() {
    // The refcount table.
    let (queue, _) = with_bad_u64(first_l2_entry, 1 << 63 | 0x10000);
    assert_eq!(block_on(write(&queue, 0)), Err(Errno::EIO));
    let report = queue.image().corruption().expect("a report");
    assert_eq!(report.structure, Structure::DataCluster);
    assert_eq!(report.finding, Finding::MapsMetadata);
    assert_eq!(report.host_offset, 0x10000);
}

#[test]
fn metadata_counted_as_free_is_reported_with_its_refcount() {
    let block = |bytes: &[u8]| {
        let table = Header::parse(bytes).unwrap().refcount_table_offset.0 as usize;
        u64_at(bytes, table)
    };
    // Clusters 0 to 3: header, tables and blocks.
    let (queue, at) = with_bad_u64(block, 0);
    let mut report = None;
    for cluster in 1..16 {
        if block_on(write(&queue, cluster << 16)).is_err() {
            report = queue.image().corruption();
            break;
        }
    }
    let report = report.expect("a report");
    assert_eq!(report.structure, Structure::RefcountBlock, "{report}");
    assert!((at as u64..at as u64 + 8).contains(&report.host_offset));
}
