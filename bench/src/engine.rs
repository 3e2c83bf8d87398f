//! What a request costs in the engine itself: loads on an image in memory, which answers at once.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::memory::{DROPPED, MemoryFile, MemoryHost};
use gaur_block::{Device, Errno, Payload, Request, Source, Target};
use gaur_engine::{Image, OpenOptions, Queue, References};
use gaur_format::plan::CreateOptions;
use gaur_sim::Random;

const BLOCK: u64 = 4096;
/// Guest size of the image whose clusters are mapped.
const MAPPED_BYTES: u64 = 4 << 30;
/// Guest size of the image to which clusters are added.
const GROWING_BYTES: u64 = 128 << 30;

/// What the threads do, 4 KiB at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Read mapped clusters at random.
    Read,
    /// Write mapped clusters at random.
    Write,
    /// Write to clusters that have to be allocated, in order.
    AllocateInOrder,
    /// Write to clusters that have to be allocated, at random.
    AllocateAtRandom,
}

/// Why a load failed.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Requests a second, with `threads` threads that have a queue each on one image.
pub fn measure(
    load: Load,
    extended_l2: bool,
    threads: u64,
    time: Duration,
) -> Result<f64, Failure> {
    let mapped = matches!(load, Load::Read | Load::Write);
    let size_bytes = if mapped { MAPPED_BYTES } else { GROWING_BYTES };
    let file = MemoryFile::new();
    let options = CreateOptions {
        size_bytes,
        extended_l2,
        ..CreateOptions::default()
    };
    ready(gaur_engine::create(
        &file,
        &options,
        &gaur_engine::Job::default(),
    ))??;
    let opened = ready(gaur_engine::open(
        &MemoryHost(file.clone()),
        "image",
        &OpenOptions::new(References::Any),
    ))??;
    if mapped {
        fill(&opened.image, &file)?;
    }
    let stop = AtomicBool::new(false);
    let done = AtomicU64::new(0);
    let started = Instant::now();
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for thread in 0..threads {
            let (image, file) = (Arc::clone(&opened.image), file.clone());
            let (stop, done) = (&stop, &done);
            workers.push(scope.spawn(move || -> Result<(), Failure> {
                let queue = image.queue(vec![file]);
                let slots = size_bytes / (64 << 10);
                let share = slots / threads;
                let mut random = Random::new(thread);
                let mut buffer = vec![0; BLOCK as usize];
                buffer[..8].copy_from_slice(&DROPPED);
                let mut count = 0;
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..64 {
                        let offset = match load {
                            Load::Read | Load::Write => random.below(size_bytes / BLOCK) * BLOCK,
                            Load::AllocateInOrder => (thread * share + count % share) * (64 << 10),
                            Load::AllocateAtRandom => random.below(slots) * (64 << 10),
                        };
                        ready(one(&queue, load, offset, &mut buffer))??;
                        count += 1;
                    }
                }
                done.fetch_add(count, Ordering::Relaxed);
                Ok(())
            }));
        }
        std::thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().map_err(|_| "a worker panicked")??;
        }
        Ok::<(), Failure>(())
    })?;
    Ok(done.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64())
}

async fn one(
    queue: &Queue<MemoryFile>,
    load: Load,
    offset_bytes: u64,
    buffer: &mut [u8],
) -> Result<(), Errno> {
    let (request, payload) = match load {
        Load::Read => (
            Request::Read { offset_bytes },
            Payload::Read(Target::memory(buffer)),
        ),
        _ => (
            Request::Write {
                offset_bytes,
                fua: false,
            },
            Payload::Write(Source::memory(buffer)),
        ),
    };
    queue.submit(request, payload).await
}

/// Maps every cluster.
fn fill(image: &Arc<Image>, file: &MemoryFile) -> Result<(), Failure> {
    let queue = image.queue(vec![file.clone()]);
    let mut buffer = vec![0; 1 << 20];
    buffer[..8].copy_from_slice(&DROPPED);
    let mut at = 0;
    while at < image.size_bytes() {
        ready(one(&queue, Load::Write, at, &mut buffer))??;
        at += buffer.len() as u64;
    }
    ready(queue.submit(Request::Flush, Payload::None))??;
    Ok(())
}

/// The result of a future that waits for other threads at most.
fn ready<T>(future: impl Future<Output = T>) -> Result<T, Failure> {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return Ok(value);
        }
        std::thread::yield_now();
    }
}
