//! Snapshots beside QEMU's: making, applying and deleting them on a large image; saving and loading the
//! state of a virtual machine; and how long a client waits while a snapshot is made under it.
//!
//! Every figure is the time of a whole command, or of QEMU's own from its monitor, taken in turn.

mod online;
mod state;
mod walk;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::arguments::Common;
use crate::machine;
use crate::process::{qemu_img, succeed, timed};
use crate::record::{Cell, Unit};
use crate::rows::Report;

/// How the benchmark of snapshots is run.
#[derive(clap::Args, Clone)]
pub struct SnapshotArguments {
    #[command(flatten)]
    common: Common,
    /// Tables to measure: walk, state, online [default: all]
    #[arg(long, value_delimiter = ',')]
    tables: Vec<String>,
    /// Folder on a disk for images, with 8 GiB of space
    #[arg(long, default_value_os_t = machine::build_folder().join("bench-snapshot"))]
    dir: PathBuf,
    /// Folder in memory for what is saved as state
    #[arg(long, default_value = "/dev/shm")]
    dir_memory: PathBuf,
    /// Size of the disk of the table walk in GiB
    #[arg(long, default_value_t = 1024)]
    walk_gib: u64,
    /// Times the steps of walk are measured; QEMU takes minutes for each
    #[arg(long, default_value_t = 1)]
    walk_rounds: usize,
    /// State of the virtual machine in MiB
    #[arg(long, default_value_t = 1024)]
    state_mib: u64,
    /// Times the other tables are measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

/// What every table is run with.
pub struct Bench {
    pub gaur: PathBuf,
    pub arguments: SnapshotArguments,
}

const REPORT: Report<Bench> = Report {
    name: "snapshot",
    title: "Snapshots",
    tables: &[
        ("walk", walk::measure),
        ("state", state::measure),
        ("online", online::measure),
    ],
};

/// Measures the tables asked for and writes the reports.
pub fn run(arguments: &SnapshotArguments) -> Result<()> {
    REPORT.check(&arguments.tables)?;
    crate::prerequisites::check(&["fio", "qemu-img", "qemu-system-x86_64"])?;
    std::fs::create_dir_all(&arguments.dir)?;
    let bench = Bench {
        gaur: arguments.common.gaur()?,
        arguments: arguments.clone(),
    };
    REPORT.measure(&arguments.common, &arguments.tables, &bench)
}

/// A row of a table: what was done, by several.
pub fn row(what: &str, unit: Unit) -> Cell {
    Cell::new(unit, &[("what", what)])
}

/// What was written before is on the disk, so that it does not disturb what is measured next.
pub fn settle() -> Result<()> {
    timed(&mut Command::new("sync")).map(drop)
}

/// Makes an image of so many GiB, all of whose clusters are mapped.
pub fn create_mapped(image: &Path, gib: u64) -> Result<()> {
    let mut create = qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "preallocation=metadata",
    ]);
    succeed(create.arg(image).arg(format!("{gib}G"))).map(drop)
}
