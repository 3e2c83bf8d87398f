//! What new space costs: fresh space is not filled, copy-on-write is one write, and neither ever shows
//! bytes that are no guest's.

use gaur_block::{Device, Errno, Payload, Request, Source, Tag, Target};
use gaur_format::plan::CreateOptions;

use crate::chain::open;
use crate::create::create;
use crate::options::OpenOptions;
use crate::queue::Queue;
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
        let file = TestFile::new(Vec::new(), cached_limits());
        let options = CreateOptions {
            size_bytes: 1 << 20,
            extended_l2,
            backing_file: backing.is_some().then(|| "base".to_owned()),
            backing_format: backing.is_some().then(|| "raw".to_owned()),
            ..CreateOptions::default()
        };
        block_on(create(&file, &options)).unwrap();
        let mut host = TestHost::default();
        host.add("disk", file.clone());
        if let Some(backing) = backing {
            host.add("base", backing);
        }
        Disk::open(host, file)
    }

    fn open(host: TestHost, file: TestFile) -> Disk {
        let opened = block_on(open(&host, "disk", &OpenOptions::default())).unwrap();
        let queue = opened.image.queue(opened.files);
        Disk { host, file, queue }
    }

    /// The same image, opened again by the next process.
    fn reopen(self) -> Disk {
        drop(self.queue);
        Disk::open(self.host, self.file)
    }

    fn try_write(&self, offset_bytes: u64, len: u64, byte: u8) -> Result<(), Errno> {
        let memory = vec![byte; len as usize];
        let request = Request::Write {
            offset_bytes,
            fua: false,
        };
        let payload = Payload::Write(Source::Memory(&memory));
        block_on(self.queue.submit(Tag(0), request, payload))
    }

    fn write(&self, offset_bytes: u64, len: u64, byte: u8) {
        self.try_write(offset_bytes, len, byte).unwrap();
    }

    fn submit(&self, request: Request) {
        block_on(self.queue.submit(Tag(0), request, Payload::None)).unwrap();
    }

    fn read(&self, offset_bytes: u64, len: u64) -> Vec<u8> {
        let mut memory = vec![0xa5; len as usize];
        let payload = Payload::Read(Target::Memory(&mut memory));
        let request = Request::Read { offset_bytes };
        block_on(self.queue.submit(Tag(0), request, payload)).unwrap();
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
fn fresh_space_is_not_filled() {
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
    let disk = disk.reopen();
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

/// A cluster whose first write failed goes to somebody else, punched or not.
#[test]
fn bytes_in_a_cluster_that_was_given_back_never_show() {
    for (extended, discard) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut disk = Disk::new(extended);
        drop(disk.queue);
        let options = OpenOptions {
            discard,
            ..OpenOptions::default()
        };
        let opened = block_on(open(&disk.host, "disk", &options)).unwrap();
        disk.queue = opened.image.queue(opened.files);
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
