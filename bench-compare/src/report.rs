//! Figures for people: medians, ratios of neighbouring runs, a Markdown table.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};

use crate::NbdArguments;
use crate::nbd::Row;

const BEGIN: &str = "<!-- bench-compare nbd: begin -->";
const END: &str = "<!-- bench-compare nbd: end -->";

/// The middle value; of an even number, the mean of the two in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[count / 2],
        count => (sorted[count / 2 - 1] + sorted[count / 2]) / 2.0,
    }
}

/// Gaur's figure over QEMU's, round by round.
fn ratios(row: &Row) -> Vec<f64> {
    row.gaur
        .iter()
        .zip(&row.qemu_nbd)
        .map(|(gaur, qemu)| gaur / qemu)
        .collect()
}

/// One line per row on the terminal.
pub fn print(row: &Row) {
    println!("{}", line(row));
}

fn line(row: &Row) -> String {
    let kilo = |values: &[f64]| match values {
        [] => "-".to_owned(),
        values => format!("{:.1}", median(values) / 1000.0),
    };
    let ratios = ratios(row);
    let low = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let high = ratios.iter().copied().fold(0.0, f64::max);
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

/// Replaces what stands between the markers in `path`.
pub fn update_markdown(path: &Path, arguments: &NbdArguments, rows: &[Row]) -> Result<()> {
    let old = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let begin = old.find(BEGIN).context("the begin marker is missing")? + BEGIN.len();
    let end = old.find(END).context("the end marker is missing")?;
    let mut table = String::new();
    writeln!(table, "\n")?;
    writeln!(
        table,
        "{} MiB disk, {} rounds of {} s each, kernel {}, {} CPUs, {}.\n",
        arguments.size_mib,
        arguments.rounds,
        arguments.seconds,
        kernel(),
        std::thread::available_parallelism()?,
        qemu_version(),
    )?;
    writeln!(
        table,
        "| 4 KiB random | connections | depth | load | gaur kIOPS | qemu-nbd kIOPS | raw file kIOPS | gaur / qemu-nbd, median (range) |"
    )?;
    writeln!(table, "|---|---|---|---|---|---|---|---|")?;
    for row in rows {
        writeln!(table, "{}", line(row))?;
    }
    let new = format!("{}{table}\n{}", &old[..begin], &old[end..]);
    std::fs::write(path, new)?;
    Ok(())
}

fn kernel() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    text.split(['-', '\n'])
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn qemu_version() -> String {
    let output = std::process::Command::new("qemu-nbd")
        .arg("--version")
        .output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let line = text
        .unwrap_or_default()
        .lines()
        .next()
        .unwrap_or_default()
        .to_owned();
    line.split(" (").next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_the_middle_whatever_the_order() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
