//! Logs that cannot be true: a kill, a log with one wrong claim, and an image that stays as it was.

use std::sync::{Arc, Mutex};

use gaur_block::{Device, Payload, Request, Source};
use gaur_format::plan::CreateOptions;

use crate::chain::open;
use crate::commit_log::{Commit, CommitLog};
use crate::create::create;
use crate::error::ErrorKind;
use crate::job::Job;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::references::References;
use crate::snapshot::NewSnapshot;
use crate::test_file::{TestFile, TestHost, block_on, cached_limits};

const CLUSTER: u64 = 64 << 10;
const COPIED: u64 = 1 << 63;

/// Keeps everything until a pass ends.
#[derive(Debug)]
struct Log(u64, Mutex<Vec<Commit>>);

impl Log {
    fn new(number: u64) -> Arc<Log> {
        Arc::new(Log(number, Mutex::default()))
    }

    fn all(&self) -> Vec<Commit> {
        self.1.lock().unwrap().clone()
    }
}

impl CommitLog for Log {
    fn number(&self) -> u64 {
        self.0
    }
    fn committed(&self, commit: Commit) {
        self.1.lock().unwrap().push(commit);
    }
    fn pass_starts(&self) {}
    fn pass_ends(&self) {
        self.1.lock().unwrap().clear();
    }
    fn failed(&self) {}
    fn is_filling(&self) -> bool {
        false
    }
}

/// An image whose process was killed: guest cluster 0 is on the disk, 1 and 2 are in the log only, and what 8
/// held first is in a snapshot, if there is one.
struct Killed {
    host: TestHost,
    file: TestFile,
    left: Vec<Commit>,
}

fn write(queue: &Queue<TestFile>, cluster: u64, byte: u8) {
    let memory = vec![byte; CLUSTER as usize];
    let request = Request::Write {
        offset_bytes: cluster * CLUSTER,
        fua: false,
    };
    let payload = Payload::Write(Source::memory(&memory));
    block_on(queue.submit(request, payload)).unwrap();
}

impl Killed {
    fn new(with_snapshot: bool) -> Killed {
        let options = CreateOptions {
            size_bytes: 1 << 20,
            ..CreateOptions::default()
        };
        let file = TestFile::new(Vec::new(), cached_limits());
        block_on(create(&file, &options, &Job::default())).unwrap();
        let mut host = TestHost::default();
        host.add("disk", file.clone());
        let log = Log::new(5);
        let queue = queue(&host, &log);
        write(&queue, 8, 8);
        let new = NewSnapshot {
            name: "one".to_owned(),
            ..NewSnapshot::default()
        };
        if with_snapshot {
            block_on(queue.create_snapshot(&new, &Job::default())).unwrap();
        }
        write(&queue, 8, 9);
        write(&queue, 0, 1);
        block_on(queue.submit(Request::Flush, Payload::None)).unwrap();
        write(&queue, 1, 2);
        write(&queue, 2, 3);
        std::mem::forget(queue);
        let left = log.all();
        assert_eq!(left.len(), 2);
        Killed { host, file, left }
    }

    /// What comes of a log of this number.
    fn adopt(&self, number: u64, left: &[Commit]) -> Result<Option<u64>, String> {
        let queue = queue(&self.host, &Log::new(number));
        let adopted = block_on(queue.adopt(left, true));
        adopted.map_err(|error| {
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            error.to_string()
        })
    }

    /// With guest cluster 2 at this host offset according to the log.
    fn refuses(&self, host: u64, why: &str) {
        let mut left = self.left.clone();
        left[1].entry = host | COPIED;
        let before = self.file.bytes();
        let said = self.adopt(5, &left).expect_err("it is refused");
        assert!(said.contains(why), "{host:#x}: {said}");
        assert!(
            self.file.bytes() == before,
            "{host:#x}: something was written"
        );
    }

    /// Where the first of these bytes are.
    fn place_of(&self, byte: u8) -> u64 {
        let bytes = self.file.bytes();
        let clusters = bytes.chunks(CLUSTER as usize);
        let mut found = (0..)
            .zip(clusters)
            .filter(|(_, one)| one.iter().all(|at| *at == byte));
        found.next().expect("it is there").0 * CLUSTER
    }
}

fn queue(host: &TestHost, log: &Arc<Log>) -> Queue<TestFile> {
    let log: Arc<dyn CommitLog> = log.clone();
    let options = OpenOptions {
        commit_log: Some(log),
        ..OpenOptions::new(References::Any)
    };
    let opened = block_on(open(host, "disk", &options)).unwrap();
    opened.image.queue(opened.files)
}

#[test]
fn adopting_a_valid_log_is_idempotent() {
    for with_snapshot in [false, true] {
        let disk = Killed::new(with_snapshot);
        assert_eq!(disk.adopt(5, &disk.left), Ok(Some(2)));
        assert_eq!(disk.adopt(5, &disk.left), Ok(Some(0)));
    }
}

#[test]
fn a_log_that_the_image_does_not_name_changes_nothing() {
    let disk = Killed::new(false);
    let before = disk.file.bytes();
    assert_eq!(disk.adopt(6, &disk.left), Ok(None));
    assert!(disk.file.bytes() == before);
}

#[test]
fn a_log_naming_clusters_with_other_owners_is_refused() {
    let disk = Killed::new(true);
    // The L1 table.
    let header = disk.file.bytes();
    let l1 = u64::from_be_bytes(*header[40..].first_chunk().unwrap());
    disk.refuses(l1, "holds metadata");
    disk.refuses(disk.place_of(1), "belongs to guest cluster 0");
    disk.refuses(disk.place_of(8), "belongs to guest cluster 8");
    disk.refuses(disk.left[0].entry & !COPIED, "is named twice");
    disk.refuses(1 << 40, "beyond the end");
    disk.refuses(disk.place_of(1) + 512, "is wrong");
    assert_eq!(disk.adopt(5, &disk.left), Ok(Some(2)));
}

/// Guest cluster 8 is in a snapshot and was written since: the old place is the snapshot's alone.
#[test]
fn a_log_naming_a_cluster_of_a_snapshot_alone_is_refused() {
    let disk = Killed::new(true);
    let mut left = disk.left.clone();
    left[1] = Commit {
        cluster: 8,
        entry: disk.place_of(8) | COPIED,
        ..left[1]
    };
    let said = disk.adopt(5, &left).expect_err("it is refused");
    assert!(said.contains("snapshot alone"), "{said}");
}

/// A program that does not change the header's bits has given a cluster of the log another place.
#[test]
fn a_log_contradicted_by_newer_mappings_is_refused() {
    for with_snapshot in [false, true] {
        let disk = Killed::new(with_snapshot);
        let mut left = disk.left.clone();
        let at = left.iter().position(|commit| commit.cluster == 1);
        left[at.unwrap()].before = (disk.place_of(0) | COPIED, 0);
        let before = disk.file.bytes();
        let said = disk.adopt(5, &left).expect_err("it is refused");
        assert!(said.contains("written to cluster 1 since"), "{said}");
        assert!(disk.file.bytes() == before);
    }
}
