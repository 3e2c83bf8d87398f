//! `cargo xtask sim`: runs seeds of the crash simulator.
//!
//! The first failure ends the run with a non-zero exit code, the seed and the line that replays it.
//! With `--broken` a rule of the write order is broken on purpose, and the run goes well when a seed
//! notices.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Instant, SystemTime};

use gaur_simulator::{Failure, Options, Rule, Stats, run_seed};

const USAGE: &str = "\
usage: cargo xtask sim [--seeds N] [--start S | --fresh] [--jobs J] [--qemu PER_MILLE] [--by-qemu]
                      [--broken O1|O2|O3|O4|O5|O7|Log]
       cargo xtask sim --seed S [--broken O1|O2|O3|O4|O5|O7|Log] [--dump DIRECTORY]

  --seeds N    run N seeds (default 100), from --start on (default 0)
  --fresh      from a start that no run had before: it is drawn by the clock, and printed
  --seed S     run one seed and print its trace
  --jobs J     seeds at a time (default: one for each processor)
  --qemu P     crash images in a thousand that qemu-img judges as well (default 5)
  --by-qemu    start from images that QEMU's tools have made
  --dump D     keep the files of a failure: before its epoch, and as judged
  --broken O   break this rule of the write order on purpose, or that of the handover log's records, and
               see whether that is noticed";

struct Arguments {
    seeds: u64,
    start: u64,
    seed: Option<u64>,
    jobs: usize,
    options: Options,
}

/// Runs the task.
pub fn run(arguments: &[String]) -> Result<(), String> {
    if arguments
        .iter()
        .any(|argument| argument == "--help" || argument == "-h")
    {
        println!("{USAGE}");
        return Ok(());
    }
    let arguments = parse(arguments)?;
    match arguments.seed {
        Some(seed) => replay(seed, &arguments.options),
        None => run_many(&arguments),
    }
}

fn parse(arguments: &[String]) -> Result<Arguments, String> {
    let mut parsed = Arguments {
        seeds: 100,
        start: 0,
        seed: None,
        jobs: thread::available_parallelism().map_or(1, usize::from),
        options: Options {
            qemu_per_mille: 5,
            ..Options::default()
        },
    };
    let mut rest = arguments.iter();
    while let Some(name) = rest.next() {
        match name.as_str() {
            "--by-qemu" => {
                parsed.options.by_qemu = true;
                continue;
            }
            "--fresh" => {
                parsed.start = fresh_start()?;
                continue;
            }
            _ => {}
        }
        let value = rest
            .next()
            .ok_or_else(|| format!("{name} needs a value\n{USAGE}"))?;
        let number = || {
            value
                .parse()
                .map_err(|_| format!("{name}: '{value}' is not a number"))
        };
        match name.as_str() {
            "--seeds" => parsed.seeds = number()?,
            "--start" => parsed.start = number()?,
            "--seed" => parsed.seed = Some(number()?),
            "--jobs" => parsed.jobs = number()?.clamp(1, 1024) as usize,
            "--qemu" => parsed.options.qemu_per_mille = number()?.min(1000) as u32,
            "--dump" => parsed.options.dump = Some(value.into()),
            "--broken" => parsed.options.broken = Some(rule(value)?),
            _ => return Err(format!("unknown argument '{name}'\n{USAGE}")),
        }
    }
    Ok(parsed)
}

/// A thousand seeds for every second since 1970.
fn fresh_start() -> Result<u64, String> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seconds = now.map_err(|error| error.to_string())?.as_secs();
    Ok(seconds * 1000)
}

fn rule(name: &str) -> Result<Rule, String> {
    match name {
        "O1" => Ok(Rule::O1),
        "O2" => Ok(Rule::O2),
        "O3" => Ok(Rule::O3),
        "O4" => Ok(Rule::O4),
        "O5" => Ok(Rule::O5),
        "O7" => Ok(Rule::O7),
        "Log" => Ok(Rule::Log),
        _ => Err(format!(
            "--broken: '{name}' is none of O1, O2, O3, O4, O5, O7, Log"
        )),
    }
}

fn replay_line(seed: u64, options: &Options) -> String {
    let broken = options
        .broken
        .map_or_else(String::new, |rule| format!(" --broken {rule:?}"));
    let by_qemu = if options.by_qemu { " --by-qemu" } else { "" };
    format!("cargo xtask sim --seed {seed}{by_qemu}{broken}")
}

fn replay(seed: u64, options: &Options) -> Result<(), String> {
    let options = Options {
        print_trace: true,
        ..options.clone()
    };
    let (stats, hash) = run_seed(seed, &options).map_err(|failure| failure.to_string())?;
    println!("seed {seed}: {stats}\ntrace hash {hash:016x}");
    Ok(())
}

/// What the threads share.
struct Progress {
    next: AtomicU64,
    stop: AtomicBool,
    total: Mutex<(Stats, Option<Failure>)>,
}

fn run_many(arguments: &Arguments) -> Result<(), String> {
    let (seeds, start) = (arguments.seeds, arguments.start);
    println!("{seeds} seeds from {start} on");
    let progress = Progress {
        next: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        total: Mutex::new((Stats::default(), None)),
    };
    let started = Instant::now();
    thread::scope(|scope| {
        for _ in 0..arguments.jobs {
            scope.spawn(|| work(arguments, &progress, started));
        }
    });
    let (stats, failure) = progress
        .total
        .into_inner()
        .map_err(|_| "a thread has panicked")?;
    println!("{stats} in {:.1} s", started.elapsed().as_secs_f64());
    judge(arguments, failure)
}

fn work(arguments: &Arguments, progress: &Progress, started: Instant) {
    while !progress.stop.load(Ordering::Relaxed) {
        let number = progress.next.fetch_add(1, Ordering::Relaxed);
        if number >= arguments.seeds {
            return;
        }
        let outcome = run_seed(arguments.start + number, &arguments.options);
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

fn judge(arguments: &Arguments, failure: Option<Failure>) -> Result<(), String> {
    let options = &arguments.options;
    match (options.broken, failure) {
        (None, None) => Ok(()),
        (None, Some(failure)) => Err(format!(
            "{failure}\nreplay with: {}",
            replay_line(failure.seed, options)
        )),
        (Some(rule), None) => Err(format!(
            "{rule:?} is broken and {} seeds did not notice",
            arguments.seeds
        )),
        (Some(rule), Some(failure)) => {
            let count = failure.seed - arguments.start + 1;
            println!("{rule:?} is broken: noticed after {count} seeds\n{failure}");
            println!("replay with: {}", replay_line(failure.seed, options));
            Ok(())
        }
    }
}
