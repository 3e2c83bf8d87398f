//! One state, several threads: each has a ring and a queue of its own, on a real file.

use std::sync::Arc;

use gaur_block::{Access, Host};
use gaur_engine::{
    Image, Job, NewSnapshot, OpenOptions, Queue, References, VmStateReader, VmStateSave,
};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img};
use gaur_reactor::{Config, Reactor, ReactorFile, ReactorHost};

const THREADS: usize = 4;
const PAGE: usize = 4096;
/// Not a whole number of blocks: neighbours in every way.
const STRIDE: usize = PAGE + 8;

/// Runs `work` on a thread of its own for each of `THREADS` numbers, with a queue on the image.
fn on_threads<T: Send>(
    image: &Arc<Image>,
    path: &str,
    direct: bool,
    work: impl AsyncFn(usize, &Queue<ReactorFile>) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let work = &work;
                scope.spawn(move || {
                    let reactor = Reactor::new(&Config::default()).expect("a reactor");
                    reactor.block_on(async {
                        let file = ReactorHost.open(path.as_ref(), access(direct)).await;
                        let queue = image.queue(vec![file.expect("the image opens")]);
                        work(number, &queue).await
                    })
                })
            })
            .collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|result| result.expect("no panic")).collect()
    })
}

fn access(direct: bool) -> Access {
    Access {
        write: true,
        direct,
        lock: false,
        force_share: false,
    }
}

/// Pages with headers, dealt out to the threads in turn; every tenth page is left out.
fn saved_and_loaded(direct: bool, options: &[&str]) {
    let scratch = Scratch::new("threads");
    let path = scratch.path("disk.qcow2");
    let create = [&["create", "-q", "-f", "qcow2"], options, &[&path, "64M"]].concat();
    qemu_img(&create).ok();
    let stream = Random::new(3).bytes(40_000_000);
    let mut expected = stream.clone();
    for hole in expected.chunks_mut(STRIDE).step_by(10) {
        hole.fill(0);
    }
    let reactor = Reactor::new(&Config::default()).expect("a reactor");
    reactor.block_on(async {
        let open = OpenOptions {
            direct,
            ..OpenOptions::new(References::Any)
        };
        let opened = gaur_engine::open(&ReactorHost, &path, &open)
            .await
            .expect("it opens");
        let queue = opened.image.queue(opened.files);
        let save = VmStateSave::begin(queue.image()).expect("a save begins");
        on_threads(queue.image(), &path, direct, async |number, queue| {
            let mut writer = save.writer(queue);
            for (index, piece) in stream.chunks(STRIDE).enumerate() {
                if index % THREADS == number && index % 10 != 0 {
                    let (header, page) = piece.split_at(8);
                    let at = (index * STRIDE) as u64;
                    writer.write_at(at, header).await.expect("header");
                    writer.write_at(at + 8, page).await.expect("page");
                }
            }
            writer.flush().await.expect("flush");
        });
        save.extend_to(expected.len() as u64).expect("it fits");
        let new = NewSnapshot {
            name: "threads".to_owned(),
            ..NewSnapshot::default()
        };
        let finished = save.finish(&queue, &new, &Job::default()).await;
        finished.expect("it is finished");
        let parts = on_threads(queue.image(), &path, direct, async |number, queue| {
            let mut reader = VmStateReader::open(queue, "threads")
                .await
                .expect("it opens");
            let share = expected.len() / THREADS;
            reader.set_position((number * share) as u64);
            let mut part = vec![0; share];
            let count = reader.read(&mut part).await.expect("it is read");
            assert_eq!(count, share);
            part
        });
        assert!(parts.concat() == expected, "what was read");
        drop(save);
        queue.close().await.expect("it closes");
    });
    assert_clean(&path);
}

#[test]
fn pages_of_four_threads_are_one_state() {
    saved_and_loaded(true, &[]);
    saved_and_loaded(false, &[]);
}

#[test]
fn small_clusters_on_a_direct_file_are_shared_by_threads_block_by_block() {
    saved_and_loaded(true, &["-o", "cluster_size=1k"]);
    saved_and_loaded(true, &["-o", "cluster_size=16k,extended_l2=on"]);
}
