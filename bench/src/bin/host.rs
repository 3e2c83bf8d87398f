//! How fast a host moves bytes of a file: `host PATH [SECONDS]`.
//!
//! The file at PATH is filled first (1 GiB, or its size when it exists). Then each combination of
//! host (ring, fallback), operation and queue depth runs on one thread for a moment. The numbers are
//! thousands of 4 KiB operations per second; they say what the engine and the exports can reach at
//! most on this file. PATH on tmpfs, on a disk file system or a block device give the three cases.
//! The last column is the processor time of one operation, the kernel's workers for this process
//! included; it says more than the rate when the machine has other things to do.
//! With `direct` as the third argument the file is opened with O_DIRECT.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use gaur_block::{Access, Errno, File, Host, OpenError, Source, Target};
use gaur_reactor::{
    Config, CreateFile, Driver, OpenFile, Reactor, ReactorFile, ReactorHost, spawn,
};
use gaur_sim::Random;

const BLOCK: usize = 4096;
const SIZE: u64 = 1 << 30;

#[derive(Clone, Copy, Debug)]
enum Operation {
    Read,
    Write,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        eprintln!("usage: host PATH [SECONDS [direct]]");
        std::process::exit(2);
    };
    let seconds = arguments
        .next()
        .and_then(|text| text.parse().ok())
        .unwrap_or(1.0);
    let direct = arguments.next().is_some();
    if let Err(error) = run(&path, Duration::from_secs_f64(seconds), direct) {
        eprintln!("{path}: {error}");
        std::process::exit(1);
    }
}

fn run(path: &str, time: Duration, direct: bool) -> Result<(), OpenError> {
    if !std::path::Path::new(path).exists() {
        fill(path)?;
    }
    println!(
        "{:10} {:6} {:>6} {:>8} {:>10}",
        "host", "", "depth", "kIOPS", "cpu us/op"
    );
    for driver in [Driver::Ring, Driver::Fallback] {
        for operation in [Operation::Read, Operation::Write] {
            for depth in [1_u64, 4, 32] {
                let reactor = Reactor::new(&Config {
                    driver,
                    ..Config::default()
                })
                .map_err(plain)?;
                let access = Access {
                    write: true,
                    direct,
                    lock: true,
                    force_share: false,
                };
                let result = reactor.block_on(async {
                    let file = Rc::new(ReactorHost.open(path.as_ref(), access).await?);
                    measure(file, operation, depth, time).await.map_err(plain)
                });
                let Speed { per_second, cpu } = result?;
                println!(
                    "{:10} {:6} {depth:>6} {:>8.1} {:>10.2}",
                    format!("{driver:?}"),
                    format!("{operation:?}"),
                    per_second / 1e3,
                    cpu * 1e6,
                );
            }
        }
    }
    Ok(())
}

fn plain(errno: Errno) -> OpenError {
    OpenError {
        errno,
        reason: errno.to_string(),
    }
}

fn fill(path: &str) -> Result<(), OpenError> {
    let options = CreateFile {
        lock: true,
        ..CreateFile::default()
    };
    let file = gaur_reactor::BlockingFile::new(OpenFile::create(path, options)?);
    let block = vec![1; 1 << 20];
    gaur_reactor::block_on(async {
        for offset in (0..SIZE).step_by(block.len()) {
            file.write_at(offset, Source::memory(&block)).await?;
        }
        file.flush().await
    })
    .map_err(plain)
}

async fn measure(
    file: Rc<ReactorFile>,
    operation: Operation,
    depth: u64,
    time: Duration,
) -> Result<Speed, Errno> {
    let blocks = file.len().await? / BLOCK as u64;
    let stop = Rc::new(Cell::new(false));
    let start = Instant::now();
    let cpu_before = cpu_seconds();
    let tasks: Vec<_> = (0..depth)
        .map(|seed| {
            let (file, stop) = (file.clone(), stop.clone());
            spawn(async move {
                let mut memory = file.buffer(BLOCK);
                let mut random = Random::new(seed);
                let mut count = 0_u64;
                while !stop.get() {
                    let offset = random.below(blocks) * BLOCK as u64;
                    match operation {
                        Operation::Read => {
                            file.read_at(offset, Target::memory(&mut memory)).await?
                        }
                        Operation::Write => file.write_at(offset, Source::memory(&memory)).await?,
                    }
                    count += 1;
                    if count.is_multiple_of(64) {
                        if start.elapsed() > time {
                            stop.set(true);
                        }
                        // A fallback's operations never wait; the others want their turn too.
                        gaur_reactor::yield_now().await;
                    }
                }
                Ok::<u64, Errno>(count)
            })
        })
        .collect();
    let mut count = 0;
    for task in tasks {
        count += task.await?;
    }
    let cpu = (cpu_seconds() - cpu_before) / count as f64;
    let per_second = count as f64 / start.elapsed().as_secs_f64();
    Ok(Speed { per_second, cpu })
}

/// Operations a second, and processor seconds an operation.
struct Speed {
    per_second: f64,
    cpu: f64,
}

/// Processor time of this process so far: `utime` and `stime` of `/proc/self/stat`, in the kernel's
/// hundredths of a second.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let fields = after_name.split_whitespace().skip(11).take(2);
    let ticks: f64 = fields.filter_map(|field| field.parse::<f64>().ok()).sum();
    ticks / 100.0
}
