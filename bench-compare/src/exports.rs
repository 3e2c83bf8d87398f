//! One engine behind every kind of export, and one kind of export before several engines: fio on the
//! block device or file that each makes, in one guest, in turn.
//!
//! `bench-compare exports` starts a guest whose kernel has ublk, nbd and VDUSE (`cargo xtask vm`) and
//! runs itself in it. There, for every cell, each contestant starts on the cell's image, is measured
//! and ends, round after round. The record that it leaves becomes tables and plots outside.

mod contestant;
mod device;
mod image;
mod inside;
mod load;
mod peers;
mod plot;
mod record;
mod report;
mod store;
mod vhost;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::arguments::Common;
use crate::machine;
use record::Record;

/// How the benchmark of exports is run.
#[derive(clap::Args, Clone)]
#[command(args_override_self = true)]
pub struct ExportsArguments {
    #[command(flatten)]
    common: Common,
    /// Contestants to measure, by name [default: all]
    #[arg(long, value_delimiter = ',')]
    who: Vec<String>,
    /// Images to measure on
    #[arg(long, value_delimiter = ',', default_value = "full,empty")]
    images: Vec<String>,
    /// Loads to measure
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "randread,randwrite,mix,read,write"
    )]
    loads: Vec<String>,
    /// Requests in flight
    #[arg(long, value_delimiter = ',', default_value = "1,64")]
    depths: Vec<u32>,
    /// Jobs at once
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    jobs: Vec<u32>,
    /// Where the images are
    #[arg(long, value_enum, default_value = "xfs")]
    store: store::Store,
    /// Seconds per measurement
    #[arg(long, default_value_t = 2)]
    seconds: u64,
    /// Times each cell is measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Size of the disk in MiB
    #[arg(long, default_value_t = 1024)]
    size_mib: u64,
    /// Processors of the guest, bound to as many of this machine's. More than one are slower than one:
    /// a system call of the guest then wakes another of the machine's processors
    #[arg(long, default_value_t = 1)]
    cpus: usize,
    /// An older gaur binary, measured beside: what a change did to the speed
    #[arg(long)]
    before: Option<PathBuf>,
    /// The rublk binary [default: installed by cargo, once, in the cache]
    #[arg(long)]
    rublk: Option<PathBuf>,
    /// Folder on the host that the guest shares
    #[arg(long, default_value_os_t = machine::build_folder().join("bench-exports"))]
    dir: PathBuf,
    /// Do not measure, make the pages from the record
    #[arg(long, requires = "json")]
    report: bool,
    /// Folder for plots
    #[arg(long)]
    plots: Option<PathBuf>,
    /// This process runs in the guest
    #[arg(long, hide = true)]
    inside: bool,
}

/// Runs the guest and writes the reports.
pub fn run(arguments: &ExportsArguments) -> Result<()> {
    if arguments.inside {
        return inside::run(arguments);
    }
    let record = match arguments.report {
        true => arguments.common.earlier_record()?,
        false => measure(arguments)?,
    };
    arguments.common.write_record(&record)?;
    if let Some(folder) = &arguments.plots {
        std::fs::create_dir_all(folder)?;
        plot::draw_all(&record, folder)?;
    }
    let section = report::section(&record);
    if arguments.common.markdown.is_none() {
        println!("{section}");
    }
    arguments.common.write_section("exports", &section)
}

fn measure(arguments: &ExportsArguments) -> Result<Record> {
    peers::check(arguments.rublk.as_deref())?;
    let gaur = arguments.common.gaur()?;
    let rublk = peers::rublk(arguments.rublk.as_deref())?;
    std::fs::create_dir_all(&arguments.dir)?;
    let dir = arguments.dir.canonicalize()?;
    let result = dir.join("record.json");
    let _ = std::fs::remove_file(&result);
    image::prepare(&dir, arguments.size_mib)?;
    let mut command = guest(&dir, arguments.cpus)?;
    let [gaur, rublk] = [gaur.canonicalize()?, rublk.canonicalize()?];
    let before = arguments.before.as_ref().map(|path| path.canonicalize());
    let before = before.transpose()?;
    let programs = [Some(&gaur), Some(&rublk), before.as_ref()];
    for folder in programs.iter().flatten().filter_map(|path| path.parent()) {
        command.arg("--see").arg(folder);
    }
    command.arg("--").arg(std::env::current_exe()?);
    // The same arguments; those that follow replace some of them.
    command.args(std::env::args_os().skip(1));
    command.arg("--inside").arg("--dir").arg(&dir);
    command.arg("--gaur").arg(gaur).arg("--rublk").arg(rublk);
    if let Some(before) = before {
        command.arg("--before").arg(before);
    }
    let status = command.status().context("cannot start the guest")?;
    let text = std::fs::read_to_string(&result).context("the guest left no record")?;
    let mut record: Record = serde_json::from_str(&text)?;
    if !status.success() {
        bail!("the guest ended with {status}");
    }
    // The tree's state and the host's processor are not to be seen in the guest.
    record.host = machine::Machine::here();
    Ok(record)
}

/// The command that runs another in a guest, without that other. `GAUR_BENCH_GUEST` replaces it.
fn guest(share: &Path, cpus: usize) -> Result<Command> {
    const HOURS: u64 = 3;
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let usual = [
        &cargo,
        "run",
        "--quiet",
        "--package",
        "xtask",
        "--",
        "vm",
        "run",
    ];
    // Cargo's path may have spaces.
    let other = std::env::var("GAUR_BENCH_GUEST");
    let words: Vec<&str> = match &other {
        Ok(words) => words.split_whitespace().collect(),
        Err(_) => usual.to_vec(),
    };
    if words.is_empty() || cpus == 0 {
        bail!("GAUR_BENCH_GUEST or the guest's processors are none");
    }
    let mut command = Command::new("taskset");
    command.arg("--cpu-list").arg(format!("0-{}", cpus - 1));
    command.args(words);
    command.arg("--share").arg(share);
    command.arg("--cpus").arg(cpus.to_string());
    command.arg("--timeout").arg((HOURS * 3600).to_string());
    command.args(["--mem", "6144"]);
    Ok(command)
}
