//! Compressed clusters as they are written and read: packed and counted right, read once for all queues, and
//! never stale.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use gaur_block::{Device, Errno, Payload, Request, Source, Target};
use gaur_format::header::CompressionType;
use gaur_format::plan::CreateOptions;
use gaur_format::{CompressedDescriptor, Version};

use crate::cache_options::CacheOptions;
use crate::chain::open;
use crate::compressor::{CompressedCluster, Compressor};
use crate::create::create;
use crate::image::Image;
use crate::job::Job;
use crate::metadata::maps::Kind;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::range::GuestRange;
use crate::references::References;
use crate::test_file::{
    Event, Random, TestFile, TestHost, block_on, cached_limits, check_clean, direct_limits,
    run_shuffled,
};

const CLUSTER: usize = 4096;
const CLUSTERS: usize = 64;

fn options() -> CreateOptions {
    CreateOptions {
        size_bytes: (CLUSTERS * CLUSTER) as u64,
        cluster_bits: 12,
        ..CreateOptions::default()
    }
}

struct Disk {
    host: TestHost,
    file: TestFile,
    image: Arc<Image>,
}

impl Disk {
    fn new(options: &CreateOptions) -> Disk {
        Disk::on(TestFile::new(Vec::new(), cached_limits()), options)
    }

    fn on(file: TestFile, options: &CreateOptions) -> Disk {
        block_on(create(&file, options, &Job::default())).unwrap();
        let mut host = TestHost::default();
        host.add("disk", file.clone());
        Disk::open(host, file, &OpenOptions::new(References::Any))
    }

    fn open(host: TestHost, file: TestFile, options: &OpenOptions) -> Disk {
        let opened = block_on(open(&host, "disk", options)).unwrap();
        let image = opened.image;
        Disk { host, file, image }
    }

    fn queue(&self) -> Queue<TestFile> {
        self.image.queue(vec![self.file.clone()])
    }

    /// Closes the image, which is clean then, and opens it again.
    fn reopen(self, options: &OpenOptions) -> Disk {
        block_on(self.queue().close()).unwrap();
        check_clean(&self.file);
        Disk::open(self.host, self.file, options)
    }
}

/// Bytes that compress, different for every seed.
fn cluster(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let letters: Vec<u8> = (0..16).map(|_| random.next() as u8).collect();
    (0..len)
        .map(|_| letters[random.below(16) as usize])
        .collect()
}

async fn write_compressed(queue: &Queue<TestFile>, at: usize, plain: &[u8]) -> Result<(), Errno> {
    let mut packed = CompressedCluster::default();
    Compressor::new(queue.image(), None)
        .unwrap()
        .compress(plain, &mut packed);
    queue.write_compressed(at as u64, plain, &packed).await
}

async fn write(queue: &Queue<TestFile>, at: usize, bytes: &[u8]) {
    let request = Request::Write {
        offset_bytes: at as u64,
        fua: false,
    };
    let payload = Payload::Write(Source::memory(bytes));
    queue.submit(request, payload).await.unwrap();
}

async fn zero(queue: &Queue<TestFile>, range: Range<usize>) {
    let request = Request::WriteZeroes {
        offset_bytes: range.start as u64,
        len_bytes: range.len() as u64,
        fua: false,
        may_unmap: true,
    };
    queue.submit(request, Payload::None).await.unwrap();
}

async fn flush(queue: &Queue<TestFile>) {
    queue.submit(Request::Flush, Payload::None).await.unwrap();
}

async fn read(queue: &Queue<TestFile>, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xa5; len];
    let offset_bytes = at as u64;
    let payload = Payload::Read(Target::memory(&mut bytes));
    queue
        .submit(Request::Read { offset_bytes }, payload)
        .await
        .unwrap();
    bytes
}

fn descriptor(queue: &Queue<TestFile>, at: usize) -> Option<CompressedDescriptor> {
    let found = block_on(queue.find(GuestRange::new(at as u64, 1))).unwrap();
    match found.kind {
        Kind::Compressed { descriptor } => Some(descriptor),
        _ => None,
    }
}

#[test]
fn compressed_clusters_are_packed_byte_by_byte_and_counted() {
    let kinds = [CompressionType::Deflate, CompressionType::Zstd];
    for (number, kind) in kinds.into_iter().enumerate() {
        let disk = Disk::new(&CreateOptions {
            compression_type: kind,
            ..options()
        });
        let queue = disk.queue();
        let mut end = 0;
        let mut straddling = 0;
        for at in 0..CLUSTERS {
            let plain = cluster(at as u64, CLUSTER);
            block_on(write_compressed(&queue, at * CLUSTER, &plain)).unwrap();
            let found = descriptor(&queue, at * CLUSTER).expect("a compressed cluster");
            let gap = found.offset.abs_diff(end);
            assert!(
                at == 0 || gap < 512,
                "cluster {at} begins {gap} bytes from the one before"
            );
            end = found.offset + found.byte_len();
            straddling += u64::from(found.clusters(queue.active().unwrap().geometry()).1 > 1);
        }
        assert!(straddling > 5, "{straddling}");
        drop(queue);
        let disk = disk.reopen(&OpenOptions::new(References::Any));
        let len = disk.file.bytes().len();
        assert!(len < CLUSTERS * CLUSTER * 3 / 4 + 8 * CLUSTER, "{len}");
        let queue = disk.queue();
        for at in 0..CLUSTERS {
            let plain = cluster(at as u64, CLUSTER);
            assert!(
                block_on(read(&queue, at * CLUSTER, CLUSTER)) == plain,
                "{number} {at}"
            );
        }
    }
}

#[test]
fn what_cannot_be_compressed_or_does_not_fit_is_said_or_stored_plain() {
    let disk = Disk::new(&CreateOptions {
        size_bytes: (CLUSTERS * CLUSTER) as u64 - 1024,
        ..options()
    });
    let queue = disk.queue();
    let noise: Vec<u8> = {
        let mut random = Random::new(1);
        (0..CLUSTER).map(|_| random.next() as u8).collect()
    };
    block_on(write_compressed(&queue, 0, &noise)).unwrap();
    assert_eq!(descriptor(&queue, 0), None);
    block_on(write_compressed(&queue, CLUSTER, &[0; CLUSTER])).unwrap();
    let plain = cluster(1, CLUSTER);
    for (at, len) in [(512, CLUSTER), (0, CLUSTER - 512)] {
        let refused = block_on(write_compressed(&queue, at, &plain[..len]));
        assert_eq!(refused, Err(Errno::EINVAL), "{at} {len}");
    }
    let beyond = block_on(write_compressed(&queue, CLUSTERS * CLUSTER, &plain));
    assert_eq!(beyond, Err(Errno::ENOSPC));
    // The last cluster of the disk is shorter.
    let last = (CLUSTERS - 1) * CLUSTER;
    block_on(write_compressed(&queue, last, &plain[..CLUSTER - 1024])).unwrap();
    assert!(descriptor(&queue, last).is_some());
    // Made for another compression type.
    let other = Disk::new(&CreateOptions {
        compression_type: CompressionType::Zstd,
        ..options()
    });
    let mut packed = CompressedCluster::default();
    Compressor::new(&other.image, None)
        .unwrap()
        .compress(&plain, &mut packed);
    let refused = block_on(queue.write_compressed(0, &plain, &packed));
    assert_eq!(refused, Err(Errno::EINVAL));
    assert!(Compressor::new(&other.image, Some(23)).is_err());
    assert!(Compressor::new(&other.image, Some(0)).is_err());
    assert!(block_on(read(&queue, 0, CLUSTER)) == noise);
    assert_eq!(
        block_on(read(&queue, last, CLUSTER - 1024)),
        plain[..CLUSTER - 1024]
    );
    drop((queue, other));
    disk.reopen(&OpenOptions::new(References::Any));
}

/// With counts of one bit no host cluster can be shared, with two bits three references fit.
#[test]
fn narrow_counts_limit_how_many_clusters_share_a_host_cluster() {
    for (order, sharing) in [(0, 1), (1, 2), (2, 14), (6, 14)] {
        let disk = Disk::new(&CreateOptions {
            refcount_order: order,
            ..options()
        });
        let queue = disk.queue();
        for at in 0..CLUSTERS {
            let plain = vec![at as u8 + 1; CLUSTER];
            block_on(write_compressed(&queue, at * CLUSTER, &plain)).unwrap();
        }
        let mut most = 0;
        for at in 0..CLUSTERS {
            let first = descriptor(&queue, at * CLUSTER).unwrap().offset >> 12;
            let same =
                |other: &usize| descriptor(&queue, other * CLUSTER).unwrap().offset >> 12 == first;
            most = most.max((0..CLUSTERS).filter(same).count());
        }
        assert!(most < (1 << (1 << order.min(3))), "{order}: {most}");
        assert!(most >= sharing, "{order}: {most}");
        drop(queue);
        disk.reopen(&OpenOptions::new(References::Any));
    }
}

/// A freed cluster whose place another compressed cluster gets must not be read from the cache.
#[test]
fn reused_place_of_a_compressed_cluster_shows_the_new_one() {
    let disk = Disk::new(&options());
    let queue = disk.queue();
    block_on(async {
        write_compressed(&queue, 0, &[1; CLUSTER]).await.unwrap();
        flush(&queue).await;
        assert!(read(&queue, 0, CLUSTER).await == [1; CLUSTER]);
        let old = descriptor(&queue, 0);
        queue.active().unwrap().give_back_packed();
        zero(&queue, 0..CLUSTER).await;
        flush(&queue).await;
        flush(&queue).await;
        // The queue uses up what it has reserved first: a MiB.
        for at in (1..CLUSTERS).cycle().take((1 << 20) / CLUSTER) {
            queue.active().unwrap().give_back_packed();
            write_compressed(&queue, at * CLUSTER, &[2; CLUSTER])
                .await
                .unwrap();
            let found = descriptor(&queue, at * CLUSTER);
            let bytes = read(&queue, at * CLUSTER, CLUSTER).await;
            assert!(bytes == [2; CLUSTER], "cluster {at}");
            if found == old {
                return;
            }
        }
        panic!("the place was never used again");
    });
}

#[test]
fn a_cluster_is_decompressed_once_for_all_queues() {
    let disk = Disk::new(&options());
    let writing = disk.queue();
    for at in 0..4 {
        let plain = cluster(at as u64, CLUSTER);
        block_on(write_compressed(&writing, at * CLUSTER, &plain)).unwrap();
    }
    drop(writing);
    let disk = disk.reopen(&OpenOptions::new(References::Any));
    let file = disk.file.clone().with_jitter(3, 5);
    let queues: Vec<_> = (0..4)
        .map(|_| disk.image.queue(vec![file.clone()]))
        .collect();
    // Brings the slice of the L2 table in.
    block_on(read(&queues[0], 8 * CLUSTER, 1));
    file.forget_events();
    let reads = queues.iter().map(|queue| {
        Box::pin(async move {
            for at in (2 * CLUSTER..3 * CLUSTER).step_by(512) {
                let bytes = read(queue, at, 512).await;
                assert!(bytes == cluster(2, CLUSTER)[at % CLUSTER..][..512]);
            }
        }) as _
    });
    run_shuffled(Random::new(5), reads.collect());
    let count = |file: &TestFile| {
        let events = file.events();
        events
            .iter()
            .filter(|event| matches!(event, Event::Read { .. }))
            .count()
    };
    assert_eq!(count(&file), 1);
    // Read in sequence, the next one comes along.
    let next = disk.image.queue(vec![file.clone()]);
    block_on(read(&next, 0, 512));
    assert_eq!(count(&file), 3);
    block_on(read(&queues[1], CLUSTER, 512));
    assert_eq!(count(&file), 3);
    disk.image.clean_caches();
    disk.image.clean_caches();
    block_on(read(&queues[1], 2 * CLUSTER, 512));
    assert!(count(&file) > 3);
}

/// Compressed and plain writes, zeros, reads and flushes of several queues beside each other, on few
/// clusters and with little cache, so that places are used again all the time.
#[test]
fn random_compressed_and_plain_writes_read_back_and_count_right() {
    for seed in 0..12_u64 {
        let limits = match seed % 3 {
            0 => direct_limits(512),
            1 => direct_limits(4096),
            _ => cached_limits(),
        };
        let version = if seed % 8 == 7 {
            Version::V2
        } else {
            Version::V3
        };
        let made = CreateOptions {
            refcount_order: if version == Version::V2 {
                4
            } else {
                [0, 1, 4][seed as usize % 3]
            },
            version,
            compression_type: match version {
                Version::V3 if seed % 2 == 0 => CompressionType::Zstd,
                _ => CompressionType::Deflate,
            },
            extended_l2: seed % 4 == 2,
            cluster_bits: if seed % 4 == 2 { 14 } else { 12 },
            size_bytes: 20 * (if seed % 4 == 2 { 1 << 14 } else { 1 << 12 }) - 1024,
            ..CreateOptions::default()
        };
        let file = TestFile::new(Vec::new(), limits).with_jitter(seed, 4);
        let disk = Disk::on(file, &made);
        let small = OpenOptions {
            cache: CacheOptions {
                decompressed_bytes: Some(6 << made.cluster_bits),
                l2_bytes: Some(512),
                l2_entry_bytes: Some(512),
                refcount_bytes: Some(512),
                ..CacheOptions::default()
            },
            ..OpenOptions::new(References::Any)
        };
        let disk = disk.reopen(&small);
        let size = 1_usize << made.cluster_bits;
        // Each task has clusters of its own, so that what it reads is known.
        let model = Rc::new(RefCell::new(vec![0_u8; made.size_bytes as usize]));
        let queues: Vec<_> = (0..4).map(|_| disk.queue()).collect();
        let tasks = queues.iter().enumerate().map(|(number, queue)| {
            let model = Rc::clone(&model);
            Box::pin(async move {
                let mut random = Random::new(seed * 16 + number as u64);
                for step in 0..150 {
                    work(queue, &model, &mut random, (number, size), step).await;
                }
            }) as _
        });
        run_shuffled(Random::new(seed), tasks.collect());
        let all = block_on(read(&queues[0], 0, made.size_bytes as usize));
        assert!(all == *model.borrow(), "seed {seed}");
        drop(queues);
        let disk = disk.reopen(&OpenOptions::new(References::Any));
        let all = block_on(read(&disk.queue(), 0, made.size_bytes as usize));
        assert!(all == *model.borrow(), "seed {seed} after reopening");
    }
}

/// One step of a task, on clusters of its own.
async fn work(
    queue: &Queue<TestFile>,
    model: &RefCell<Vec<u8>>,
    random: &mut Random,
    (number, size): (usize, usize),
    step: u64,
) {
    let end = model.borrow().len();
    let start = (random.below(5) as usize * 4 + number) * size;
    let whole = start..end.min(start + size);
    let value = step * 4 + number as u64;
    match random.below(10) {
        0..4 => {
            let len = if random.below(2) == 0 {
                whole.len()
            } else {
                64.min(whole.len())
            };
            let mut bytes = cluster(value, len);
            bytes.resize(whole.len(), value as u8);
            write_compressed(queue, start, &bytes).await.unwrap();
            model.borrow_mut()[whole].copy_from_slice(&bytes);
        }
        4..6 => {
            let at = start + random.below(whole.len() as u64 - 512) as usize / 512 * 512;
            let bytes = cluster(value, 512);
            write(queue, at, &bytes).await;
            model.borrow_mut()[at..at + 512].copy_from_slice(&bytes);
        }
        6 => {
            zero(queue, whole.clone()).await;
            model.borrow_mut()[whole].fill(0);
        }
        7 => flush(queue).await,
        _ => {
            let bytes = read(queue, start, whole.len()).await;
            assert!(bytes == model.borrow()[whole], "step {step} of {number}");
        }
    }
}

#[test]
fn a_failed_compressed_write_gives_its_place_back_and_changes_nothing() {
    let disk = Disk::new(&options());
    let queue = disk.queue();
    let (one, two) = (cluster(1, CLUSTER), cluster(2, CLUSTER));
    block_on(write_compressed(&queue, 0, &one)).unwrap();
    block_on(write_compressed(&queue, CLUSTER, &one)).unwrap();
    disk.file.fail_from(disk.file.events().len(), Errno::EIO);
    let failed = block_on(write_compressed(&queue, 0, &two));
    assert_eq!(failed, Err(Errno::EIO));
    disk.file.fail_from(usize::MAX, Errno::EIO);
    block_on(write_compressed(&queue, 2 * CLUSTER, &two)).unwrap();
    for (at, plain) in [(0, &one), (CLUSTER, &one), (2 * CLUSTER, &two)] {
        assert!(block_on(read(&queue, at, CLUSTER)) == *plain, "{at}");
    }
    drop(queue);
    disk.reopen(&OpenOptions::new(References::Any));
}
