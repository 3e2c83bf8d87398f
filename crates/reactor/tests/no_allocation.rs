//! After warm-up no transfer allocates: a block device whose server needs memory while the kernel
//! reclaims memory through that device would never get it.

#[path = "scratch/counting.rs"]
mod counting;
#[path = "scratch/files.rs"]
mod scratch;

use std::cell::Cell;
use std::io::{IoSlice, IoSliceMut};
use std::rc::Rc;

use counting::{Counting, allocations};
use gaur_block::{Access, File, Host, Segments, SegmentsMut, Source, Target};
use gaur_reactor::local::Notify;
use gaur_reactor::{Config, Driver, Reactor, ReactorFile, ReactorHost, Stream, buffer, spawn};
use scratch::Scratch;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `work` again and again; only the first rounds may allocate.
async fn settles(what: &str, mut work: impl AsyncFnMut()) {
    for _ in 0..20 {
        work().await;
    }
    let before = allocations();
    for _ in 0..100 {
        work().await;
    }
    assert_eq!(allocations() - before, 0, "{what} allocates");
}

const ACCESS: Access = Access {
    write: true,
    direct: false,
    lock: true,
    force_share: false,
};

async fn file_operations(file: &ReactorFile, what: &str) {
    let mut memory = file.buffer(16384);
    let mut plain = vec![0; 16384];
    settles(what, async || {
        file.write_at(0, Source::memory(&memory)).await.unwrap();
        file.read_at(4096, Target::memory(&mut memory))
            .await
            .unwrap();
        let (first, second) = memory.split_at(4096);
        let parts = [IoSlice::new(first), IoSlice::new(second)];
        let source = Source::Memory(Segments::from(&parts[..]));
        file.write_at(0, source).await.unwrap();
        let (first, second) = memory.split_at_mut(4096);
        let mut parts = [second, first].map(IoSliceMut::new);
        let target = Target::Memory(SegmentsMut::from(&mut parts[..]));
        file.read_at(0, target).await.unwrap();
        file.write_zeroes_at(65536, 4096, true).await.unwrap();
        file.flush().await.unwrap();
        file.len().await.unwrap();
        file.extent_at(0).await.unwrap();
        drop(file.buffer(65536));
        if !file.open_file().is_direct() {
            file.write_at(100, Source::memory(&plain)).await.unwrap();
            file.read_at(1 << 19, Target::memory(&mut plain))
                .await
                .unwrap();
        }
    })
    .await;
}

#[test]
fn transfers_of_files_allocate_nothing() {
    for (scratch, direct) in [
        (Scratch::on_disk(), false),
        (Scratch::on_disk(), true),
        (Scratch::in_memory(), false),
    ] {
        let name = scratch.file_with("image", &vec![1; 1 << 20]);
        for driver in [Driver::Ring, Driver::Fallback] {
            let reactor = Reactor::new(&Config {
                driver,
                ..Config::default()
            })
            .unwrap();
            reactor.block_on(async {
                let access = Access { direct, ..ACCESS };
                let file = ReactorHost.open(name.as_ref(), access).await.unwrap();
                file_operations(&file, &format!("a file, direct {direct}, {driver:?}")).await;
            });
        }
    }
}

#[test]
fn many_tasks_at_once_allocate_nothing() {
    let scratch = Scratch::on_disk();
    let name = scratch.file_with("image", &vec![1; 4 << 20]);
    let reactor = Reactor::new(&Config {
        driver: Driver::Ring,
        ..Config::default()
    })
    .unwrap();
    reactor.block_on(async {
        let file = Rc::new(ReactorHost.open(name.as_ref(), ACCESS).await.unwrap());
        // Each round all tasks read; the last one tells the test.
        let go = Rc::new(Notify::new());
        let done = Rc::new(Notify::new());
        let busy = Rc::new(Cell::new(0));
        let turns = Rc::new(Cell::new(0_u64));
        for index in 0..64_u64 {
            let (file, go, done) = (file.clone(), go.clone(), done.clone());
            let (busy, turns) = (busy.clone(), turns.clone());
            let mut memory = file.buffer(4096);
            let _detached = spawn(async move {
                loop {
                    go.notified().await;
                    file.read_at(index * 4096, Target::memory(&mut memory))
                        .await
                        .unwrap();
                    turns.set(turns.get() + 1);
                    busy.set(busy.get() - 1);
                    if busy.get() == 0 {
                        done.notify_one();
                    }
                }
            });
        }
        gaur_reactor::yield_now().await;
        gaur_reactor::yield_now().await;
        settles("64 tasks", async || {
            busy.set(64);
            go.notify_all();
            done.notified().await;
        })
        .await;
        assert_eq!(turns.get(), 64 * 120);
    });
}

#[test]
fn transfers_of_streams_allocate_nothing() {
    for driver in [Driver::Ring, Driver::Fallback] {
        let reactor = Reactor::new(&Config {
            driver,
            ..Config::default()
        })
        .unwrap();
        reactor.block_on(async {
            let (ours, theirs) = Stream::pair().unwrap();
            let _echo = spawn(async move {
                let mut memory = buffer(4096);
                while theirs.recv_exact(&mut memory[..1100]).await == Ok(1100) {
                    theirs.send(&memory[..1100]).await.unwrap();
                }
            });
            let mut back = buffer(4096);
            settles(&format!("a stream, {driver:?}"), async || {
                let parts = [IoSlice::new(&[1; 100]), IoSlice::new(&[2; 1000])];
                ours.send_vectored(&parts).await.unwrap();
                assert_eq!(ours.recv_exact(&mut back[..1100]).await, Ok(1100));
            })
            .await;
            assert_eq!(back[99..101], [1, 2]);
        });
    }
}
