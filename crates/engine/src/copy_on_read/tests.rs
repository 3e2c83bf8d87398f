//! What reads and streams leave in the top image, and what they leave alone.

use std::cell::Cell;
use std::pin::Pin;

use gaur_block::{Device, Errno, FileLimits, Payload, Request, Source, Target};
use gaur_format::geometry::Version;
use gaur_format::plan::CreateOptions;

use super::COPYING_BYTES_MAX;
use crate::chain::open;
use crate::create::create;
use crate::error::ErrorKind;
use crate::job::Job;
use crate::map::MapExtent;
use crate::merge::Shares;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::references::References;
use crate::test_file::{
    Event, Random, TestFile, TestHost, block_on, cached_limits, check_clean, run_shuffled,
};

const CLUSTER: u64 = 64 << 10;
const SUBCLUSTER: u64 = 2 << 10;
const SIZE: u64 = 2 << 20;

/// An overlay of a raw file that holds `7` in its first MiB, but for zeros from 512 KiB to 640 KiB.
struct Overlay {
    host: TestHost,
    base: TestFile,
    top: TestFile,
}

impl Overlay {
    fn new(version: Version, extended_l2: bool) -> Overlay {
        Overlay::with(version, extended_l2, cached_limits(), None)
    }

    fn with(
        version: Version,
        extended_l2: bool,
        limits: FileLimits,
        jitter: Option<u64>,
    ) -> Overlay {
        let mut bytes = vec![7; 1 << 20];
        bytes[512 << 10..640 << 10].fill(0);
        let options = CreateOptions {
            size_bytes: SIZE,
            version,
            extended_l2,
            backing_file: Some(b"base".to_vec()),
            backing_format: Some("raw".to_owned()),
            ..CreateOptions::default()
        };
        let file = |bytes, seed| match jitter {
            Some(jitter) => TestFile::new(bytes, limits).with_jitter(jitter + seed, 4),
            None => TestFile::new(bytes, limits),
        };
        let (base, top) = (file(bytes, 1), file(Vec::new(), 2));
        block_on(create(&top, &options, &Job::default())).unwrap();
        let mut host = TestHost::default();
        host.add("top", top.clone());
        host.add("base", base.clone());
        Overlay { host, base, top }
    }

    fn open(&self, change: impl FnOnce(&mut OpenOptions)) -> Queue<TestFile> {
        let mut options = OpenOptions::new(References::Any);
        options.copy_on_read = true;
        change(&mut options);
        let opened = block_on(open(&self.host, "top", &options)).unwrap();
        opened.image.queue(opened.files)
    }

    /// Bytes read from the base by `action`.
    fn read_below(&self, action: impl FnOnce()) -> usize {
        self.base.forget_events();
        action();
        let events = self.base.events();
        let reads = events.iter().map(|event| match event {
            Event::Read { len, .. } => *len,
            _ => 0,
        });
        reads.sum()
    }
}

fn read(queue: &Queue<TestFile>, offset_bytes: u64, len: u64) -> Vec<u8> {
    let mut memory = vec![0xa5; len as usize];
    let payload = Payload::Read(Target::memory(&mut memory));
    block_on(queue.submit(Request::Read { offset_bytes }, payload)).unwrap();
    memory
}

async fn write(queue: &Queue<TestFile>, offset_bytes: u64, len: u64, byte: u8) {
    let memory = vec![byte; len as usize];
    let request = Request::Write {
        offset_bytes,
        fua: false,
    };
    let payload = Payload::Write(Source::memory(&memory));
    queue.submit(request, payload).await.unwrap();
}

/// What the top image maps, as (start, length, zeros).
fn mapped(queue: &Queue<TestFile>) -> Vec<(u64, u64, bool)> {
    let mut runs: Vec<(u64, u64, bool)> = Vec::new();
    let mut at = 0;
    while at < SIZE {
        let extent: MapExtent = block_on(queue.map(at, SIZE - at)).unwrap();
        if extent.present && extent.depth == 0 {
            match runs.last_mut() {
                Some((start, len, zero)) if *start + *len == at && *zero == extent.zero => {
                    *len += extent.len_bytes;
                }
                _ => runs.push((at, extent.len_bytes, extent.zero)),
            }
        }
        at += extent.len_bytes;
    }
    runs
}

fn close(overlay: &Overlay, queue: Queue<TestFile>) {
    block_on(queue.close()).unwrap();
    check_clean(&overlay.top);
}

#[test]
fn a_read_leaves_its_units_in_the_top_and_the_next_finds_them_there() {
    for (version, extended, unit) in [
        (Version::V2, false, CLUSTER),
        (Version::V3, false, CLUSTER),
        (Version::V3, true, SUBCLUSTER),
    ] {
        let overlay = Overlay::new(version, extended);
        let queue = overlay.open(|_| ());
        let at = 3 * CLUSTER + 5 * SUBCLUSTER + 100;
        let below = overlay.read_below(|| assert_eq!(read(&queue, at, 1000), [7; 1000]));
        assert_eq!(below as u64, unit);
        assert_eq!(mapped(&queue), [(at - at % unit, unit, false)]);
        let below = overlay.read_below(|| assert_eq!(read(&queue, at, 1000), [7; 1000]));
        assert_eq!(below, 0);
        assert_eq!(queue.image().copies().bytes, unit);
        close(&overlay, queue);
    }
}

/// Zeros by the mapping cost nothing to find again; where zeros are marked they are, as QEMU does.
#[test]
fn zeros_below_are_marked_where_zeros_are() {
    for (version, mark_zeros) in [
        (Version::V2, true),
        (Version::V3, false),
        (Version::V3, true),
    ] {
        let overlay = Overlay::new(version, false);
        let queue = overlay.open(|options| options.mark_zeros = mark_zeros);
        // Data that is zeros, and what lies behind the end of the base.
        let middle = (512 << 10, 128 << 10);
        assert_eq!(read(&queue, middle.0, middle.1), vec![0; middle.1 as usize]);
        let end = ((1 << 20) + 1000, CLUSTER);
        assert_eq!(read(&queue, end.0, end.1), vec![0; end.1 as usize]);
        let zeros = (middle.0, middle.1, true);
        let expected = match (version, mark_zeros) {
            (Version::V2, _) => vec![(middle.0, middle.1, false)],
            (_, false) => vec![zeros],
            (_, true) => vec![zeros, (1 << 20, 2 * CLUSTER, true)],
        };
        assert_eq!(mapped(&queue), expected);
        close(&overlay, queue);
    }
}

#[test]
fn what_the_top_has_is_left_alone() {
    let overlay = Overlay::new(Version::V3, true);
    let queue = overlay.open(|_| ());
    block_on(write(&queue, 28 << 10, SUBCLUSTER, 8));
    block_on(write(&queue, 34 << 10, SUBCLUSTER, 9));
    let zero = Request::WriteZeroes {
        offset_bytes: 40 << 10,
        len_bytes: SUBCLUSTER,
        fua: false,
        may_unmap: false,
    };
    block_on(queue.submit(zero, Payload::None)).unwrap();
    let mut expected = vec![7; CLUSTER as usize];
    expected[28 << 10..30 << 10].fill(8);
    expected[34 << 10..36 << 10].fill(9);
    expected[40 << 10..42 << 10].fill(0);
    assert_eq!(read(&queue, 30 << 10, 4 << 10), [7; 4 << 10]);
    assert_eq!(mapped(&queue)[0], (28 << 10, 8 << 10, false));
    assert_eq!(read(&queue, 0, CLUSTER), expected);
    assert_eq!(read(&queue, 0, CLUSTER), expected);
    close(&overlay, queue);
}

/// Reads and writes of the same clusters at once: a copy never comes up over a write.
#[test]
fn a_write_beside_a_copy_has_the_last_word() {
    for seed in 0..60 {
        let extended = seed % 2 == 0;
        let overlay = Overlay::with(Version::V3, extended, cached_limits(), Some(seed));
        let queue = overlay.open(|_| ());
        let (queue, done) = (&queue, &Cell::new(0));
        let reader = |at: u64| async move {
            let mut memory = vec![0; CLUSTER as usize];
            let payload = Payload::Read(Target::memory(&mut memory));
            let request = Request::Read { offset_bytes: at };
            queue.submit(request, payload).await.unwrap();
            done.set(done.get() + 1);
        };
        let writer = |at: u64, byte| async move {
            write(queue, at, 512, byte).await;
            done.set(done.get() + 1);
        };
        let streamer = async {
            let job = Job::default();
            queue.stream(&Shares::new(4096), &job).await.unwrap();
            done.set(done.get() + 1);
        };
        run_shuffled(
            Random::new(seed),
            vec![
                Box::pin(reader(0)),
                Box::pin(reader(CLUSTER)),
                Box::pin(writer(1024, 1)),
                Box::pin(writer(CLUSTER + 512, 2)),
                Box::pin(writer(8 * CLUSTER, 3)),
                Box::pin(streamer),
            ],
        );
        assert_eq!(done.get(), 6);
        assert_eq!(read(queue, 1024, 512), [1; 512], "seed {seed}");
        assert_eq!(read(queue, CLUSTER + 512, 512), [2; 512], "seed {seed}");
        assert_eq!(read(queue, 8 * CLUSTER, 512), [3; 512], "seed {seed}");
        assert_eq!(read(queue, 8 * CLUSTER + 512, 512), [0; 512], "seed {seed}");
        let below = overlay.read_below(|| drop(read(queue, 0, 1 << 20)));
        assert_eq!(below, 0, "all was copied");
    }
}

#[test]
fn a_copy_that_fails_does_not_fail_the_read() {
    let overlay = Overlay::new(Version::V3, false);
    let queue = overlay.open(|_| ());
    // The tables are there.
    assert_eq!(read(&queue, 0, 512), [7; 512]);
    overlay
        .top
        .fail_from(overlay.top.events().len(), Errno::ENOSPC);
    for cluster in 1..5 {
        assert_eq!(read(&queue, cluster * CLUSTER, 512), [7; 512]);
    }
    let copies = queue.image().copies();
    assert_eq!(
        (copies.failed, copies.first_failure),
        (4, Some(Errno::ENOSPC))
    );
    assert_eq!(queue.image().poisoned(), None);
    overlay.top.fail_from(usize::MAX, Errno::ENOSPC);
    assert_eq!(read(&queue, 5 * CLUSTER, 512), [7; 512]);
    assert_eq!(
        mapped(&queue),
        [(0, CLUSTER, false), (5 * CLUSTER, CLUSTER, false)]
    );
    close(&overlay, queue);
}

/// Copies under way are bounded: reads beyond that are served and leave nothing.
#[test]
fn a_deep_queue_of_reads_is_not_held_up_by_copies() {
    let clusters = 2 * COPYING_BYTES_MAX / CLUSTER;
    let base = TestFile::new(vec![7; (clusters * CLUSTER) as usize], cached_limits());
    let options = CreateOptions {
        size_bytes: clusters * CLUSTER,
        backing_file: Some(b"base".to_vec()),
        backing_format: Some("raw".to_owned()),
        ..CreateOptions::default()
    };
    let top = TestFile::new(Vec::new(), cached_limits()).with_jitter(5, 50);
    block_on(create(&top, &options, &Job::default())).unwrap();
    let mut host = TestHost::default();
    host.add("top", top.clone());
    host.add("base", base.clone().with_jitter(6, 50));
    let overlay = Overlay { host, base, top };
    let queue = overlay.open(|_| ());
    let (queue_ref, done) = (&queue, &Cell::new(0));
    let reader = |cluster: u64| async move {
        let mut memory = vec![0; 512];
        let payload = Payload::Read(Target::memory(&mut memory));
        let offset_bytes = cluster * CLUSTER + 1024;
        let request = Request::Read { offset_bytes };
        queue_ref.submit(request, payload).await.unwrap();
        assert_eq!(memory, [7; 512]);
        done.set(done.get() + 1);
    };
    let readers = (0..clusters)
        .map(|cluster| -> Pin<Box<dyn Future<Output = ()>>> { Box::pin(reader(cluster)) });
    run_shuffled(Random::new(1), readers.collect());
    let copies = queue.image().copies();
    assert_eq!(done.get(), clusters);
    assert!(copies.left_out > 0 && copies.bytes > 0, "{copies:?}");
    let left = (copies.left_out * CLUSTER) + copies.bytes;
    assert!(
        left <= clusters * CLUSTER && copies.failed == 0,
        "{copies:?}"
    );
    assert_eq!(queue.copying_bytes.get(), 0);
    close(&overlay, queue);
}

#[test]
fn an_image_that_is_only_read_cannot_keep_what_is_read() {
    let overlay = Overlay::new(Version::V3, false);
    let options = OpenOptions {
        copy_on_read: true,
        read_only: true,
        ..OpenOptions::new(References::Any)
    };
    let error = block_on(open(&overlay.host, "top", &options)).map(drop);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn a_stream_copies_what_is_below_and_a_second_one_nothing() {
    for (version, extended) in [
        (Version::V2, false),
        (Version::V3, false),
        (Version::V3, true),
    ] {
        let overlay = Overlay::new(version, extended);
        let queue = overlay.open(|options| options.copy_on_read = false);
        block_on(write(&queue, 100, 1000, 1));
        let stream = |job: &Job| block_on(queue.stream(&Shares::default(), job));
        let cancelled = Job::default();
        cancelled.cancel();
        assert_eq!(stream(&cancelled).unwrap_err().kind(), ErrorKind::Cancelled);
        let job = Job::default();
        let unit = if extended { SUBCLUSTER } else { CLUSTER };
        assert_eq!(stream(&job).unwrap(), (1 << 20) - unit);
        assert_eq!(job.progress_bytes(), (SIZE, SIZE));
        let again = || assert_eq!(stream(&Job::default()).unwrap(), 0);
        assert_eq!(overlay.read_below(again), 0);
        // It stands alone now.
        block_on(queue.set_backing(None, None)).unwrap();
        close(&overlay, queue);
        let queue = overlay.open(|_| ());
        assert_eq!(queue.image().layers().len(), 1);
        let mut expected = vec![7; SIZE as usize];
        expected[100..1100].fill(1);
        expected[512 << 10..640 << 10].fill(0);
        expected[1 << 20..].fill(0);
        assert!(read(&queue, 0, SIZE) == expected);
    }
}
