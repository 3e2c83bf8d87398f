//! Space: what new space costs, what is given back, and that neither ever shows bytes that are no
//! guest's.

use std::pin::pin;
use std::task::{Context, Waker};

use gaur_block::{Device, Errno, Payload, Request, Source, Target};
use gaur_format::AllocationPolicy;
use gaur_format::plan::CreateOptions;

use crate::chain::open;
use crate::create::create;
use crate::job::Job;
use crate::options::{DetectZeroes, OpenOptions, PassDiscard};
use crate::queue::Queue;
use crate::references::References;
use crate::test_file::{Event, TestFile, TestHost, block_on, cached_limits};

const CLUSTER: u64 = 64 << 10;
const SUBCLUSTER: u64 = 2 << 10;

/// An image of 1 MiB, the file it lies in, and what opened it.
struct Disk {
    host: TestHost,
    file: TestFile,
    queue: Queue<TestFile>,
}

impl Disk {
    fn new(extended_l2: bool) -> Disk {
        Disk::on(extended_l2, None)
    }

    /// With a backing file that holds this.
    fn on(extended_l2: bool, backing: Option<TestFile>) -> Disk {
        let options = CreateOptions {
            size_bytes: 1 << 20,
            extended_l2,
            backing_file: backing.is_some().then(|| b"base".to_vec()),
            backing_format: backing.is_some().then(|| "raw".to_owned()),
            ..CreateOptions::default()
        };
        Disk::made(&options, backing)
    }

    /// With subclusters, and a policy that the image says.
    fn with_policy(allocation: AllocationPolicy) -> Disk {
        let options = CreateOptions {
            size_bytes: 1 << 20,
            extended_l2: true,
            allocation: Some(allocation),
            ..CreateOptions::default()
        };
        Disk::made(&options, None)
    }

    fn made(options: &CreateOptions, backing: Option<TestFile>) -> Disk {
        let file = TestFile::new(Vec::new(), cached_limits());
        block_on(create(&file, options, &Job::default())).unwrap();
        let mut host = TestHost::default();
        host.add("disk", file.clone());
        if let Some(backing) = backing {
            host.add("base", backing);
        }
        Disk::open(host, file, &OpenOptions::new(References::Any))
    }

    fn open(host: TestHost, file: TestFile, options: &OpenOptions) -> Disk {
        let opened = block_on(open(&host, "disk", options)).unwrap();
        let queue = opened.image.queue(opened.files);
        Disk { host, file, queue }
    }

    /// The same image, opened again by the next process.
    fn reopen(self, options: &OpenOptions) -> Disk {
        drop(self.queue);
        Disk::open(self.host, self.file, options)
    }

    fn try_write(&self, offset_bytes: u64, len: u64, byte: u8) -> Result<(), Errno> {
        let memory = vec![byte; len as usize];
        let request = Request::Write {
            offset_bytes,
            fua: false,
        };
        let payload = Payload::Write(Source::memory(&memory));
        block_on(self.queue.submit(request, payload))
    }

    fn write(&self, offset_bytes: u64, len: u64, byte: u8) {
        self.try_write(offset_bytes, len, byte).unwrap();
    }

    fn submit(&self, request: Request) {
        block_on(self.queue.submit(request, Payload::None)).unwrap();
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) {
        self.submit(Request::Discard {
            offset_bytes,
            len_bytes,
        });
    }

    fn flush(&self) {
        self.submit(Request::Flush);
    }

    /// Host ranges given back by `action`: offset from the start of `host`, and length.
    fn given_back(&self, host: u64, action: impl FnOnce(&Disk)) -> Vec<(u64, u64)> {
        self.file.forget_events();
        action(self);
        let events = self.file.events();
        let discards = events.iter().filter_map(|event| match event {
            Event::Discard { offset, len } => Some((offset.wrapping_sub(host), *len)),
            _ => None,
        });
        discards.collect()
    }

    /// Where the guest's bytes at `offset_bytes` are in the file.
    fn host_of(&self, offset_bytes: u64) -> u64 {
        let extent = block_on(self.queue.map(offset_bytes, 1)).unwrap();
        extent.host_offset.unwrap()
    }

    fn read(&self, offset_bytes: u64, len: u64) -> Vec<u8> {
        let mut memory = vec![0xa5; len as usize];
        let payload = Payload::Read(Target::memory(&mut memory));
        let request = Request::Read { offset_bytes };
        block_on(self.queue.submit(request, payload)).unwrap();
        memory
    }

    /// Lengths of the reads and writes that `action` makes.
    fn transfers(&self, action: impl FnOnce(&Disk)) -> (Vec<usize>, Vec<usize>) {
        self.file.forget_events();
        action(self);
        let events = self.file.events();
        let reads = events.iter().filter_map(|event| match event {
            Event::Read { len, .. } => Some(*len),
            _ => None,
        });
        let writes = events.iter().filter_map(|event| match event {
            Event::Write { len, .. } => Some(*len),
            _ => None,
        });
        (reads.collect(), writes.collect())
    }
}

/// A byte at `offset` and nothing but zeros around it.
fn assert_alone(bytes: &[u8], range: std::ops::Range<usize>, byte: u8) {
    for (at, found) in bytes.iter().enumerate() {
        let expected = if range.contains(&at) { byte } else { 0 };
        assert_eq!(*found, expected, "byte {at}");
    }
}

#[test]
fn zeroed_space_is_not_filled() {
    for extended in [false, true] {
        let disk = Disk::new(extended);
        // The first write makes tables; the second finds them.
        disk.write(0, 512, 1);
        let at = 5 * CLUSTER + 3 * SUBCLUSTER + 512;
        let write = |disk: &Disk| disk.write(at, 512, 2);
        assert_eq!(disk.transfers(write), (vec![], vec![512]));
        // Another subcluster of a cluster that is there.
        let write = |disk: &Disk| disk.write(at + 7 * SUBCLUSTER, 512, 3);
        assert_eq!(disk.transfers(write), (vec![], vec![512]));
        let bytes = disk.read(5 * CLUSTER, CLUSTER);
        let second = (10 * SUBCLUSTER + 512) as usize;
        let first = (3 * SUBCLUSTER + 512) as usize;
        assert_alone(&bytes[..second], first..first + 512, 2);
        assert_alone(&bytes[second..], 0..512, 3);
    }
}

#[test]
fn space_of_an_earlier_process_is_filled() {
    let disk = Disk::new(true);
    disk.write(0, 512, 1);
    block_on(disk.queue.flush_all()).unwrap();
    // Killed: something may be left in the space that the file had gained.
    let disk = disk.reopen(&OpenOptions::new(References::Any));
    disk.write(8 * CLUSTER, 512, 1);
    let write = |disk: &Disk| disk.write(SUBCLUSTER, 512, 2);
    assert_eq!(disk.transfers(write).1, [SUBCLUSTER as usize]);
    let write = |disk: &Disk| disk.write(9 * CLUSTER, 512, 2);
    assert_eq!(disk.transfers(write).1, [SUBCLUSTER as usize]);
}

/// Half of a write that failed is in the subcluster; the next write to it must not bring it up.
#[test]
fn bytes_of_a_write_that_failed_never_show() {
    let disk = Disk::new(true);
    disk.write(0, 512, 1);
    let at = 4 * SUBCLUSTER;
    disk.file.tear_writes(Some(512));
    assert_eq!(disk.try_write(at, 1024, 0xee), Err(Errno::EIO));
    disk.file.tear_writes(None);
    disk.write(at + 1536, 512, 2);
    assert_alone(&disk.read(at, SUBCLUSTER), 1536..2048, 2);
}

/// A cluster whose first write failed goes to another guest cluster, punched or not.
#[test]
fn bytes_in_a_cluster_that_was_given_back_never_show() {
    for (extended, discard) in [(false, false), (false, true), (true, false), (true, true)] {
        let disk = Disk::new(extended).reopen(&OpenOptions {
            discard,
            ..OpenOptions::new(References::Any)
        });
        disk.write(0, 512, 1);
        disk.file.tear_writes(Some(60 << 10));
        assert_eq!(disk.try_write(CLUSTER, CLUSTER, 0xee), Err(Errno::EIO));
        disk.file.tear_writes(None);
        block_on(disk.queue.flush_all()).unwrap();
        let holds_it = || disk.file.bytes().contains(&0xee);
        assert_eq!(holds_it(), !discard);
        // More clusters than the queue had reserved.
        for cluster in 1..16 {
            disk.write(cluster * CLUSTER + 512, 512, 3);
            disk.write(cluster * CLUSTER + 9 * SUBCLUSTER + 512, 512, 3);
            assert_alone(&disk.read(cluster * CLUSTER, 9 * SUBCLUSTER), 512..1024, 3);
            assert_alone(
                &disk.read(cluster * CLUSTER + 9 * SUBCLUSTER, 9 * SUBCLUSTER),
                512..1024,
                3,
            );
        }
        let reused = disk
            .file
            .bytes()
            .iter()
            .filter(|byte| **byte == 0xee)
            .count();
        assert!(reused < 60 << 10, "the cluster was used again");
    }
}

/// What a discard leaves in its cluster must not show around the next write.
#[test]
fn discarded_bytes_never_show() {
    for may_unmap in [false, true] {
        let disk = Disk::new(true);
        disk.write(0, CLUSTER, 7);
        disk.submit(Request::WriteZeroes {
            offset_bytes: 4 * SUBCLUSTER,
            len_bytes: 2 * SUBCLUSTER,
            fua: false,
            may_unmap,
        });
        let write = |disk: &Disk| disk.write(4 * SUBCLUSTER + 512, 512, 2);
        assert_eq!(disk.transfers(write).1, [SUBCLUSTER as usize]);
        assert_alone(&disk.read(4 * SUBCLUSTER, 2 * SUBCLUSTER), 512..1024, 2);
    }
}

#[test]
fn whole_subclusters_are_not_copied() {
    let base = TestFile::new(vec![9; 1 << 20], cached_limits());
    let disk = Disk::on(true, Some(base.clone()));
    disk.write(0, SUBCLUSTER, 1);
    base.forget_events();
    let write = |disk: &Disk| disk.write(CLUSTER + SUBCLUSTER, 2 * SUBCLUSTER, 2);
    let expected = vec![2 * SUBCLUSTER as usize];
    assert_eq!(disk.transfers(write), (vec![], expected));
    assert_eq!(base.events(), []);
}

/// Short and long writes, in one and in several subclusters or clusters.
#[test]
fn copy_on_write_is_one_write() {
    for (extended, at, len) in [
        (false, 5 * CLUSTER + 4096, 4096),
        (false, 5 * CLUSTER + 4096, 40 << 10),
        (false, 5 * CLUSTER + 4096, 3 * CLUSTER),
        (true, 5 * CLUSTER + 100, 512),
        (true, 5 * CLUSTER + 100, 2 * CLUSTER),
    ] {
        let base = TestFile::new(vec![9; 1 << 20], cached_limits());
        let disk = Disk::on(extended, Some(base.clone()));
        disk.write(0, 512, 1);
        base.forget_events();
        let unit = if extended { SUBCLUSTER } else { CLUSTER };
        let whole = (at + len).next_multiple_of(unit) - at / unit * unit;
        let write = |disk: &Disk| disk.write(at, len, 2);
        assert_eq!(disk.transfers(write), (vec![], vec![whole as usize]));
        let reads = if len <= 16 << 10 { 1 } else { 2 };
        assert_eq!(base.events().len(), reads, "{len} bytes at {at}");
        let bytes = disk.read(0, 1 << 20);
        let written = at as usize..(at + len) as usize;
        for (at, byte) in bytes.iter().enumerate().skip(CLUSTER as usize) {
            let expected = if written.contains(&at) { 2 } else { 9 };
            assert_eq!(*byte, expected, "byte {at}");
        }
    }
}

#[test]
fn no_write_extends_the_file() {
    let disk = Disk::new(true);
    for cluster in 0..16 {
        disk.write(cluster * CLUSTER, 4096, 1);
    }
    let events = disk.file.events();
    let lens = events
        .iter()
        .filter(|event| matches!(event, Event::SetLen(_)));
    assert_eq!(lens.count(), 3, "two of them made the image");
    assert_eq!(disk.file.bytes().len(), 32 << 20);
    block_on(disk.queue.close()).unwrap();
    let used = disk.file.bytes().len() as u64;
    assert!(
        (16 * CLUSTER..30 * CLUSTER).contains(&used),
        "{used} bytes are left"
    );
}

#[test]
fn compact_gives_discarded_subclusters_back_after_a_flush() {
    for may_unmap in [None, Some(true)] {
        let disk = Disk::new(true);
        disk.write(0, CLUSTER, 7);
        let host = disk.host_of(0);
        let discarded = disk.given_back(host, |disk| match may_unmap {
            // The edges are not whole subclusters and stay.
            None => disk.discard(16 * 1024 - 100, 8 * 1024 + 200),
            Some(may_unmap) => disk.submit(Request::WriteZeroes {
                offset_bytes: 16 * 1024,
                len_bytes: 8 * 1024,
                fua: false,
                may_unmap,
            }),
        });
        assert_eq!(discarded, [], "the mapping is not durable yet");
        assert_alone(&disk.read(16 * 1024, 9 * 1024), 8 * 1024..9 * 1024, 7);
        let flushed = disk.given_back(host, Disk::flush);
        assert_eq!(flushed, [(16 * 1024, 8 * 1024)]);
        assert_eq!(disk.host_of(0), host, "the cluster stays");
        assert_eq!(disk.read(16 * 1024 - 512, 512), [7; 512]);
        assert_eq!(disk.given_back(host, Disk::flush), []);
        assert_eq!(disk.queue.image().holes().bytes, 8 * 1024);
    }
}

#[test]
fn halves_of_a_block_go_together() {
    let disk = Disk::new(true);
    disk.write(0, CLUSTER, 7);
    let host = disk.host_of(0);
    let half = |disk: &Disk| {
        disk.discard(SUBCLUSTER, SUBCLUSTER);
        disk.flush();
    };
    assert_eq!(disk.given_back(host, half), []);
    let other = |disk: &Disk| {
        disk.discard(0, SUBCLUSTER);
        disk.flush();
    };
    assert_eq!(disk.given_back(host, other), [(0, 4096)]);
}

#[test]
fn a_subcluster_that_was_written_again_is_no_hole() {
    let disk = Disk::new(true);
    disk.write(0, CLUSTER, 7);
    let host = disk.host_of(0);
    disk.discard(4096, 5 * 4096);
    disk.write(3 * 4096, 4096, 8);
    let flushed = disk.given_back(host, Disk::flush);
    assert_eq!(flushed, [(4096, 2 * 4096), (4 * 4096, 2 * 4096)]);
    assert_eq!(disk.read(3 * 4096, 4096), [8; 4096]);
}

#[test]
fn a_cluster_goes_with_its_last_subcluster() {
    let disk = Disk::new(true);
    disk.write(0, CLUSTER, 7);
    let host = disk.host_of(0);
    disk.discard(0, CLUSTER / 2);
    disk.discard(CLUSTER / 2, CLUSTER / 2);
    let flushed = disk.given_back(host, Disk::flush);
    assert_eq!(flushed, [(0, CLUSTER)], "once, as a whole");
    let extent = block_on(disk.queue.map(0, CLUSTER)).unwrap();
    assert_eq!(extent.host_offset, None);
}

/// A read that has begun in a subcluster reads it to the end.
#[test]
fn space_is_given_back_after_the_last_request_that_uses_it() {
    let disk = Disk::new(true);
    disk.write(0, CLUSTER, 7);
    let host = disk.host_of(0);
    let _ = disk.file.clone().with_jitter(1, 1000);
    let mut memory = vec![0; 4096];
    let payload = Payload::Read(Target::memory(&mut memory));
    let request = Request::Read { offset_bytes: 4096 };
    {
        let mut reading = pin!(disk.queue.submit(request, payload));
        let context = &mut Context::from_waker(Waker::noop());
        assert!(reading.as_mut().poll(context).is_pending());
        let _ = disk.file.clone().with_jitter(1, 0);
        disk.discard(4096, 4096);
        assert_eq!(disk.given_back(host, Disk::flush), []);
        block_on(reading).unwrap();
    }
    assert_eq!(memory, [7; 4096]);
    assert_eq!(disk.given_back(host, Disk::flush), [(4096, 4096)]);
}

/// Space that was left behind in clusters of the past goes when the guest trims its disk.
#[test]
fn a_discard_gives_back_what_had_no_data_before() {
    let disk = Disk::new(true);
    disk.write(0, 4096, 7);
    let host = disk.host_of(0);
    let trim = |disk: &Disk| {
        disk.discard(4096, CLUSTER - 4096);
        disk.flush();
    };
    assert_eq!(disk.given_back(host, trim), [(4096, CLUSTER - 4096)]);
}

#[test]
fn clusters_without_subclusters_go_whole_or_not_at_all() {
    let disk = Disk::new(false);
    disk.write(0, 2 * CLUSTER, 7);
    let host = disk.host_of(0);
    let trim = |disk: &Disk| {
        disk.discard(4096, 2 * CLUSTER - 4096);
        disk.flush();
    };
    assert_eq!(disk.given_back(host, trim), [(CLUSTER, CLUSTER)]);
}

#[test]
fn contiguous_takes_space_ahead_and_keeps_clusters_whole() {
    let disk = Disk::with_policy(AllocationPolicy::Contiguous);
    let end = disk.file.bytes().len() as u64;
    disk.write(0, 512, 7);
    let grown = disk.file.bytes().len() as u64;
    let taken = |disk: &Disk| -> Vec<(u64, u64)> {
        let events = disk.file.events();
        let taken = events.iter().filter_map(|event| match event {
            Event::Allocate { offset, len } => Some((*offset, *len)),
            _ => None,
        });
        taken.collect()
    };
    assert_eq!(taken(&disk), [(end, grown - end)]);
    let write = |disk: &Disk| disk.write(CLUSTER + 512, 512, 7);
    assert_eq!(
        disk.transfers(write).1,
        [512],
        "what is taken is zeros still"
    );
    assert_eq!(taken(&disk), [], "taken once");

    // Parts of clusters are not given back, whole clusters are.
    disk.write(0, 2 * CLUSTER, 7);
    let host = disk.host_of(0);
    let trim = |disk: &Disk| {
        disk.discard(4096, 2 * CLUSTER - 4096);
        disk.flush();
    };
    assert_eq!(disk.given_back(host, trim), [(CLUSTER, CLUSTER)]);
    assert_eq!(disk.read(4096, 4096), [7; 4096]);
    disk.submit(Request::WriteZeroes {
        offset_bytes: 8192,
        len_bytes: 8192,
        fua: false,
        may_unmap: true,
    });
    assert_eq!(disk.given_back(host, Disk::flush), []);
    assert_eq!(disk.read(8192, 8192), [0; 8192]);

    // Space that was given back is taken again before it is used again.
    disk.file.forget_events();
    for cluster in 1..16 {
        disk.write(cluster * CLUSTER, 4096, 9);
    }
    assert_eq!(taken(&disk), [(host + CLUSTER, CLUSTER)]);
}

#[test]
fn the_policy_of_an_image_can_be_overridden() {
    use AllocationPolicy::{Compact, Contiguous};
    for (stored, given, found) in [
        (None, None, Compact),
        (None, Some(Contiguous), Contiguous),
        (Some(Contiguous), None, Contiguous),
        (Some(Contiguous), Some(Compact), Compact),
        (Some(Compact), None, Compact),
    ] {
        let disk = match stored {
            None => Disk::new(true),
            Some(policy) => Disk::with_policy(policy),
        };
        let disk = disk.reopen(&OpenOptions {
            allocation: given,
            ..OpenOptions::new(References::Any)
        });
        assert_eq!(disk.queue.image().allocation(), Some(found));
        let unit = if found == Compact {
            SUBCLUSTER
        } else {
            CLUSTER
        };
        assert_eq!(u64::from(disk.queue.limits().discard_block), unit);
    }
}

#[test]
fn no_space_is_given_back_without_the_discard_option() {
    let disk = Disk::new(true).reopen(&OpenOptions {
        discard: false,
        ..OpenOptions::new(References::Any)
    });
    disk.write(0, CLUSTER, 7);
    let host = disk.host_of(0);
    let trim = |disk: &Disk| {
        disk.discard(4096, 8192);
        disk.flush();
    };
    assert_eq!(disk.given_back(host, trim), []);
    assert_eq!(disk.read(4096, 8192), [0; 8192]);
}

fn with(options: impl FnOnce(&mut OpenOptions)) -> OpenOptions {
    let mut made = OpenOptions::new(References::Any);
    options(&mut made);
    made
}

#[test]
fn writes_of_zeros_become_zeros_by_mapping_when_asked_to() {
    for (detect, mapped, freed) in [
        (DetectZeroes::Off, true, false),
        (DetectZeroes::On, true, false),
        (DetectZeroes::Unmap, false, true),
    ] {
        let disk = Disk::new(true).reopen(&with(|options| options.detect_zeroes = detect));
        disk.write(0, 2 * CLUSTER, 7);
        let host = disk.host_of(0);
        let written = disk.transfers(|disk| disk.write(CLUSTER, CLUSTER, 0)).1;
        assert_eq!(written.is_empty(), detect != DetectZeroes::Off);
        let extent = block_on(disk.queue.map(CLUSTER, CLUSTER)).unwrap();
        assert_eq!(extent.host_offset.is_some(), mapped, "{detect:?}");
        assert_eq!(extent.zero, detect != DetectZeroes::Off);
        let given_back = disk.given_back(host, Disk::flush);
        assert_eq!(given_back == [(CLUSTER, CLUSTER)], freed);
        assert_eq!(given_back.is_empty(), !freed);
        // One byte is enough, wherever it is.
        let mut memory = vec![0; CLUSTER as usize];
        memory[CLUSTER as usize - 1] = 1;
        let request = Request::Write {
            offset_bytes: 0,
            fua: false,
        };
        let payload = Payload::Write(Source::memory(&memory));
        block_on(disk.queue.submit(request, payload)).unwrap();
        assert_eq!(disk.read(0, CLUSTER), memory);
        assert_eq!(disk.read(CLUSTER, CLUSTER), [0; CLUSTER as usize]);
    }
}

#[test]
fn discarded_clusters_keep_their_place_without_unref() {
    for allocation in [AllocationPolicy::Compact, AllocationPolicy::Contiguous] {
        let options = with(|options| options.discard_no_unref = true);
        let disk = Disk::with_policy(allocation).reopen(&options);
        disk.write(0, 2 * CLUSTER, 7);
        let host = disk.host_of(0);
        let trim = |disk: &Disk| {
            disk.discard(CLUSTER, CLUSTER);
            disk.flush();
        };
        assert_eq!(disk.given_back(host, trim), [(CLUSTER, CLUSTER)]);
        let extent = block_on(disk.queue.map(CLUSTER, CLUSTER)).unwrap();
        assert_eq!(
            (extent.zero, extent.host_offset),
            (true, Some(host + CLUSTER))
        );
        assert_eq!(disk.read(CLUSTER, CLUSTER), [0; CLUSTER as usize]);
        disk.write(3 * CLUSTER, CLUSTER, 8);
        disk.write(CLUSTER + 4096, 4096, 9);
        assert_eq!(disk.host_of(CLUSTER + 4096), host + CLUSTER + 4096);
        assert_eq!(disk.read(CLUSTER, 4096), [0; 4096]);
        assert_eq!(disk.read(CLUSTER + 8192, 4096), [0; 4096]);
    }
}

#[test]
fn space_goes_back_by_what_has_freed_it() {
    for (request, other) in [
        (None, None),
        (Some(false), None),
        (Some(true), Some(false)),
        (None, Some(false)),
    ] {
        let disk = Disk::new(true).reopen(&with(|options| {
            options.pass_discard = PassDiscard {
                request,
                snapshot: None,
                other,
            };
        }));
        disk.write(0, 8 * CLUSTER, 7);
        let host = disk.host_of(0);
        let trim = |disk: &Disk| {
            disk.discard(4096, 4096);
            disk.discard(2 * CLUSTER, CLUSTER);
            disk.flush();
        };
        let wanted = match request.unwrap_or(true) {
            true => vec![(2 * CLUSTER, CLUSTER), (4096, 4096)],
            false => Vec::new(),
        };
        assert_eq!(disk.given_back(host, trim), wanted);
        // A disk that shrinks frees clusters by no request for that.
        let shrink = |disk: &Disk| {
            let job = Job::default();
            block_on(disk.queue.resize(4 * CLUSTER, true, &job)).unwrap();
            disk.flush();
        };
        let given_back = disk.given_back(host, shrink);
        let wanted = other.unwrap_or(true);
        assert_eq!(
            given_back.contains(&(4 * CLUSTER, 4 * CLUSTER)),
            wanted,
            "{given_back:?}"
        );
        assert!(wanted || given_back.is_empty(), "{given_back:?}");
    }
}

/// What a map shows from `at` on for `len` bytes: whether it is marked in the top image, and zeros.
fn marked(disk: &Disk, at: u64, len: u64) -> bool {
    let extent = block_on(disk.queue.map(at, len)).unwrap();
    assert_eq!(extent.len_bytes, len, "one run at {at}");
    assert!(extent.zero, "zeros at {at}");
    extent.present && extent.depth == 0
}

#[test]
fn zeros_are_marked_where_they_hide_nothing_if_that_is_asked_for() {
    let zero = |disk: &Disk, offset_bytes, len_bytes| {
        let request = Request::WriteZeroes {
            offset_bytes,
            len_bytes,
            fua: false,
            may_unmap: false,
        };
        block_on(disk.queue.submit(request, Payload::None)).unwrap();
    };
    for mark_zeros in [false, true] {
        let disk = Disk::new(true).reopen(&with(|options| options.mark_zeros = mark_zeros));
        // From the middle of a subcluster to the middle of another.
        zero(&disk, CLUSTER + 1024, CLUSTER);
        let len = CLUSTER + SUBCLUSTER;
        assert_eq!(marked(&disk, CLUSTER, len), mark_zeros);
        assert!(!marked(&disk, CLUSTER + len, CLUSTER));
        // Beside data there is nothing to mark, and nothing is lost.
        disk.write(8 * CLUSTER, 1024, 7);
        zero(&disk, 8 * CLUSTER + 1024, 512);
        assert_eq!(disk.read(8 * CLUSTER, 1024), [7; 1024]);
        assert_eq!(disk.read(8 * CLUSTER + 1024, 1024), [0; 1024]);
        // Space that zeros keep is kept by more of them.
        disk.write(12 * CLUSTER, CLUSTER, 7);
        let host = disk.host_of(12 * CLUSTER);
        zero(&disk, 12 * CLUSTER, CLUSTER);
        zero(&disk, 12 * CLUSTER + 256, 256);
        assert_eq!(disk.host_of(12 * CLUSTER), host);
    }
    let mut below = vec![0; 1 << 20];
    below[5 * 1024..6 * 1024].fill(9);
    let base = TestFile::new(below, cached_limits());
    let options = with(|options| options.mark_zeros = true);
    let disk = Disk::on(true, Some(base)).reopen(&options);
    // Data around the zeros is copied.
    zero(&disk, 5 * 1024 + 256, 256);
    assert_eq!(disk.read(5 * 1024, 256), [9; 256]);
    assert_eq!(disk.read(5 * 1024 + 256, 256), [0; 256]);
    assert_eq!(disk.read(5 * 1024 + 512, 512), [9; 512]);
}
