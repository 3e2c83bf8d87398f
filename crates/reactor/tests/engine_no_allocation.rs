//! The engine on the ring: once a queue is warm, requests allocate nothing, whether they read, write
//! in place or allocate clusters. (An allocating write may make the cache of refcounts or of L2
//! slices grow; that is warm-up, so the image is small enough to be warm.)

#[path = "scratch/counting.rs"]
mod counting;
#[path = "scratch/files.rs"]
mod scratch;

use counting::{Counting, allocations};
use gaur_block::{Access, Device, Host, Payload, Request, Source, Target};
use gaur_engine::{CacheOptions, OpenOptions, References, create, open};
use gaur_format::plan::CreateOptions;
use gaur_reactor::{
    Config, CreateFile, Driver, OpenFile, Reactor, ReactorFile, ReactorHost, buffer,
};
use scratch::Scratch;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZE: u64 = 64 << 20;
const CLUSTER: u64 = 65536;

async fn write(device: &impl Device, offset_bytes: u64, bytes: &[u8]) {
    let request = Request::Write {
        offset_bytes,
        fua: false,
    };
    let payload = Payload::Write(Source::memory(bytes));
    device.submit(request, payload).await.expect("write");
}

async fn read(device: &impl Device, offset_bytes: u64, bytes: &mut [u8]) {
    let payload = Payload::Read(Target::memory(bytes));
    device
        .submit(Request::Read { offset_bytes }, payload)
        .await
        .expect("read");
}

async fn requests_allocate_nothing(name: &str, extended_l2: bool) {
    let options = CreateFile {
        direct: false,
        lock: true,
        truncate_existing: true,
    };
    let file = OpenFile::create(name, options).expect("create");
    let plan = CreateOptions {
        size_bytes: SIZE,
        extended_l2,
        ..CreateOptions::default()
    };
    create(&ReactorFile::new(file), &plan, &gaur_engine::Job::default())
        .await
        .expect("qcow2");
    let opened = open(&ReactorHost, name, &OpenOptions::new(References::Any))
        .await
        .expect("open");
    let queue = opened.image.queue(opened.files);
    let mut memory = buffer(4096);
    memory.fill(7);
    // Warm-up: the first half of the disk.
    for cluster in 0..SIZE / CLUSTER / 2 {
        write(&queue, cluster * CLUSTER, &memory).await;
        read(&queue, cluster * CLUSTER, &mut memory).await;
    }
    // The L2 slices of the second half are loaded by looking.
    for cluster in SIZE / CLUSTER / 2..SIZE / CLUSTER {
        read(&queue, cluster * CLUSTER, &mut memory).await;
    }
    memory.fill(7);
    let before = allocations();
    for cluster in SIZE / CLUSTER / 2..SIZE / CLUSTER {
        write(&queue, cluster * CLUSTER, &memory).await;
    }
    assert_eq!(allocations() - before, 0, "allocating writes");
    for cluster in 0..SIZE / CLUSTER {
        write(&queue, cluster * CLUSTER, &memory).await;
    }
    assert_eq!(allocations() - before, 0, "writes in place");
    for cluster in 0..SIZE / CLUSTER {
        read(&queue, cluster * CLUSTER, &mut memory).await;
    }
    assert_eq!(allocations() - before, 0, "reads");
    assert!(memory.iter().all(|byte| *byte == 7));
    queue.close().await.expect("close");
}

#[test]
fn requests_to_a_warm_queue_allocate_nothing() {
    let scratch = Scratch::in_memory();
    let reactor = Reactor::new(&Config {
        driver: Driver::Ring,
        ..Config::default()
    })
    .expect("a machine with io_uring");
    for (name, extended) in [("standard.qcow2", false), ("extended.qcow2", true)] {
        let name = scratch.file(name);
        reactor.block_on(requests_allocate_nothing(&name, extended));
        let access = Access {
            write: false,
            direct: false,
            lock: true,
            force_share: false,
        };
        reactor
            .block_on(ReactorHost.open(name.as_ref(), access))
            .expect("the lock is free again");
    }
}

/// With a cache of a part of the tables, slices come and go, and passes write them back, all the time.
async fn a_small_cache_allocates_nothing(name: &str, extended_l2: bool) {
    const CLUSTERS: u64 = 16 << 10;
    let options = CreateFile {
        direct: false,
        lock: true,
        truncate_existing: true,
    };
    let file = OpenFile::create(name, options).expect("create");
    let plan = CreateOptions {
        size_bytes: CLUSTERS * CLUSTER,
        extended_l2,
        ..CreateOptions::default()
    };
    create(&ReactorFile::new(file), &plan, &gaur_engine::Job::default())
        .await
        .expect("qcow2");
    let budget = 32 << 10;
    let options = OpenOptions {
        cache: CacheOptions {
            l2_bytes: Some(budget),
            refcount_bytes: Some(16 << 10),
            ..CacheOptions::default()
        },
        ..OpenOptions::new(References::Any)
    };
    let opened = open(&ReactorHost, name, &options).await.expect("open");
    let queue = opened.image.queue(opened.files);
    let mut memory = buffer(4096);
    memory.fill(7);
    // An odd stride visits every cluster once, far from the one before.
    let cluster = |step: u64| step * 6_257 % CLUSTERS * CLUSTER;
    for step in 0..CLUSTERS / 2 {
        write(&queue, cluster(step), &memory).await;
        read(&queue, cluster(step), &mut memory).await;
    }
    let before = allocations();
    for step in CLUSTERS / 2..CLUSTERS {
        write(&queue, cluster(step), &memory).await;
    }
    let allocated = allocations() - before;
    assert!(
        allocated * 100 < CLUSTERS,
        "{allocated} by writes that allocate"
    );
    let before = allocations();
    for step in 0..CLUSTERS {
        read(&queue, cluster(step), &mut memory).await;
    }
    assert_eq!(allocations() - before, 0, "reads that miss");
    assert!(memory.iter().all(|byte| *byte == 7));
    let statistics = queue.image().layers()[0].l2_cache().expect("qcow2");
    assert!(statistics.misses * 4 > CLUSTERS, "{statistics:?}");
    assert!(statistics.held_bytes <= budget, "{statistics:?}");
    queue.close().await.expect("close");
}

#[test]
fn a_cache_of_a_part_of_the_tables_allocates_nothing() {
    let scratch = Scratch::in_memory();
    let reactor = Reactor::new(&Config {
        driver: Driver::Ring,
        ..Config::default()
    })
    .expect("a machine with io_uring");
    for (name, extended) in [("standard.qcow2", false), ("extended.qcow2", true)] {
        let name = scratch.file(name);
        reactor.block_on(a_small_cache_allocates_nothing(&name, extended));
    }
}
