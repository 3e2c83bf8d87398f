//! fio as an independent load generator.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::nbd::Cell;

/// IOPS of 4 KiB requests through fio's NBD engine.
pub fn over_nbd(socket: &Path, cell: Cell, seconds: u64) -> Result<f64> {
    let uri = format!("--uri=nbd+unix:///?socket={}", socket.display());
    run(&["--ioengine=nbd".to_owned(), uri], cell, seconds)
}

/// IOPS of 4 KiB requests through fio's io_uring engine on a raw file.
pub fn on_file(file: &Path, cell: Cell, seconds: u64) -> Result<f64> {
    let name = format!("--filename={}", file.display());
    run(&["--ioengine=io_uring".to_owned(), name], cell, seconds)
}

/// The same past the host's cache.
pub fn direct_on_file(file: &Path, cell: Cell, seconds: u64) -> Result<f64> {
    let name = format!("--filename={}", file.display());
    let engine = [
        "--ioengine=io_uring".to_owned(),
        name,
        "--direct=1".to_owned(),
    ];
    run(&engine, cell, seconds)
}

fn run(engine: &[String], cell: Cell, seconds: u64) -> Result<f64> {
    let output = Command::new("fio")
        .args(["--name=bench", "--bs=4k", "--thread", "--group_reporting"])
        .args([
            "--time_based",
            "--norandommap",
            "--randrepeat=0",
            "--output-format=json",
        ])
        .arg(format!(
            "--rw={}",
            if cell.write { "randwrite" } else { "randread" }
        ))
        .arg(format!("--iodepth={}", cell.depth))
        .arg(format!("--numjobs={}", cell.connections))
        .arg(format!("--runtime={seconds}"))
        .arg(format!("--size={}", cell.size_bytes))
        .args(engine)
        .output()
        .context("cannot start fio")?;
    if !output.status.success() {
        bail!("fio failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    // fio may print notes before the JSON.
    let start = text.find('{').context("fio printed no JSON")?;
    let report: Value = serde_json::from_str(&text[start..]).context("fio's JSON")?;
    let side = if cell.write { "write" } else { "read" };
    report["jobs"][0][side]["iops"]
        .as_f64()
        .context("fio reports no IOPS")
}
