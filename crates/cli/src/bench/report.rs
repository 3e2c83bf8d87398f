//! The report of `gaur bench`: text and JSON.

use std::io::Write;

use gaur_engine::{CacheStatistics, Image};
use serde::{Serialize, Serializer};
use serde_json::json;

use super::load::Workload;
use super::thread::ThreadStatistics;
use crate::failure::Failure;
use crate::size::human;

/// All that is known after a run; the JSON has these names.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Report {
    requests: u64,
    bytes: u64,
    seconds: f64,
    iops: f64,
    bytes_per_second: f64,
    threads: u64,
    depth: u64,
    buffer_size: u64,
    latency_us: Latency,
    reads: u64,
    writes: u64,
    flushes: u64,
    open_us: f64,
    resident_bytes: u64,
    #[serde(serialize_with = "cache")]
    l2_cache: Option<CacheStatistics>,
    #[serde(serialize_with = "cache")]
    refcount_cache: Option<CacheStatistics>,
}

#[derive(Debug, Serialize)]
struct Latency {
    min: f64,
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    #[serde(rename = "p99.9")]
    p99_9: f64,
    max: f64,
}

fn cache<S: Serializer>(found: &Option<CacheStatistics>, serializer: S) -> Result<S::Ok, S::Error> {
    let fields = found.as_ref().map(|found| {
        json!({
            "hits": found.hits,
            "misses": found.misses,
            "budget-bytes": found.budget_bytes,
            "held-bytes": found.held_bytes,
            "covered-bytes": found.covered_bytes,
            "slices": found.slices,
            "run-slices": found.run_slices,
            "runs": found.runs,
        })
    });
    fields.serialize(serializer)
}

/// Adds up what the threads did, of which there is at least one.
pub fn add_up(tallies: Vec<ThreadStatistics>) -> Option<ThreadStatistics> {
    tallies.into_iter().reduce(|mut sum, tally| {
        sum.times.add(&tally.times);
        sum.reads += tally.reads;
        sum.writes += tally.writes;
        sum.flushes += tally.flushes;
        sum.started = sum.started.min(tally.started);
        sum.ended = sum.ended.max(tally.ended);
        sum
    })
}

impl Report {
    /// After a run of `load` on `image` that did what `tally` says.
    pub fn new(load: &Workload, tally: &ThreadStatistics, image: &Image, open_us: f64) -> Report {
        let requests = tally.reads + tally.writes;
        let bytes = requests * load.buffer;
        let seconds = tally.ended.duration_since(tally.started).as_secs_f64();
        // A run too short for the clock has no rate that would mean anything.
        let rate = |number: u64| {
            if seconds > 0.0 {
                number as f64 / seconds
            } else {
                0.0
            }
        };
        let top = image.layers().top();
        Report {
            requests,
            bytes,
            seconds,
            iops: rate(requests),
            bytes_per_second: rate(bytes),
            threads: load.threads,
            depth: load.depth,
            buffer_size: load.buffer,
            latency_us: Latency {
                min: tally.times.min_us(),
                mean: tally.times.mean_us(),
                p50: tally.times.percentile_us(50.0),
                p90: tally.times.percentile_us(90.0),
                p99: tally.times.percentile_us(99.0),
                p99_9: tally.times.percentile_us(99.9),
                max: tally.times.max_us(),
            },
            reads: tally.reads,
            writes: tally.writes,
            flushes: tally.flushes,
            open_us,
            resident_bytes: resident_bytes(),
            l2_cache: top.l2_cache(),
            refcount_cache: image.refcount_cache(),
        }
    }

    /// qemu-img's closing line.
    pub fn print_closing_line(&self, out: &mut dyn Write) -> Result<(), Failure> {
        writeln!(out, "Run completed in {:.3} seconds.", self.seconds)?;
        Ok(())
    }

    /// What qemu-img does not tell.
    pub fn print_details(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let mib_per_second = self.bytes_per_second / f64::from(1 << 20);
        writeln!(out, "{:.0} IOPS, {mib_per_second:.1} MiB/s", self.iops)?;
        let latency = &self.latency_us;
        writeln!(
            out,
            "latency in us: min {:.1}, mean {:.1}, 50% {:.1}, 90% {:.1}, 99% {:.1}, 99.9% {:.1}, max {:.1}",
            latency.min,
            latency.mean,
            latency.p50,
            latency.p90,
            latency.p99,
            latency.p99_9,
            latency.max
        )?;
        for (name, cache) in [("l2", &self.l2_cache), ("refcount", &self.refcount_cache)] {
            if let Some(cache) = cache {
                print_cache(cache, name, out)?;
            }
        }
        Ok(())
    }
}

fn print_cache(cache: &CacheStatistics, name: &str, out: &mut dyn Write) -> Result<(), Failure> {
    let lookups = cache.hits + cache.misses;
    let percent = 100.0 * cache.hits as f64 / lookups.max(1) as f64;
    writeln!(
        out,
        "{name} cache: {lookups} lookups, {percent:.1}% hits; {} of at most {} held, for {} of tables",
        human(cache.held_bytes),
        human(cache.budget_bytes),
        human(cache.covered_bytes)
    )?;
    if cache.run_slices > 0 {
        writeln!(
            out,
            "{name} cache: {} of {} slices packed, into {} runs",
            cache.run_slices, cache.slices, cache.runs
        )?;
    }
    Ok(())
}

/// Memory of this process that is in RAM, 0 where the system does not say.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1);
    let pages: u64 = pages.and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}
