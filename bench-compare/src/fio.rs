//! fio as an independent load generator.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::nbd::Load;
use crate::process::succeed;

/// IOPS of 4 KiB requests through fio's NBD engine.
pub fn over_nbd(socket: &Path, load: Load, seconds: u64) -> Result<f64> {
    let uri = format!("--uri=nbd+unix:///?socket={}", socket.display());
    random(&["--ioengine=nbd", &uri], load, seconds)
}

/// IOPS of 4 KiB requests through fio's io_uring engine on a raw file, past the host's cache if `direct`.
pub fn on_file(file: &Path, direct: bool, load: Load, seconds: u64) -> Result<f64> {
    let name = format!("--filename={}", file.display());
    let direct = format!("--direct={}", u8::from(direct));
    random(&["--ioengine=io_uring", &name, &direct], load, seconds)
}

fn random(engine: &[&str], load: Load, seconds: u64) -> Result<f64> {
    let side = if load.write { "write" } else { "read" };
    let mut command = Command::new("fio");
    command
        .args(["--name=bench", "--bs=4k", "--thread", "--group_reporting"])
        .args(["--time_based", "--norandommap", "--randrepeat=0"])
        .arg(format!("--rw=rand{side}"))
        .arg(format!("--iodepth={}", load.depth))
        .arg(format!("--numjobs={}", load.connections))
        .arg(format!("--runtime={seconds}"))
        .arg(format!("--size={}", load.size_bytes))
        .args(engine);
    let iops = job(&mut command)?[side]["iops"].as_f64();
    iops.context("fio reports no IOPS")
}

/// Runs fio; what it says about its job, or about all jobs as a group.
pub fn job(command: &mut Command) -> Result<Value> {
    let text = succeed(command.arg("--output-format=json"))?;
    // fio may print notes before the JSON.
    let start = text.find('{').context("fio printed no JSON")?;
    let mut report: Value = serde_json::from_str(&text[start..]).context("fio's JSON")?;
    Ok(report["jobs"][0].take())
}
