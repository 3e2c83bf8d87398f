//! fio's requests.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::record::Cell;

/// fio is ended so many seconds after its time.
const PATIENCE_SECONDS: u64 = 20;

/// What a run of fio says.
#[derive(Clone, Copy, Debug, Default)]
pub struct Run {
    /// Requests a second, reads and writes together.
    pub iops: f64,
    /// 99th percentile in microseconds, of the slower kind.
    pub p99_us: f64,
}

/// Bytes of a request.
pub fn block_bytes(cell: &Cell) -> u64 {
    if cell.is_sequential() {
        512 << 10
    } else {
        4096
    }
}

/// How long a load runs before it is measured: a new server touches its memory for the first time
/// then, which costs a guest's kernel far more than a machine's. What is written to an empty image is
/// measured from the start, for the first write of a place is what that is about.
pub fn warm_up(cell: &Cell) -> Duration {
    let writes_anew = cell.image == "empty" && !matches!(cell.load.as_str(), "read" | "randread");
    Duration::from_millis(if writes_anew { 0 } else { 500 })
}

/// Runs a cell's load on a block device or file for so many seconds, after it has warmed up.
pub fn run(cell: &Cell, target: &Path, seconds: u64, size_bytes: u64) -> Result<Run> {
    let jobs = u64::from(cell.jobs);
    let kind = match cell.load.as_str() {
        "mix" => "randrw",
        other => other,
    };
    // Jobs that read in order have a part of the disk each.
    let (size, step) = match cell.is_sequential() {
        true => (size_bytes / jobs, size_bytes / jobs),
        false => (size_bytes, 0),
    };
    // A device whose server hangs must not hold up the others.
    let limit = (seconds + PATIENCE_SECONDS).to_string();
    let mut command = Command::new("timeout");
    command
        .args(["--signal=KILL", &limit, "fio"])
        .args([
            "--name=bench",
            "--ioengine=io_uring",
            "--direct=1",
            "--thread",
        ])
        .args(["--group_reporting", "--time_based", "--norandommap"])
        .args(["--randrepeat=0", "--rwmixread=70"])
        .arg(format!("--filename={}", target.display()))
        .arg(format!("--rw={kind}"))
        .arg(format!("--bs={}", block_bytes(cell)))
        .arg(format!("--iodepth={}", cell.depth))
        .arg(format!("--numjobs={jobs}"))
        .arg(format!("--ramp_time={}ms", warm_up(cell).as_millis()))
        .arg(format!("--runtime={seconds}"))
        .arg(format!("--size={size}"))
        .arg(format!("--offset_increment={step}"));
    parse(&crate::fio::job(&mut command)?)
}

fn parse(job: &Value) -> Result<Run> {
    let mut run = Run::default();
    for side in ["read", "write"] {
        run.iops += job[side]["iops"].as_f64().context("fio reports no IOPS")?;
        let nanoseconds = job[side]["clat_ns"]["percentile"]["99.000000"].as_f64();
        run.p99_us = run.p99_us.max(nanoseconds.unwrap_or(0.0) / 1000.0);
    }
    Ok(run)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_first_writes_are_measured_from_the_start() {
        let of = |image: &str, load: &str| {
            warm_up(&Cell {
                image: image.to_owned(),
                load: load.to_owned(),
                ..Cell::default()
            })
        };
        for load in ["mix", "write", "randwrite"] {
            assert!(of("empty", load).is_zero() && !of("full", load).is_zero());
        }
        for load in ["read", "randread"] {
            assert_eq!(of("empty", load), of("full", load));
        }
    }

    #[test]
    fn reads_and_writes_are_added_and_the_slower_percentile_counts() {
        let report = serde_json::json!({"jobs": [{
            "read": {"iops": 70.0, "clat_ns": {"percentile": {"99.000000": 5000}}},
            "write": {"iops": 30.0, "clat_ns": {"percentile": {"99.000000": 9000}}},
        }]});
        let run = parse(&report["jobs"][0]).unwrap();
        assert_eq!((run.iops, run.p99_us), (100.0, 9.0));
        assert!(parse(&serde_json::json!({})).is_err());
    }
}
