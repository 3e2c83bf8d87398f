//! One load on one image, and the two programs that can make it in process: `qemu-img bench` and
//! `gaur bench`. Both get the same flags, so both see the same offsets in the same order.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::engine::stride::Disk;
use crate::process::{succeed, text_of};

/// Bytes of a request.
pub const REQUEST_BYTES: u64 = 4096;

/// Requests in flight: the default of `qemu-img bench`.
pub const DEPTH: u32 = 64;

/// What is done to an image.
#[derive(Clone, Debug)]
pub struct Load<'a> {
    /// The image.
    pub image: &'a Path,
    /// Its format.
    pub format: &'static str,
    /// Writes instead of reads.
    pub write: bool,
    /// How many.
    pub requests: u64,
    /// From one request to the next, in bytes; offsets wrap around at the end of the disk.
    pub stride_bytes: u64,
    /// Limits of the cache of L2 tables; the programs' own without.
    pub l2_cache: Option<L2Cache>,
}

/// Limits of a cache of L2 tables.
#[derive(Clone, Copy, Debug)]
pub struct L2Cache {
    /// `l2-cache-size`.
    pub size_bytes: u64,
    /// `l2-cache-entry-size`.
    pub entry_bytes: u64,
}

/// QEMU's ways of input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aio {
    /// Linux AIO.
    Native,
    /// io_uring.
    IoUring,
    /// A pool of threads, the default.
    Threads,
}

impl Aio {
    /// All of them.
    pub const ALL: [Aio; 3] = [Aio::Native, Aio::IoUring, Aio::Threads];

    /// As the option `-i` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Aio::Native => "native",
            Aio::IoUring => "io_uring",
            Aio::Threads => "threads",
        }
    }
}

/// What one run gave.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Requests a second.
    pub iops: f64,
    /// Whatever else is known about it.
    pub details: BTreeMap<String, f64>,
}

/// How `gaur bench` makes its load beyond what QEMU can do.
#[derive(Clone, Copy, Debug, Default)]
pub struct GaurOptions {
    /// Uniformly random offsets instead of the stride, from this seed.
    pub random_seed: Option<u64>,
    /// Queues on the image, one thread each; 1 if 0.
    pub threads: usize,
}

impl Run {
    /// A figure of which no more is known.
    pub fn of(iops: f64) -> Run {
        Run {
            iops,
            ..Run::default()
        }
    }
}

impl<'a> Load<'a> {
    /// A scattered load on a disk of that size, caches as they come.
    pub fn scattered(image: &'a Path, format: &'static str, disk: Disk, requests: u64) -> Load<'a> {
        Load {
            image,
            format,
            write: false,
            requests,
            stride_bytes: disk.scattered_stride(),
            l2_cache: None,
        }
    }

    /// The same with writes.
    pub fn writes(self) -> Self {
        Load {
            write: true,
            ..self
        }
    }

    /// Runs `qemu-img bench`; none when it was killed by a signal, which it sometimes is.
    pub fn by_qemu(&self, aio: Aio) -> Result<Option<Run>> {
        let mut command = Command::new("qemu-img");
        command.args(self.arguments()).args(self.stride());
        command.args(["-i", aio.name()]);
        let output = self.last_arguments(&mut command, Some(aio)).output();
        let output = output.context("cannot start qemu-img")?;
        if output.status.code().is_none() {
            return Ok(None);
        }
        let seconds = closing_seconds(&text_of(&command, output)?)?;
        Ok(Some(Run::of(self.requests as f64 / seconds)))
    }

    /// Runs `gaur bench`.
    pub fn by_gaur(&self, gaur: &Path, beyond: GaurOptions) -> Result<Run> {
        let mut command = Command::new(gaur);
        command.args(self.arguments()).arg("--output=json");
        match beyond.random_seed {
            Some(seed) => command.args(["--random", "--seed", &seed.to_string()]),
            None => command.args(self.stride()),
        };
        if beyond.threads > 1 {
            command.args(["--threads", &beyond.threads.to_string()]);
        }
        let text = succeed(self.last_arguments(&mut command, None))?;
        let report: Report = serde_json::from_str(&text)
            .with_context(|| format!("JSON of gaur bench: {}", text.trim()))?;
        Ok(report.run())
    }

    fn stride(&self) -> [String; 2] {
        ["-S".to_owned(), self.stride_bytes.to_string()]
    }

    /// What both understand, but for the stride and the image.
    fn arguments(&self) -> Vec<String> {
        let mut arguments: Vec<String> = ["bench", "-t", "none"].map(String::from).into();
        if self.write {
            arguments.push("-w".to_owned());
        }
        for (flag, value) in [
            ("-c", self.requests),
            ("-d", u64::from(DEPTH)),
            ("-s", REQUEST_BYTES),
        ] {
            arguments.extend([flag.to_owned(), value.to_string()]);
        }
        arguments
    }

    fn last_arguments<'c>(&self, command: &'c mut Command, aio: Option<Aio>) -> &'c mut Command {
        let image = self.image.display();
        let aio = aio.map_or(String::new(), |aio| format!(",file.aio={}", aio.name()));
        match self.l2_cache {
            None => command.args(["-f", self.format]).arg(self.image),
            Some(cache) => command.arg("--image-opts").arg(format!(
                "driver={},l2-cache-size={},l2-cache-entry-size={},cache-clean-interval=0,\
                 file.driver=file,file.filename={image},file.cache.direct=on{aio}",
                self.format, cache.size_bytes, cache.entry_bytes
            )),
        }
    }
}

/// The figure of the line `Run completed in 1.234 seconds.`
fn closing_seconds(text: &str) -> Result<f64> {
    let figure = text.lines().rev().find_map(|line| {
        let rest = line.strip_prefix("Run completed in ")?;
        rest.strip_suffix(" seconds.")?.parse().ok()
    });
    let seconds: f64 = figure.with_context(|| format!("no closing line in: {}", text.trim()))?;
    // Three decimals are printed. A run too short for them cannot be told from half a millisecond.
    Ok(seconds.max(0.0005))
}

/// What `gaur bench --output=json` prints, as far as it is used here.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    iops: f64,
    #[serde(default)]
    latency_us: Latency,
    #[serde(default)]
    open_us: f64,
    #[serde(default)]
    resident_bytes: f64,
    l2_cache: Option<CacheReport>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Latency {
    p50: f64,
    p99: f64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct CacheReport {
    hits: f64,
    misses: f64,
    held_bytes: f64,
    runs: f64,
}

impl Report {
    fn run(self) -> Run {
        let mut details = vec![
            ("p50-us", self.latency_us.p50),
            ("p99-us", self.latency_us.p99),
            ("open-us", self.open_us),
            ("resident-bytes", self.resident_bytes),
        ];
        if let Some(cache) = self.l2_cache {
            let lookups = cache.hits + cache.misses;
            if lookups > 0.0 {
                details.push(("l2-hit-rate", cache.hits / lookups));
            }
            details.push(("l2-held-bytes", cache.held_bytes));
            details.push(("l2-runs", cache.runs));
        }
        Run {
            iops: self.iops,
            details: details
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closing_line_of_qemu_img_bench_is_read() {
        let text = "Sending 9 read requests, 4096 bytes each, 64 in parallel (starting at offset 0, step size 8192)\n\
                    Run completed in 2.558 seconds.\n";
        assert_eq!(closing_seconds(text).unwrap(), 2.558);
        assert_eq!(
            closing_seconds("Run completed in 0.000 seconds.\n").unwrap(),
            0.0005
        );
        assert!(closing_seconds("Sending 9 read requests\n").is_err());
    }

    #[test]
    fn the_json_of_gaur_bench_is_read() {
        let text = r#"{ "requests": 10, "bytes": 40960, "seconds": 0.5, "iops": 20.0, "threads": 1,
            "latency-us": {"min": 1.0, "p50": 2.5, "p99": 9.0, "p99.9": 10.0}, "open-us": 800.5,
            "resident-bytes": 4096, "l2-cache": {"hits": 9, "misses": 3, "held-bytes": 512, "runs": 1},
            "refcount-cache": null }"#;
        let run = serde_json::from_str::<Report>(text).unwrap().run();
        assert_eq!(run.iops, 20.0);
        assert_eq!(run.details["p99-us"], 9.0);
        assert_eq!(run.details["l2-hit-rate"], 0.75);
        let raw = r#"{ "iops": 1.0, "l2-cache": null }"#;
        let run = serde_json::from_str::<Report>(raw).unwrap().run();
        assert!(!run.details.contains_key("l2-hit-rate"));
    }

    #[test]
    fn both_programs_get_the_same_flags() {
        let disk = Disk::new(4 << 30);
        let mut load = Load::scattered(Path::new("x.qcow2"), "qcow2", disk, 100).writes();
        let shown = [load.arguments(), load.stride().to_vec()]
            .concat()
            .join(" ");
        let stride = disk.scattered_stride();
        assert_eq!(
            shown,
            format!("bench -t none -w -c 100 -d 64 -s 4096 -S {stride}")
        );
        load.l2_cache = Some(L2Cache {
            size_bytes: 65536,
            entry_bytes: 4096,
        });
        let mut command = Command::new("true");
        let command = load.last_arguments(&mut command, Some(Aio::Native));
        let last = command.get_args().last().unwrap().to_str().unwrap();
        assert!(last.contains("l2-cache-size=65536,l2-cache-entry-size=4096,"));
        assert!(last.ends_with(",file.aio=native"));
    }
}
