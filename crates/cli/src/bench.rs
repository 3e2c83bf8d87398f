//! `gaur bench`: how fast the engine serves requests, in process.
//!
//! Flags, defaults and the lines around the run are those of `qemu-img bench`, so that one command
//! line times both engines. The image is opened once; every thread has a reactor and a queue.

mod histogram;
mod load;
mod report;
mod thread;

use std::io::Write;
use std::num::{NonZeroU16, NonZeroU64};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use gaur_engine::{AllocationPolicy, Job, OpenOptions};
use gaur_reactor::{Config, Driver, ReactorFile, Threads, ThreadsConfig, block_on};

use crate::cache_cleaner::CacheCleaner;
use crate::cached_device::{CachedDevice, Policy};
use crate::failure::Failure;
use crate::host_kind::HostKind;
use crate::image_spec::Aio;
use crate::interrupt;
use crate::json;
use crate::open::{CacheMode, Output, SourceArgs, allocation_parser};
use crate::shared_image::SharedImage;
use crate::size::{human, parse_size, parse_whole_number};
use load::Workload;
use report::Report;
use thread::{RequestError, ThreadStatistics};

/// Measure how fast an image is read or written
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Requests to send (75000, or any number with --runtime)
    #[arg(short, long, value_name = "N", value_parser = |text: &str| parse_number(text, 1))]
    count: Option<u64>,
    /// Requests in flight at once, in each thread
    #[arg(short, long, value_name = "N", value_parser = |text: &str| parse_number(text, 1), default_value = "64")]
    depth: u64,
    /// Bytes of each request
    #[arg(short = 's', long, value_name = "SIZE", value_parser = |text: &str| parse_bytes(text, 1), default_value = "4096")]
    buffer_size: u64,
    /// Bytes from one request to the next (the size of a request)
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = |text: &str| parse_bytes(text, 0))]
    step_size: Option<u64>,
    /// Guest offset of the first request
    #[arg(short, long, value_name = "OFFSET", value_parser = parse_size, default_value = "0")]
    offset: u64,
    /// Write instead of reading
    #[arg(short, long)]
    write: bool,
    /// The byte to write
    #[arg(long, value_name = "BYTE", value_parser = parse_byte, default_value = "0")]
    pattern: u8,
    /// Flush after this number of requests
    #[arg(long, value_name = "N", value_parser = |text: &str| parse_number(text, 0), default_value = "0")]
    flush_interval: u64,
    /// Do not wait for requests in flight before a flush
    #[arg(long)]
    no_drain: bool,
    #[command(flatten)]
    source: SourceArgs,
    /// How files are reached, in QEMU's words; here it is io_uring wherever that works
    #[arg(short = 'i', long, value_name = "AIO")]
    aio: Option<Aio>,
    /// The same as -i native
    #[arg(short, long)]
    native: bool,
    /// Use of the host's cache
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print only what qemu-img prints
    #[arg(short, long)]
    quiet: bool,
    /// Random offsets: any multiple of the size of a request inside the image
    #[arg(long, conflicts_with_all = ["offset", "step_size"])]
    random: bool,
    /// Where random numbers start; the same requests are sent for the same number
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Threads, each with a queue on the image and its share of the requests
    #[arg(long, value_name = "N", default_value = "1")]
    threads: NonZeroU16,
    /// Mix reads and writes: how many of a hundred requests read
    #[arg(
        long,
        value_name = "PERCENT",
        value_parser = clap::value_parser!(u8).range(0..=100),
        conflicts_with = "write"
    )]
    read_percent: Option<u8>,
    /// Stop after this time
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    runtime: Option<Duration>,
    /// What to do with the host's space, whatever the image says
    #[arg(long, value_name = "POLICY", value_parser = allocation_parser())]
    allocation: Option<AllocationPolicy>,
    /// Remove the image's persistent bitmaps with the first write, which would make them useless
    #[arg(long)]
    drop_bitmaps: bool,
    /// Output format
    #[arg(long, value_name = "OUTPUT", value_enum, default_value = "human")]
    output: Output,
    /// How files are reached
    #[arg(long, default_value = "auto", hide = true)]
    host: HostKind,
}

/// Requests sent if nothing is said about their number or their time, as qemu-img has it.
const COUNT_DEFAULT: u64 = 75_000;
/// Largest number that qemu-img takes.
const NUMBER_MAX: u64 = i32::MAX as u64;

/// A number from `min` to [`NUMBER_MAX`], decimal or hexadecimal.
fn parse_number(text: &str, min: u64) -> Result<u64, String> {
    let number = parse_whole_number(text).ok();
    let number = number.filter(|number| (min..=NUMBER_MAX).contains(number));
    number.ok_or_else(|| format!("must be a number from {min} to {NUMBER_MAX}"))
}

fn parse_byte(text: &str) -> Result<u8, String> {
    let number = parse_number(text, 0).ok();
    let byte = number.and_then(|number| u8::try_from(number).ok());
    byte.ok_or_else(|| "must be a number from 0 to 255".to_owned())
}

/// The size of something in memory.
fn parse_bytes(text: &str, min: u64) -> Result<u64, String> {
    let size = parse_size(text)?;
    let size = Some(size).filter(|size| (min..=NUMBER_MAX).contains(size));
    size.ok_or_else(|| format!("must be a size from {min} to {NUMBER_MAX}"))
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| *seconds > 0.0);
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| "must be a number of seconds, more than 0".to_owned())
}

/// Runs the benchmark and tells the result.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    check(args)?;
    let mut spec = args.source.spec()?;
    if writes(args) {
        spec = spec.with_probed_format(args.source.is_untrusted())?;
    }
    let by_switch = if args.native {
        Some(Aio::Native)
    } else {
        args.aio
    };
    let aio = spec.aio().or(by_switch);
    if aio == Some(Aio::Native) && !spec.open_options(&open_options(args)?)?.direct {
        return Err(spec.native_without_direct());
    }
    let host = args.host.required_if(aio == Some(Aio::Uring)).choose()?;
    let opening = Instant::now();
    let image = SharedImage::open(&spec, &open_options(args)?)?;
    let open_us = opening.elapsed().as_secs_f64() * 1e6;
    let load = load(args, image.size_bytes());
    check_memory(&load)?;
    if args.random && load.size < load.buffer {
        let message = format!(
            "the image of {} bytes is smaller than a request, {} bytes",
            load.size, load.buffer
        );
        return Err(Failure::about(spec.path(), message));
    }
    let human = args.output == Output::Human;
    if human {
        announce(&load, out)?;
        out.flush()?;
    }
    let image = Arc::new(image);
    let cleaner = CacheCleaner::default();
    if let Some(interval) = spec.clean_interval() {
        cleaner.add(image.image(), interval);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let job = Arc::new(Job::default());
    let (cancelled, asked) = (Arc::clone(&job), Arc::clone(&stop));
    interrupt::on_signal(move || {
        cancelled.cancel();
        asked.store(true, Ordering::Relaxed);
    })?;
    let outcome = measure(&image, &load, Policy::of(args.cache, &spec), (host, stop));
    let outcome = interrupt::check(&job).and(outcome);
    drop(cleaner);
    let report = outcome.map(|tally| Report::new(&load, &tally, image.image(), open_us));
    // Before the image is closed, as qemu-img has it: closing is not what is measured.
    if let (Ok(report), true) = (&report, human) {
        report.print_closing_line(out)?;
        out.flush()?;
    }
    let closed = image.close();
    let report = report?;
    closed?;
    match args.output {
        Output::Json => json::write(out, &report)?,
        Output::Human if args.quiet => {}
        Output::Human => report.print_details(out)?,
    }
    Ok(0)
}

fn writes(args: &Args) -> bool {
    args.write || args.read_percent.is_some_and(|percent| percent < 100)
}

/// What qemu-img refuses, too.
fn check(args: &Args) -> Result<(), Failure> {
    if args.flush_interval > 0 {
        if !writes(args) {
            return Err(Failure::new("--flush-interval is only for writes").hint("add -w"));
        }
        if args.flush_interval < args.depth {
            let message = format!(
                "--flush-interval {} is less than the depth, {}",
                args.flush_interval, args.depth
            );
            return Err(Failure::new(message));
        }
    }
    Ok(())
}

/// Memory that a request in flight takes beside what it carries, roughly.
const REQUEST_BYTES: u64 = 4096;

/// Refuses what could only end in running out of memory.
fn check_memory(load: &Workload) -> Result<(), Failure> {
    let buffers = u64::from(load.reads()) + u64::from(load.writes());
    let each = load.buffer.saturating_mul(buffers) + REQUEST_BYTES;
    let needed = each.saturating_mul(load.slots() * load.threads);
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    // Where the system does not tell, the user has to know.
    let available = kib.map_or(u64::MAX, |kib| kib << 10);
    if needed <= available {
        return Ok(());
    }
    let message = format!(
        "requests in flight take {}, there are {}",
        human(needed),
        human(available)
    );
    Err(Failure::new(message).hint("lower -d, -s or --threads"))
}

fn open_options(args: &Args) -> Result<OpenOptions, Failure> {
    Ok(OpenOptions {
        read_only: !writes(args),
        direct: args.cache.direct(),
        force_share: args.force_share,
        allocation: args.allocation,
        drop_bitmaps: args.drop_bitmaps,
        keys: args.source.keys()?,
        ..OpenOptions::new(args.source.references())
    })
}

fn load(args: &Args, size: u64) -> Workload {
    let default_count = args.runtime.is_none().then_some(COUNT_DEFAULT);
    Workload {
        size,
        count: args.count.or(default_count),
        depth: args.depth,
        buffer: args.buffer_size,
        // 0 is the default for qemu-img, too.
        step: args
            .step_size
            .filter(|step| *step > 0)
            .unwrap_or(args.buffer_size),
        offset: args.offset,
        read_percent: match (args.write, args.read_percent) {
            (true, _) => 0,
            (false, percent) => percent.unwrap_or(100),
        },
        random: args.random.then_some(args.seed),
        flush_interval: NonZeroU64::new(args.flush_interval),
        drain: !args.no_drain,
        pattern: args.pattern,
        runtime: args.runtime,
        threads: u64::from(args.threads.get()),
    }
}

/// qemu-img's first line, as far as the options are qemu-img's.
fn announce(load: &Workload, out: &mut dyn Write) -> Result<(), Failure> {
    write!(out, "Sending ")?;
    if let Some(count) = load.count {
        write!(out, "{count} ")?;
    }
    match load.read_percent {
        0 => write!(out, "write requests")?,
        100 => write!(out, "read requests")?,
        percent => write!(out, "requests ({percent}% read)")?,
    }
    write!(
        out,
        ", {} bytes each, {} in parallel ",
        load.buffer, load.depth
    )?;
    match load.random {
        Some(seed) => write!(out, "(at random offsets, seed {seed})")?,
        None => write!(
            out,
            "(starting at offset {}, step size {})",
            load.offset, load.step
        )?,
    }
    if load.threads > 1 {
        write!(out, " in each of {} threads", load.threads)?;
    }
    if let Some(runtime) = load.runtime {
        write!(out, " for {} seconds", runtime.as_secs_f64())?;
    }
    writeln!(out)?;
    if let Some(interval) = load.flush_interval {
        writeln!(out, "Sending flush every {interval} requests")?;
    }
    Ok(())
}

/// Sends all requests, until there are no more or `stop` is set.
fn measure(
    image: &Arc<SharedImage>,
    load: &Workload,
    policy: Policy,
    (host, stop): (HostKind, Arc<AtomicBool>),
) -> Result<ThreadStatistics, Failure> {
    let threads = Threads::start(&ThreadsConfig {
        count: load.threads as usize,
        processors: Vec::new(),
        name: "bench".to_owned(),
        reactor: Config {
            driver: match host {
                HostKind::Blocking => Driver::Fallback,
                _ => Driver::Ring,
            },
            ..Config::default()
        },
    });
    let threads =
        threads.map_err(|errno| Failure::new(format!("cannot start threads: {errno}")))?;
    let barrier = Arc::new(Barrier::new(threads.handles().len()));
    let mut running = Vec::new();
    for (thread, handle) in (0..).zip(threads.handles()) {
        let (image, load) = (Arc::clone(image), *load);
        let (barrier, stop) = (Arc::clone(&barrier), Arc::clone(&stop));
        let spawned = handle.spawn(move || async move {
            let device = CachedDevice::new(image.queue::<ReactorFile>(), policy, None);
            let ready = || {
                barrier.wait();
            };
            thread::run(device, load, thread, stop, ready).await
        });
        running
            .push(spawned.map_err(|errno| Failure::new(format!("cannot start threads: {errno}")))?);
    }
    let tallies: Result<Vec<ThreadStatistics>, RequestError> =
        running.into_iter().map(block_on).collect();
    threads.join();
    let tallies = tallies.map_err(|failed| request_failed(image, load, failed))?;
    report::add_up(tallies).ok_or_else(|| Failure::new("no thread ran"))
}

fn request_failed(image: &SharedImage, load: &Workload, failed: RequestError) -> Failure {
    let name = image.name();
    let Some(request) = failed.request else {
        return Failure::system(name, "a flush failed", failed.errno);
    };
    let what = if request.write { "write" } else { "read" };
    let what = format!(
        "the {what} of {} bytes at offset {}",
        load.buffer, request.offset
    );
    let end = request.offset.checked_add(load.buffer);
    if end.is_none_or(|end| end > load.size) {
        let message = format!("{what} reaches beyond the end of the image, {}", load.size);
        return Failure::about(name, message);
    }
    let what = format!("{what} failed");
    Failure::request(image.image(), name, &what, failed.errno)
}
