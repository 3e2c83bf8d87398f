//! Commit and rebase under power cuts: whatever a cut leaves shows the same disk.
#![cfg(feature = "broken-order")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use futures_util::future::join;
use gaur_block::{Access, Device, Host, Payload, Request, Source, Target};
use gaur_engine::{
    BrokenRule, Compressor, Format, Job, OpenOptions, Opened, Queue, References, Shares, create,
    open,
};
use gaur_format::plan::CreateOptions;
use gaur_format::{Header, Version};
use gaur_sim::{
    DiskProfile, FileImage, Random, Scheduler, SimFile, SimHost, Stop, Survivors, Trace,
};
use gaur_simulator::judge;
use gaur_simulator::shape::Shape;

const TOP: &str = "top";
const BASE: &str = "base";
/// Too long for the first sector of an image.
const OTHER: &str = concat!(
    "other-other-other-other-other-other-other-other-other-other-other-other-other-other-other-",
    "other-other-other-other-other-other-other-other-other-other-other-other-other-other-other-",
    "other-other-other-other-other-other-other-other-other-other-other-other-other-other-other-",
    "other-other-other-other-other-other-other-other-other-other-other-other-other-other-other-",
    "other-other-other-other-other-other-other-other-other-other-other-other-other-other-other",
);

type Files = BTreeMap<String, FileImage>;

/// What is done to the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Commit,
    RebaseOn(&'static str),
    StandAlone,
}

fn profile(seed: u64) -> DiskProfile {
    DiskProfile {
        request_alignment: [1, 512][seed as usize % 2],
        memory_alignment: 512,
        ..DiskProfile::default()
    }
}

fn shape(seed: u64) -> Shape {
    let extended = seed.is_multiple_of(3);
    Shape {
        version: if !extended && seed % 5 == 1 { 2 } else { 3 },
        cluster_bits: if extended {
            14
        } else {
            [10, 12][seed as usize / 2 % 2]
        },
        extended,
        refcount_order: 4,
    }
}

fn made(seed: u64, clusters: u64, backing: Option<&str>) -> CreateOptions {
    let shape = shape(seed);
    CreateOptions {
        version: if shape.version == 2 {
            Version::V2
        } else {
            Version::V3
        },
        cluster_bits: shape.cluster_bits,
        extended_l2: shape.extended,
        size_bytes: (clusters << shape.cluster_bits) - 512,
        backing_file: backing.map(|name| name.as_bytes().to_vec()),
        backing_format: backing.map(|_| "qcow2".to_owned()),
        ..CreateOptions::default()
    }
}

fn options(broken: Option<BrokenRule>) -> OpenOptions {
    OpenOptions {
        format: Some(Format::Qcow2),
        broken,
        ..OpenOptions::new(References::Any)
    }
}

fn queue(opened: Opened<SimFile>) -> Queue<SimFile> {
    opened.image.queue(opened.files)
}

fn two_queues(opened: Opened<SimFile>) -> (Queue<SimFile>, Queue<SimFile>) {
    let first = opened.image.queue(opened.files.clone());
    (first, opened.image.queue(opened.files))
}

async fn change(queue: &Queue<SimFile>, random: &mut Random) {
    let size = queue.size_bytes();
    for _ in 0..25 {
        let offset_bytes = random.below(size / 512) * 512;
        let len = (512 * random.between(1, 20)).min(size - offset_bytes);
        let request = match random.below(3) {
            0 => Request::WriteZeroes {
                offset_bytes,
                len_bytes: len,
                fua: false,
                may_unmap: random.below(2) == 0,
            },
            _ => Request::Write {
                offset_bytes,
                fua: false,
            },
        };
        let bytes = vec![random.below(256) as u8; len as usize];
        let payload = match request {
            Request::Write { .. } => Payload::Write(Source::memory(&bytes)),
            _ => Payload::None,
        };
        queue.submit(request, payload).await.unwrap();
    }
}

async fn make(host: SimHost, seed: u64) {
    let random = &mut Random::new(seed);
    let clusters = [12, 9, 14].map(|few| few + random.below(4));
    for (name, clusters, backing) in [
        (BASE, clusters[0], None),
        (OTHER, clusters[1], None),
        (TOP, clusters[2], Some(BASE)),
    ] {
        host.add(name, FileImage::new(0), profile(seed));
        let access = Access {
            write: true,
            direct: false,
            lock: true,
            force_share: false,
        };
        let file = host.open(Path::new(name), access).await.unwrap();
        let plan = made(seed, clusters, backing);
        create(&file, &plan, &Job::default()).await.unwrap();
        drop(file);
        let queue = queue(open(&host, name, &options(None)).await.unwrap());
        change(&queue, random).await;
        queue.close().await.unwrap();
    }
}

async fn work(seed: u64, host: SimHost, what: Work, broken: Option<BrokenRule>) {
    let job = Job::default();
    // Small ones, so that two queues find some.
    let shares = Shares::new(4096);
    if what == Work::Commit {
        let base = open(&host, BASE, &options(broken)).await.unwrap();
        let above = OpenOptions {
            stop_at: base.image.layers()[0].id(),
            lock: false,
            ..options(broken)
        };
        let top = open(&host, TOP, &above).await.unwrap();
        let (top, second) = two_queues(top);
        let (base, into) = two_queues(base);
        let both = join(
            top.commit_into(&base, &shares, &job),
            second.commit_into(&into, &shares, &job),
        );
        let (one, two) = both.await;
        one.and(two).unwrap();
        drop((second, into));
        base.close().await.unwrap();
        top.make_empty(&job).await.unwrap();
        return top.close().await.unwrap();
    }
    let top = open(&host, TOP, &options(broken)).await.unwrap();
    let (top, second) = two_queues(top);
    let (new, name) = match what {
        Work::RebaseOn(name) => {
            let reading = OpenOptions {
                read_only: true,
                ..options(None)
            };
            let new = open(&host, name, &reading).await.unwrap();
            (Some(two_queues(new)), Some(name.as_bytes()))
        }
        _ => (None, None),
    };
    // Every other run stores what it copies compressed.
    let compressor = |queue: &Queue<SimFile>| {
        let wanted = seed.is_multiple_of(2);
        wanted.then(|| Compressor::new(queue.image(), None).unwrap())
    };
    let (over, under) = new.as_ref().map(|(one, two)| (one, two)).unzip();
    let both = join(
        top.rebase_onto(over, None, compressor(&top), &shares, &job),
        second.rebase_onto(under, None, compressor(&second), &shares, &job),
    );
    let (one, two) = both.await;
    one.and(two).unwrap();
    drop(second);
    top.set_backing(name, name.map(|_| "qcow2")).await.unwrap();
    top.close().await.unwrap();
}

/// Runs a task on a machine with these files to its end.
fn on<T: 'static, W: Future<Output = T> + 'static>(
    seed: u64,
    files: &Files,
    task: impl FnOnce(SimHost) -> W,
) -> (T, Files) {
    let mut scheduler = Scheduler::new(seed, Trace::default());
    let handle = scheduler.handle();
    let host = SimHost::new(&handle);
    for (name, file) in files {
        host.add(name, file.clone(), profile(seed));
    }
    let result = Rc::new(RefCell::new(None));
    let (slot, running) = (Rc::clone(&result), task(host.clone()));
    handle.spawn("task", async move {
        *slot.borrow_mut() = Some(running.await);
    });
    assert_eq!(scheduler.run(10_000_000).unwrap(), Stop::Done);
    let left = host.images();
    (result.take().expect("it has ended"), left)
}

/// The disk that the chain shows; an error where it cannot be opened.
fn disk(seed: u64, files: &Files, name: &'static str) -> Result<Vec<u8>, String> {
    let read = async move |host: SimHost| {
        let reading = OpenOptions {
            read_only: true,
            ..options(None)
        };
        let opened = open(&host, name, &reading)
            .await
            .map_err(|error| error.to_string())?;
        let queue = queue(opened);
        let mut bytes = vec![0; queue.size_bytes() as usize];
        let payload = Payload::Read(Target::memory(&mut bytes));
        let done = queue
            .submit(Request::Read { offset_bytes: 0 }, payload)
            .await;
        done.map_err(|errno| errno.to_string())?;
        Ok(bytes)
    };
    on(seed, files, read).0
}

/// Cuts the power at many moments of `what`; how often, and the first cut that shows another disk.
fn cut(seed: u64, what: Work, broken: Option<BrokenRule>) -> (u64, Option<String>) {
    let ((), files) = on(seed, &Files::new(), |host| make(host, seed));
    let before = disk(seed, &files, TOP).unwrap();
    let mut scheduler = Scheduler::new(seed, Trace::default());
    let handle = scheduler.handle();
    let host = SimHost::new(&handle);
    for (name, file) in &files {
        host.add(name, file.clone(), profile(seed));
    }
    handle.spawn("work", work(seed, host.clone(), what, broken));
    let random = &mut Random::new(seed);
    let mut cuts = 0;
    loop {
        let stop = scheduler.run(1 + random.below(20)).unwrap();
        let left = host.crash_images(Survivors::draw(random), random);
        cuts += 1;
        let after = disk(seed, &left, TOP);
        if after.as_ref() != Ok(&before) {
            let after = after.map(|_| "another disk");
            return (
                cuts,
                Some(format!("seed {seed}, {what:?}, cut {cuts}: {after:?}")),
            );
        }
        for (name, file) in &left {
            if let Err(wrong) = judge::check(file, shape(seed)) {
                return (
                    cuts,
                    Some(format!("seed {seed}, {what:?}, {name}: {wrong}")),
                );
            }
        }
        if stop == Stop::Done {
            break;
        }
    }
    let whole = host.images();
    assert_eq!(
        disk(seed, &whole, TOP).as_ref(),
        Ok(&before),
        "seed {seed}, {what:?}"
    );
    judged_at_end(seed, &whole, &before, what);
    (cuts, None)
}

/// What the work was for.
fn judged_at_end(seed: u64, files: &Files, before: &[u8], what: Work) {
    for file in files.values() {
        assert_eq!(
            judge::check(file, shape(seed)).unwrap().leaks,
            0,
            "seed {seed}"
        );
    }
    let top = &files[TOP];
    let header = Header::parse(&top.bytes(0, 1 << shape(seed).cluster_bits)).unwrap();
    let name = header.backing_file();
    match what {
        Work::Commit => {
            let base = disk(seed, files, BASE).unwrap();
            assert!(
                base[..before.len()] == *before,
                "seed {seed}: the base has it all"
            );
        }
        Work::RebaseOn(other) => assert_eq!(name, Some(other.as_bytes())),
        Work::StandAlone => assert_eq!(name, None),
    }
}

const WORKS: [Work; 3] = [Work::Commit, Work::RebaseOn(OTHER), Work::StandAlone];

#[test]
fn a_power_cut_during_commit_or_rebase_leaves_the_same_disk() {
    let mut cuts = 0;
    for seed in 0..200 {
        for what in WORKS {
            let (count, wrong) = cut(seed, what, None);
            assert_eq!(wrong, None);
            cuts += count;
        }
    }
    assert!(cuts > 5000, "{cuts} cuts");
}

#[test]
fn a_backing_file_named_before_its_name_is_durable_is_noticed() {
    let noticed =
        (0..200).find_map(|seed| cut(seed, Work::RebaseOn(OTHER), Some(BrokenRule::O5)).1);
    assert!(noticed.is_some());
}
