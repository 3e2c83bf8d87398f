//! Benchmarks side by side with peers: the same image, the same load, in turn, in one run.
//!
//! `bench-compare nbd` serves a fully allocated qcow2 image from memory by `qemu-nbd` and by
//! `gaur serve`, and loads both with 4 KiB random reads and writes at several depths and numbers of
//! connections; the raw file under fio's io_uring engine stands beside them. Machines are noisy, so
//! servers take turns and the figure to look at is the median of the ratios of neighbouring runs.
//!
//! `bench-compare engine` runs `gaur bench` and `qemu-img bench`, which both work in process, over the
//! tables of `docs/performance.md`: see [`engine`].
//!
//! `bench-compare exports` runs every kind of export in a guest: see [`exports`].
//!
//! `bench-compare idle` measures the cost of many idle exports: see [`idle`].
//!
//! `bench-compare snapshot` measures snapshots and states of virtual machines: see [`snapshot`].

mod client;
mod engine;
mod exports;
mod fio;
mod idle;
mod machine;
mod markdown;
mod nbd;
mod prerequisites;
mod report;
mod server;
mod snapshot;
mod statistics;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Benchmarks of Gaur side by side with its peers")]
struct Arguments {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// Random 4 KiB requests over NBD: gaur serve, qemu-nbd, and fio on the raw file
    Nbd(NbdArguments),
    /// Every kind of export, in a guest: gaur, qemu-nbd, qemu-storage-daemon and rublk
    Exports(exports::ExportsArguments),
    /// What an idle export costs: gaur serve and qemu-storage-daemon
    Idle(idle::IdleArguments),
    /// The tables of the engine: gaur bench, qemu-img bench, and fio on raw files
    Engine(engine::EngineArguments),
    /// Snapshots and states of virtual machines: gaur snapshot, qemu-img, QEMU, and fio on raw files
    Snapshot(snapshot::SnapshotArguments),
}

/// How the NBD benchmark is run.
#[derive(clap::Args, Clone)]
pub struct NbdArguments {
    /// Directory for images and sockets; memory by default, so that the disk is not measured
    #[arg(long, default_value = "/dev/shm/gaur-bench")]
    dir: PathBuf,
    /// The gaur binary [default: built in release mode]
    #[arg(long)]
    gaur: Option<PathBuf>,
    /// An older gaur binary, measured instead of qemu-nbd: what a change did to the speed
    #[arg(long, conflicts_with = "markdown")]
    before: Option<PathBuf>,
    /// Seconds per measurement
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Times each pair is measured
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Size of the disk in MiB
    #[arg(long, default_value_t = 1024)]
    size_mib: u64,
    /// Write the result as JSON to this file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Replace the table between the markers in this Markdown file
    #[arg(long)]
    markdown: Option<PathBuf>,
}

fn main() -> Result<()> {
    match Arguments::parse().benchmark {
        Benchmark::Nbd(arguments) => nbd::run(&arguments),
        Benchmark::Exports(arguments) => exports::run(&arguments),
        Benchmark::Idle(arguments) => idle::run(&arguments),
        Benchmark::Engine(arguments) => engine::run(&arguments),
        Benchmark::Snapshot(arguments) => snapshot::run(&arguments),
    }
}
