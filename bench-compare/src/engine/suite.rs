//! The tables of the suite and what they are run with.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::engine::load::{GaurOptions, Load, Run};
use crate::engine::stride::Disk;
use crate::engine::{allocation, cache, full, growth, huge, markdown, scaling};
use crate::machine;
use crate::record::{Cell, Table};

/// What every table is run with.
pub struct Suite {
    /// The binary of `gaur`.
    pub gaur: PathBuf,
    /// An older one, which then stands in QEMU's place.
    pub before: Option<PathBuf>,
    /// Its commit.
    pub commit: String,
    /// A folder in memory.
    pub memory: PathBuf,
    /// A folder on a disk.
    pub disk: PathBuf,
    /// Times each cell is measured.
    pub rounds: usize,
    /// Shorter runs.
    pub quick: bool,
}

/// Measures one table.
type Measure = fn(&Suite, &mut Progress) -> Result<()>;

/// Names and functions of the tables, in the order of the page.
const TABLES: &[(&str, Measure)] = &[
    ("overlay", allocation::overlay),
    ("overlay-disk", allocation::overlay_on_disk),
    ("empty", allocation::empty),
    ("growth", growth::random_writes),
    ("mkfs", growth::mkfs),
    ("cache", cache::random_reads),
    ("memory", full::in_memory),
    ("disk", full::on_disk),
    ("huge", huge::random_reads),
    ("scaling", scaling::two_threads),
];

/// Tables in which an older Gaur can stand in QEMU's place.
const TABLES_BEFORE: &[&str] = &[
    "overlay",
    "overlay-disk",
    "empty",
    "cache",
    "memory",
    "disk",
    "huge",
];

/// The disk of most tables.
pub const DISK: Disk = Disk {
    size_bytes: 4 << 30,
};

impl Suite {
    /// `count` requests, a quarter of them in a quick run.
    pub fn requests(&self, count: u64) -> u64 {
        if self.quick { count / 4 } else { count }
    }

    /// One run of `gaur bench` with the flags of both.
    pub fn gaur(&self, load: &Load) -> Result<Run> {
        load.by_gaur(&self.gaur, GaurOptions::default())
    }

    /// One run with uniformly random offsets.
    pub fn gaur_random(&self, load: &Load) -> Result<Run> {
        let beyond = GaurOptions {
            random_seed: Some(1),
            ..GaurOptions::default()
        };
        load.by_gaur(&self.gaur, beyond)
    }
}

/// The table in the making; cells are shown as they come.
pub struct Progress {
    table: Table,
}

impl Progress {
    /// Takes a cell.
    pub fn push(&mut self, cell: Cell) {
        println!("{}", markdown::plain_line(&cell));
        self.table.cells.push(cell);
    }

    /// The table so far.
    pub fn table(&mut self) -> &mut Table {
        &mut self.table
    }
}

/// The names of the tables that are asked for, all without any; with `before` of those that compare with
/// an older Gaur.
pub fn chosen(names: &[String], before: bool) -> Result<Vec<&'static str>> {
    let fits = move |name: &&str| !before || TABLES_BEFORE.contains(name);
    let known = || TABLES.iter().map(|&(name, _)| name).filter(fits);
    for name in names {
        if !known().any(|known| known == name) {
            let all: Vec<&str> = known().collect();
            bail!("no table '{name}', there are {}", all.join(", "));
        }
    }
    let wanted = |name: &&str| names.is_empty() || names.iter().any(|chosen| chosen == name);
    Ok(known().filter(wanted).collect())
}

/// Where a table stands on the page.
pub fn position(name: &str) -> usize {
    let found = TABLES.iter().position(|&(known, _)| known == name);
    found.unwrap_or(TABLES.len())
}

/// Measures a table.
pub fn measure(suite: &Suite, name: &'static str) -> Result<Table> {
    let (_, measure) = TABLES
        .iter()
        .find(|(known, _)| *known == name)
        .with_context(|| format!("no table '{name}'"))?;
    let load_average = machine::load_average();
    println!("== {name} (load average {:.2})", load_average[0]);
    let start = Instant::now();
    let mut progress = Progress {
        table: Table {
            name: name.to_owned(),
            date: machine::today(),
            gaur: suite.commit.clone(),
            load_average,
            quick: suite.quick,
            rounds: suite.rounds,
            ..Table::default()
        },
    };
    measure(suite, &mut progress).with_context(|| format!("table {name}"))?;
    let mut table = progress.table;
    table.seconds = start.elapsed().as_secs_f64();
    for verdict in &table.verdicts {
        println!("{}", markdown::verdict_text(verdict));
    }
    println!("== {name}: {:.0} s", table.seconds);
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_chosen_by_name_in_the_order_of_the_page() {
        assert_eq!(chosen(&[], false).unwrap().len(), TABLES.len());
        let names = ["cache".to_owned(), "overlay".to_owned()];
        assert_eq!(chosen(&names, false).unwrap(), ["overlay", "cache"]);
        let error = chosen(&["x".to_owned()], false).unwrap_err().to_string();
        assert!(
            error.contains("no table 'x', there are overlay,"),
            "{error}"
        );
    }
}
