//! Figures for people: medians, ratios of neighbouring runs, a Markdown table.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;

use crate::nbd::Row;
use crate::statistics::{median, range, ratios};
use crate::{NbdArguments, machine, markdown};

/// One line per row on the terminal.
pub fn print(row: &Row) {
    println!("{}", line(row));
}

fn line(row: &Row) -> String {
    let kilo = |values: &[f64]| match values {
        [] => "-".to_owned(),
        values => format!("{:.1}", median(values) / 1000.0),
    };
    // Gaur's figure over QEMU's, round by round.
    let ratios = ratios(&row.gaur, &row.qemu_nbd);
    let (low, high) = range(&ratios);
    format!(
        "| {} | {} | {} | {} | {} | {} | {} | {:.2} ({low:.2}-{high:.2}) |",
        if row.cell.write { "write" } else { "read" },
        row.cell.connections,
        row.cell.depth,
        row.load,
        kilo(&row.gaur),
        kilo(&row.qemu_nbd),
        kilo(&row.raw),
        median(&ratios),
    )
}

/// Replaces the table of NBD figures in the Markdown file at `path`.
pub fn update_markdown(path: &Path, arguments: &NbdArguments, rows: &[Row]) -> Result<()> {
    let mut table = String::new();
    writeln!(
        table,
        "{} MiB disk, {} rounds of {} s each, kernel {}, {} CPUs, {}.\n",
        arguments.size_mib,
        arguments.rounds,
        arguments.seconds,
        machine::kernel(),
        std::thread::available_parallelism()?,
        machine::version_of("qemu-nbd"),
    )?;
    writeln!(
        table,
        "| 4 KiB random | connections | depth | load | gaur kIOPS | qemu-nbd kIOPS | raw file kIOPS | gaur / qemu-nbd, median (range) |"
    )?;
    writeln!(table, "|---|---|---|---|---|---|---|---|")?;
    for row in rows {
        writeln!(table, "{}", line(row))?;
    }
    markdown::update(path, "nbd", &table)
}
