//! Benchmarks side by side with peers: the same image, the same load, in turn, in one run.
//!
//! Machines are noisy, so contestants take turns and the figure to look at is the median of the ratios of
//! neighbouring runs. Each benchmark is a module.

mod arguments;
mod client;
mod engine;
mod exports;
mod fio;
mod idle;
mod machine;
mod markdown;
mod nbd;
mod prerequisites;
mod process;
mod record;
mod rows;
mod snapshot;
mod statistics;
mod tools;

use anyhow::Result;
use clap::Parser;

/// Benchmarks of Gaur side by side with its peers
#[derive(Parser)]
enum Benchmark {
    /// Random 4 KiB requests over NBD: gaur serve, qemu-nbd, and fio on the raw file
    Nbd(nbd::NbdArguments),
    /// Every kind of export, in a guest: gaur, qemu-nbd, qemu-storage-daemon and rublk
    Exports(exports::ExportsArguments),
    /// What an idle export costs: gaur serve and qemu-storage-daemon
    Idle(idle::IdleArguments),
    /// The tables of the engine: gaur bench, qemu-img bench, and fio on raw files
    Engine(engine::EngineArguments),
    /// Snapshots and states of virtual machines: gaur snapshot, qemu-img, QEMU, and fio on raw files
    Snapshot(snapshot::SnapshotArguments),
    /// The verbs that work on files: gaur and qemu-img
    Tools(tools::ToolsArguments),
}

fn main() -> Result<()> {
    match Benchmark::parse() {
        Benchmark::Nbd(arguments) => nbd::run(&arguments),
        Benchmark::Exports(arguments) => exports::run(&arguments),
        Benchmark::Idle(arguments) => idle::run(&arguments),
        Benchmark::Engine(arguments) => engine::run(&arguments),
        Benchmark::Snapshot(arguments) => snapshot::run(&arguments),
        Benchmark::Tools(arguments) => tools::run(&arguments),
    }
}
