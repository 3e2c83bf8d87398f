//! The suite of the engine: `gaur bench` beside `qemu-img bench`, in process on both sides.
//!
//! Each table is a module; they fill a record, which is written as JSON, as sections of a Markdown
//! page and as plots. Tables that a run leaves out keep what the record had.

mod allocation;
mod cache;
mod full;
mod growth;
mod huge;
mod images;
pub mod load;
pub mod markdown;
pub mod plot;
mod scaling;
mod stride;
mod suite;
pub mod turns;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::arguments::Common;
use crate::machine::{self, Machine};
use crate::record::Record;
use suite::Suite;

/// How the engine's suite is run.
#[derive(clap::Args, Clone)]
pub struct EngineArguments {
    #[command(flatten)]
    common: Common,
    /// Tables to measure, by name [default: all]
    #[arg(long, value_delimiter = ',')]
    tables: Vec<String>,
    /// Fewer requests and short runs of fio, to see whether everything works
    #[arg(long)]
    quick: bool,
    /// Times each cell is measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// An older gaur binary, measured instead of QEMU: what a change did to the speed
    #[arg(long)]
    before: Option<PathBuf>,
    /// Folder in memory for images, with 14 GiB of space
    #[arg(long, default_value = "/dev/shm")]
    dir_memory: PathBuf,
    /// Folder on a disk for images, with 9 GiB of space [default: that of this program]
    #[arg(long)]
    dir_disk: Option<PathBuf>,
    /// Folder for plots
    #[arg(long)]
    plots: Option<PathBuf>,
    /// Measure nothing: write the page and the plots from the record
    #[arg(long, requires = "json")]
    report_only: bool,
}

/// Measures the tables asked for and writes the reports.
pub fn run(arguments: &EngineArguments) -> Result<()> {
    let mut record = arguments.common.earlier_record()?;
    let failed = if arguments.report_only {
        Vec::new()
    } else {
        measure(arguments, &mut record)?
    };
    if let Some(path) = &arguments.common.markdown {
        write_page(path, arguments.plots.as_deref(), &record)?;
    }
    if !failed.is_empty() {
        bail!("not measured: {}", failed.join(", "));
    }
    Ok(())
}

/// Measures the tables; the names of those that failed. The record is kept after each table.
fn measure(arguments: &EngineArguments, record: &mut Record) -> Result<Vec<&'static str>> {
    let names = suite::chosen(&arguments.tables, arguments.before.is_some())?;
    if arguments.rounds == 0 {
        bail!("no rounds, no figures: --rounds takes 1 or more");
    }
    let mut programs = vec!["fio", "qemu-img", "qemu-io", "qemu-nbd"];
    if names.contains(&"mkfs") {
        programs.extend(["fusermount3", "mkfs.ext4", "nbdfuse"]);
    }
    crate::prerequisites::check(&programs)?;
    record.machine = Machine::here();
    let suite = Suite {
        gaur: arguments.common.gaur()?,
        before: arguments.before.clone(),
        commit: record.machine.gaur.clone(),
        memory: arguments.dir_memory.clone(),
        disk: arguments
            .dir_disk
            .clone()
            .unwrap_or_else(machine::build_folder),
        rounds: arguments.rounds,
        quick: arguments.quick,
    };
    let mut failed = Vec::new();
    for name in names {
        match suite::measure(&suite, name) {
            Ok(table) => {
                record.put(table);
                let tables = &mut record.tables;
                tables.sort_by_key(|table| suite::position(&table.name));
            }
            Err(error) => {
                eprintln!("{error:#}");
                failed.push(name);
            }
        }
        arguments.common.write_record(record)?;
    }
    Ok(failed)
}

/// Writes the sections and plots of all tables of the record.
fn write_page(path: &Path, plots: Option<&Path>, record: &Record) -> Result<()> {
    for table in &record.tables {
        let mut links = Vec::new();
        if let Some(folder) = plots {
            std::fs::create_dir_all(folder)?;
            for plot in plot::of(table) {
                let file = folder.join(format!("{}.svg", plot.name));
                plot.draw(&file)?;
                let page = path.parent().unwrap_or(Path::new(""));
                let link = file.strip_prefix(page).unwrap_or(&file);
                links.push((plot.title, link.display().to_string()));
            }
        }
        let name = format!("engine {}", table.name);
        crate::markdown::update(path, &name, &markdown::section(table, &links))?;
    }
    crate::markdown::update(path, "engine targets", &markdown::overview(record))
}
