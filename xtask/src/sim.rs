//! `cargo xtask sim`: runs seeds of the crash simulator.
//!
//! The first failure ends the run with a non-zero exit code, the seed and the line that replays it.
//! With `--broken` a rule of the write order is broken on purpose, and the run goes well when a seed
//! notices.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Instant, SystemTime};

use clap::Parser;
use gaur_simulator::{Failure, Options, Rule, Stats, run_mixed, run_seed};

/// Run seeds of the crash simulator
#[derive(Debug, clap::Parser)]
pub struct Arguments {
    /// Run N seeds
    #[arg(long, value_name = "N", default_value_t = 100)]
    seeds: u64,
    /// The first of them
    #[arg(long, value_name = "S", default_value_t = 0)]
    start: u64,
    /// Start where no run has been before: drawn from the clock, and printed
    #[arg(long, conflicts_with = "start")]
    fresh: bool,
    /// Run one seed and print its trace
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Seeds at a time (one for each processor by default)
    #[arg(long, value_name = "J", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Crash images in a thousand that qemu-img judges as well
    #[arg(long, value_name = "PER_MILLE", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(..=1000))]
    qemu: u32,
    /// Start from images that QEMU's tools have made
    #[arg(long)]
    by_qemu: bool,
    /// Store every write that covers a cluster compressed
    #[arg(long)]
    packed: bool,
    /// Encrypt every image
    #[arg(long, conflicts_with = "by_qemu")]
    encrypted: bool,
    /// Give every image persistent bitmaps
    #[arg(long, conflicts_with = "by_qemu")]
    bitmaps: bool,
    /// Keep guest data in an external data file
    #[arg(long, conflicts_with_all = ["by_qemu", "packed"])]
    data_file: bool,
    /// Draw for each seed what it is about: compression, encryption, a data file, bitmaps, or amend, repair, commit, rebase
    #[arg(long, conflicts_with_all = ["by_qemu", "packed", "encrypted", "bitmaps", "data_file", "broken"])]
    mixed: bool,
    /// Keep the files of a failure here: before its epoch, and as judged
    #[arg(long, value_name = "DIRECTORY")]
    dump: Option<PathBuf>,
    /// Break this rule of the write order on purpose and see whether that is noticed
    #[arg(long, value_name = "RULE")]
    broken: Option<Rule>,
}

impl Arguments {
    /// A number of seeds for continuous integration, fresh ones or the first.
    pub fn of_seeds(seeds: u64, fresh: bool) -> Arguments {
        Arguments {
            seeds,
            fresh,
            ..Arguments::parse_from(["sim"])
        }
    }

    fn options(&self) -> Options {
        Options {
            qemu_per_mille: self.qemu,
            by_qemu: self.by_qemu,
            packed: self.packed,
            encrypted: self.encrypted.then_some(true),
            data_file: self.data_file,
            bitmaps: self.bitmaps,
            dump: self.dump.clone(),
            broken: self.broken,
            ..Options::default()
        }
    }

    fn run_seed(&self, seed: u64, options: &Options) -> Result<(Stats, u64), Failure> {
        match self.mixed {
            true => run_mixed(seed, options),
            false => run_seed(seed, options),
        }
    }

    fn replay(&self, seed: u64, options: &Options) -> Result<(), String> {
        let options = Options {
            print_trace: true,
            ..options.clone()
        };
        let outcome = self.run_seed(seed, &options);
        let (stats, hash) = outcome.map_err(|failure| failure.to_string())?;
        println!("seed {seed}: {stats}\ntrace hash {hash:016x}");
        Ok(())
    }

    fn replay_line(&self, seed: u64) -> String {
        let mut line = format!("cargo xtask sim --seed {seed}");
        for (given, option) in [
            (self.by_qemu, "--by-qemu"),
            (self.packed, "--packed"),
            (self.data_file, "--data-file"),
            (self.bitmaps, "--bitmaps"),
            (self.encrypted, "--encrypted"),
            (self.mixed, "--mixed"),
        ] {
            if given {
                line = format!("{line} {option}");
            }
        }
        match self.broken {
            Some(rule) => format!("{line} --broken {rule:?}"),
            None => line,
        }
    }
}

/// Runs the task.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let options = arguments.options();
    if let Some(seed) = arguments.seed {
        return arguments.replay(seed, &options);
    }
    let start = match arguments.fresh {
        true => fresh_start()?,
        false => arguments.start,
    };
    run_many(arguments, start, &options)
}

/// A thousand seeds for every second since 1970.
fn fresh_start() -> Result<u64, String> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seconds = now.map_err(|error| error.to_string())?.as_secs();
    Ok(seconds * 1000)
}

/// What the threads share.
struct Progress {
    next: AtomicU64,
    stop: AtomicBool,
    total: Mutex<(Stats, Option<Failure>)>,
}

fn run_many(arguments: &Arguments, start: u64, options: &Options) -> Result<(), String> {
    let seeds = arguments.seeds;
    let processors = || thread::available_parallelism().map_or(1, usize::from);
    println!("{seeds} seeds from {start} on");
    let progress = Progress {
        next: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        total: Mutex::new((Stats::default(), None)),
    };
    let started = Instant::now();
    thread::scope(|scope| {
        for _ in 0..arguments.jobs.map_or_else(processors, usize::from) {
            scope.spawn(|| {
                work(
                    arguments,
                    (start..start + seeds, options),
                    &progress,
                    started,
                )
            });
        }
    });
    let (stats, failure) = progress
        .total
        .into_inner()
        .map_err(|_| "a thread has panicked")?;
    println!("{stats} in {:.1} s", started.elapsed().as_secs_f64());
    judge(arguments, start, failure)
}

fn work(
    arguments: &Arguments,
    (seeds, options): (Range<u64>, &Options),
    progress: &Progress,
    started: Instant,
) {
    while !progress.stop.load(Ordering::Relaxed) {
        let seed = seeds.start + progress.next.fetch_add(1, Ordering::Relaxed);
        if seed >= seeds.end {
            return;
        }
        let outcome = arguments.run_seed(seed, options);
        let Ok(mut total) = progress.total.lock() else {
            return;
        };
        match outcome {
            Ok((stats, _)) => {
                total.0 += stats;
                if total.0.seeds.is_multiple_of(500) {
                    println!("{} in {:.1} s", total.0, started.elapsed().as_secs_f64());
                }
            }
            Err(failure) => {
                progress.stop.store(true, Ordering::Relaxed);
                // Of the seeds that run at the same time the first one counts.
                if total
                    .1
                    .as_ref()
                    .is_none_or(|other| failure.seed < other.seed)
                {
                    total.1 = Some(failure);
                }
            }
        }
    }
}

fn judge(arguments: &Arguments, start: u64, failure: Option<Failure>) -> Result<(), String> {
    let seeds = arguments.seeds;
    match (arguments.broken, failure) {
        (None, None) => Ok(()),
        (None, Some(failure)) => Err(format!(
            "{failure}\nreplay with: {}",
            arguments.replay_line(failure.seed)
        )),
        (Some(rule), None) => Err(format!(
            "{rule:?} is broken and {seeds} seeds did not notice"
        )),
        (Some(rule), Some(failure)) => {
            let count = failure.seed - start + 1;
            println!("{rule:?} is broken: noticed after {count} seeds\n{failure}");
            println!("replay with: {}", arguments.replay_line(failure.seed));
            Ok(())
        }
    }
}
