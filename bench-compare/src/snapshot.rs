//! Snapshots beside QEMU's: making, applying and deleting them on a large image; saving and loading the
//! state of a virtual machine; and how long a client waits while a snapshot is made under it.
//!
//! Every figure is the time of a whole command, or of QEMU's own from its monitor, taken in turn.

mod online;
mod report;
mod state;
mod walk;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::machine::{self, Machine};

/// How the benchmark of snapshots is run.
#[derive(clap::Args, Clone)]
pub struct SnapshotArguments {
    /// Tables to measure: walk, state, online [default: all]
    #[arg(long, value_delimiter = ',')]
    tables: Vec<String>,
    /// The gaur binary [default: built in release mode]
    #[arg(long)]
    gaur: Option<PathBuf>,
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
    /// The machine-readable record; tables that are not measured stay in it
    #[arg(long)]
    json: Option<PathBuf>,
    /// The page whose section between markers is written
    #[arg(long)]
    markdown: Option<PathBuf>,
}

/// Everything that was measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Record {
    /// Where the newest table was measured.
    pub machine: Machine,
    pub tables: Vec<Table>,
}

/// One table.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Table {
    /// What `--tables` calls it.
    pub name: String,
    /// The day it was measured.
    pub date: String,
    /// Commit of Gaur.
    pub gaur: String,
    /// Load averages when it began.
    pub load_average: [f64; 3],
    /// What a reader must know.
    pub notes: Vec<String>,
    pub rows: Vec<Row>,
}

/// One thing that was done, by several.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Row {
    /// What was done.
    pub what: String,
    /// The unit of the samples: `s`, `MiB/s`, `ms`.
    pub unit: String,
    pub series: Vec<Series>,
    pub verdicts: Vec<Verdict>,
}

/// The samples of one who was measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Series {
    pub who: String,
    pub samples: Vec<f64>,
}

/// A target and what came of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Verdict {
    /// What is judged, as words.
    pub what: String,
    pub value: f64,
    pub target: f64,
    /// The value is to be at most the target, not at least.
    pub at_most: bool,
}

impl Verdict {
    /// Whether the target was met.
    pub fn is_met(&self) -> bool {
        if self.at_most {
            self.value <= self.target
        } else {
            self.value >= self.target
        }
    }
}

impl Row {
    /// A row without samples.
    pub fn new(what: &str, unit: &str) -> Row {
        Row {
            what: what.to_owned(),
            unit: unit.to_owned(),
            ..Row::default()
        }
    }

    /// Adds a sample of a contestant.
    pub fn add(&mut self, who: &str, sample: f64) {
        println!("{}: {who} {sample:.3} {}", self.what, self.unit);
        match self.series.iter_mut().find(|series| series.who == who) {
            Some(series) => series.samples.push(sample),
            None => self.series.push(Series {
                who: who.to_owned(),
                samples: vec![sample],
            }),
        }
    }

    /// The samples of a contestant.
    pub fn samples(&self, who: &str) -> &[f64] {
        let found = self.series.iter().find(|series| series.who == who);
        found.map_or(&[], |series| &series.samples)
    }

    /// Judges the median of the ratios of two, round by round.
    pub fn judge_ratio(&mut self, over: &str, under: &str, target: f64, at_most: bool) {
        let ratios = crate::statistics::ratios(self.samples(over), self.samples(under));
        self.verdicts.push(Verdict {
            what: format!("{over} / {under}"),
            value: crate::statistics::median(&ratios),
            target,
            at_most,
        });
    }
}

/// What every table is run with.
pub struct Bench {
    pub gaur: PathBuf,
    pub dir: PathBuf,
    pub dir_memory: PathBuf,
    pub arguments: SnapshotArguments,
}

type Measure = fn(&Bench, &mut Table) -> Result<()>;

const TABLES: &[(&str, Measure)] = &[
    ("walk", walk::measure),
    ("state", state::measure),
    ("online", online::measure),
];

/// Measures the tables asked for and writes the reports.
pub fn run(arguments: &SnapshotArguments) -> Result<()> {
    let mut record = match &arguments.json {
        Some(path) if path.exists() => serde_json::from_str(&std::fs::read_to_string(path)?)?,
        _ => Record::default(),
    };
    for name in &arguments.tables {
        if !TABLES.iter().any(|(known, _)| known == name) {
            bail!("no table '{name}', there are walk, state, online");
        }
    }
    crate::prerequisites::check(&["fio", "qemu-img", "qemu-system-x86_64"])?;
    let gaur = match &arguments.gaur {
        Some(path) => path.clone(),
        None => machine::build_gaur()?,
    };
    std::fs::create_dir_all(&arguments.dir)?;
    let bench = Bench {
        gaur,
        dir: arguments.dir.clone(),
        dir_memory: arguments.dir_memory.clone(),
        arguments: arguments.clone(),
    };
    record.machine = Machine::here();
    for (name, measure) in TABLES {
        let wanted = &arguments.tables;
        if !wanted.is_empty() && !wanted.iter().any(|chosen| chosen == name) {
            continue;
        }
        let mut table = Table {
            name: (*name).to_owned(),
            date: machine::today(),
            gaur: record.machine.gaur.clone(),
            load_average: machine::load_average(),
            ..Table::default()
        };
        measure(&bench, &mut table).with_context(|| format!("table {name}"))?;
        put(&mut record, table);
        if let Some(path) = &arguments.json {
            std::fs::write(path, serde_json::to_string_pretty(&record)? + "\n")?;
        }
    }
    match &arguments.markdown {
        Some(path) => crate::markdown::update(path, "snapshot", &report::section(&record)),
        None => Ok(()),
    }
}

fn put(record: &mut Record, table: Table) {
    record.tables.retain(|old| old.name != table.name);
    record.tables.push(table);
    let position = |table: &Table| TABLES.iter().position(|(name, _)| *name == table.name);
    record.tables.sort_by_key(position);
}

/// Seconds that a command takes from start to end; it must succeed.
pub fn timed(command: &mut Command) -> Result<f64> {
    let start = Instant::now();
    let output = command.output().context("cannot start a command")?;
    let seconds = start.elapsed().as_secs_f64();
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("{:?} failed: {text}", command.get_program());
    }
    Ok(seconds)
}

/// `qemu-img` with these arguments and then a file.
pub fn qemu_img(arguments: &[&str], file: &Path) -> Command {
    let mut command = Command::new("qemu-img");
    command.args(arguments).arg(file);
    command
}

/// What was written before is on the disk, so that it does not disturb what is measured next.
pub fn settle() -> Result<()> {
    timed(&mut Command::new("sync")).map(|_| ())
}
