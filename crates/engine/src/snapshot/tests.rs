//! Snapshots against a model: what they hold, what the checker says, and requests beside them.

use std::future::Future;
use std::pin::Pin;

use gaur_block::{Device, Errno, Payload, Request, Source, Target};
use gaur_format::Version;
use gaur_format::plan::CreateOptions;

use super::NewSnapshot;
use crate::chain::open;
use crate::create::create;
use crate::error::ErrorKind;
use crate::job::Job;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::references::References;
use crate::test_file::{
    Random, TestFile, TestHost, block_on, cached_limits, check_clean, checked, run_shuffled,
};

const SIZE: u64 = 2 << 20;
const SECTOR: u64 = 512;

/// An image, what it should hold, and what its snapshots should.
struct Bench {
    host: TestHost,
    file: TestFile,
    queue: Queue<TestFile>,
    disk: Vec<u8>,
    snapshots: Vec<(String, Vec<u8>)>,
}

fn shapes() -> Vec<CreateOptions> {
    let base = CreateOptions {
        size_bytes: SIZE,
        ..CreateOptions::default()
    };
    let with = |cluster_bits, extended_l2, refcount_order| CreateOptions {
        cluster_bits,
        extended_l2,
        refcount_order,
        ..base.clone()
    };
    let old = CreateOptions {
        version: Version::V2,
        ..base.clone()
    };
    vec![
        base.clone(),
        old,
        with(9, false, 4),
        with(12, false, 3),
        with(14, true, 6),
        with(16, true, 2),
    ]
}

fn new_snapshot(name: &str) -> NewSnapshot {
    NewSnapshot {
        name: name.to_owned(),
        ..NewSnapshot::default()
    }
}

impl Bench {
    fn new(options: &CreateOptions, jitter: u64) -> Bench {
        let file = TestFile::new(Vec::new(), cached_limits()).with_jitter(7, jitter);
        block_on(create(&file, options, &Job::default())).unwrap();
        let mut host = TestHost::default();
        host.add("disk", file.clone());
        let queue = opened(&host);
        Bench {
            host,
            file,
            queue,
            disk: vec![0; options.size_bytes as usize],
            snapshots: Vec::new(),
        }
    }

    fn write(&mut self, offset: u64, len: u64, byte: u8) {
        block_on(write(&self.queue, offset, len, byte)).unwrap();
        self.disk[offset as usize..(offset + len) as usize].fill(byte);
    }

    fn write_somewhere(&mut self, random: &mut Random) {
        let len = (1 + random.below(64)) * SECTOR;
        let offset = random.below((SIZE - len) / SECTOR) * SECTOR;
        self.write(offset, len, random.next() as u8);
    }

    fn create(&mut self, name: &str) {
        block_on(
            self.queue
                .create_snapshot(&new_snapshot(name), &Job::default()),
        )
        .unwrap();
        self.snapshots.push((name.to_owned(), self.disk.clone()));
    }

    fn delete(&mut self, name: &str) {
        block_on(self.queue.delete_snapshot(name, &Job::default())).unwrap();
        self.snapshots.retain(|(other, _)| other != name);
    }

    fn apply(&mut self, name: &str) {
        block_on(self.queue.apply_snapshot(name, &Job::default())).unwrap();
        let found = self.snapshots.iter().find(|(other, _)| other == name);
        self.disk = found.unwrap().1.clone();
    }

    fn check_disk(&self) {
        assert!(read_all(&self.queue) == self.disk, "the disk");
    }

    /// Closes the image, has it checked, and compares everything in it; each snapshot by applying it to a
    /// copy.
    fn close(self) {
        self.check_disk();
        block_on(self.queue.close()).unwrap();
        check_clean(&self.file);
        for (name, expected) in &self.snapshots {
            let mut host = TestHost::default();
            host.add("disk", TestFile::new(self.file.bytes(), cached_limits()));
            let queue = opened(&host);
            block_on(queue.apply_snapshot(name, &Job::default())).unwrap();
            assert!(read_all(&queue) == *expected, "snapshot {name}");
        }
        let queue = opened(&self.host);
        assert!(read_all(&queue) == self.disk, "the disk after closing");
    }
}

fn opened(host: &TestHost) -> Queue<TestFile> {
    let opened = block_on(open(host, "disk", &OpenOptions::new(References::Any))).unwrap();
    opened.image.queue(opened.files)
}

async fn write(queue: &Queue<TestFile>, offset: u64, len: u64, byte: u8) -> Result<(), Errno> {
    let memory = vec![byte; len as usize];
    let request = Request::Write {
        offset_bytes: offset,
        fua: false,
    };
    let payload = Payload::Write(Source::memory(&memory));
    queue.submit(request, payload).await
}

fn read_all(queue: &Queue<TestFile>) -> Vec<u8> {
    let mut memory = vec![0xee; queue.size_bytes() as usize];
    let request = Request::Read { offset_bytes: 0 };
    let payload = Payload::Read(Target::memory(&mut memory));
    block_on(queue.submit(request, payload)).unwrap();
    memory
}

#[test]
fn snapshots_keep_what_they_saw_and_give_back_what_they_held() {
    for options in shapes() {
        let mut bench = Bench::new(&options, 0);
        let mut random = Random::new(u64::from(options.cluster_bits) + 1);
        for round in 0..40 {
            for _ in 0..random.below(4) {
                bench.write_somewhere(&mut random);
            }
            let names: Vec<String> = bench.snapshots.iter().map(|one| one.0.clone()).collect();
            let some = names.get(random.below(8) as usize);
            match (random.below(4), some) {
                (0, Some(name)) => bench.apply(name),
                (1, Some(name)) => bench.delete(name),
                _ if names.len() < 6 => bench.create(&format!("number {round}")),
                _ => {}
            }
            bench.check_disk();
        }
        bench.close();
    }
}

#[test]
fn when_the_last_snapshot_is_gone_the_image_owns_its_clusters_again() {
    for options in shapes() {
        let mut bench = Bench::new(&options, 0);
        bench.write(0, SIZE / 2, 1);
        bench.create("a");
        bench.write(SIZE / 4, SIZE / 2, 2);
        bench.delete("a");
        block_on(bench.queue.submit(Request::Flush, Payload::None)).unwrap();
        check_only_leaks(&bench.file);
        bench.close();
    }
}

fn check_only_leaks(file: &TestFile) {
    let report = checked(file);
    assert!(report.only_leaks() || report.is_clean(), "{report:#?}");
}

#[test]
fn requests_go_on_beside_a_snapshot_in_the_making() {
    for (number, options) in (0..).zip(shapes()) {
        for seed in 0..12 {
            let mut bench = Bench::new(&options, 3);
            let mut random = Random::new(seed * 10 + number);
            for _ in 0..20 {
                bench.write_somewhere(&mut random);
            }
            bench.create("before");
            for _ in 0..4 {
                bench.write_somewhere(&mut random);
            }
            let writes: Vec<(u64, u8)> = (0..30)
                .map(|_| (random.below(SIZE / 4096) * 4096, random.next() as u8))
                .collect();
            let queue = &bench.queue;
            let job = Job::default();
            let mut tasks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
            tasks.push(Box::pin(async {
                queue
                    .create_snapshot(&new_snapshot("beside"), &job)
                    .await
                    .unwrap();
                queue.delete_snapshot("before", &job).await.unwrap();
            }));
            for lane in 0..3 {
                let mine = writes.iter().skip(lane).step_by(3);
                tasks.push(Box::pin(async move {
                    for (at, byte) in mine {
                        // Lanes share clusters, not sectors.
                        write(queue, at + lane as u64 * 1024, 1024, *byte)
                            .await
                            .unwrap();
                    }
                }));
            }
            run_shuffled(Random::new(seed + 99), tasks);
            for lane in 0..3 {
                for (at, byte) in writes.iter().skip(lane).step_by(3) {
                    let at = *at as usize + lane * 1024;
                    bench.disk[at..at + 1024].fill(*byte);
                }
            }
            bench.snapshots.clear();
            bench.create("after");
            bench.close();
        }
    }
}

#[test]
fn refused_snapshot_operations_change_nothing() {
    let narrow = CreateOptions {
        refcount_order: 1,
        ..shapes().swap_remove(0)
    };
    let mut bench = Bench::new(&narrow, 0);
    bench.write(0, 1 << 20, 5);
    bench.create("one");
    bench.create("two");
    let third = block_on(
        bench
            .queue
            .create_snapshot(&new_snapshot("three"), &Job::default()),
    );
    let error = third.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:#}");
    let again = block_on(
        bench
            .queue
            .create_snapshot(&new_snapshot("two"), &Job::default()),
    );
    assert_eq!(again.unwrap_err().kind(), ErrorKind::InvalidInput);
    let missing = block_on(bench.queue.delete_snapshot("three", &Job::default()));
    assert_eq!(missing.unwrap_err().kind(), ErrorKind::NotFound);
    let job = Job::default();
    job.cancel();
    let cancelled = block_on(bench.queue.delete_snapshot("two", &job));
    assert_eq!(cancelled.unwrap_err().kind(), ErrorKind::Cancelled);
    let renamed = block_on(bench.queue.rename_snapshot("2", "zwei")).unwrap();
    assert_eq!(renamed.name, b"zwei");
    bench.snapshots[1].0 = "zwei".to_owned();
    bench.write(4096, 4096, 6);
    bench.close();
    let one = CreateOptions {
        refcount_order: 0,
        ..shapes().swap_remove(0)
    };
    let bench = Bench::new(&one, 0);
    let refused = block_on(
        bench
            .queue
            .create_snapshot(&new_snapshot("x"), &Job::default()),
    );
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
}
