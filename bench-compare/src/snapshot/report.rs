//! The section of the page on performance.

use std::fmt::Write;

use super::{Record, Row, Table};
use crate::statistics::{median, range};

/// All tables as Markdown.
pub fn section(record: &Record) -> String {
    let machine = &record.machine;
    let mut text = format!(
        "Kernel {}, {} processors ({}), {} GiB of memory, {}, {}.\n",
        machine.kernel,
        machine.processors,
        machine.processor,
        machine.memory_mib.div_ceil(1024),
        machine.qemu,
        machine.fio,
    );
    for table in &record.tables {
        let _ = write!(text, "\n{}", table_section(table));
    }
    text
}

fn table_section(table: &Table) -> String {
    let [one, five, fifteen] = table.load_average;
    let mut text = format!("### Snapshots: {}\n\n", table.name);
    for note in &table.notes {
        let _ = writeln!(text, "{note}\n");
    }
    let _ = writeln!(
        text,
        "Measured on {} at {}, load averages {one:.1}, {five:.1}, {fifteen:.1}.\n",
        table.date, table.gaur
    );
    text += "| what | who: median (range) | judged | target | met |\n|---|---|---|---|---|\n";
    for row in &table.rows {
        text += &row_lines(row);
    }
    text
}

fn row_lines(row: &Row) -> String {
    let who: Vec<String> = row
        .series
        .iter()
        .map(|series| {
            let (low, high) = range(&series.samples);
            let unit = if series.who == "writes" {
                ""
            } else {
                &row.unit
            };
            format!(
                "{}: {} {unit} ({} to {})",
                series.who,
                figure(median(&series.samples)),
                figure(low),
                figure(high)
            )
        })
        .collect();
    let mut lines = String::new();
    if row.verdicts.is_empty() {
        let _ = writeln!(lines, "| {} | {} | | | |", row.what, who.join("; "));
    }
    for (number, verdict) in row.verdicts.iter().enumerate() {
        let bound = if verdict.at_most {
            "at most"
        } else {
            "at least"
        };
        let met = if verdict.is_met() {
            "met"
        } else {
            "**missed**"
        };
        let (what, who) = match number {
            0 => (row.what.as_str(), who.join("; ")),
            _ => ("", String::new()),
        };
        let _ = writeln!(
            lines,
            "| {what} | {who} | {} {} | {bound} {} | {met} |",
            verdict.what,
            figure(verdict.value),
            verdict.target
        );
    }
    lines
}

/// Three digits that count.
fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Verdict;

    #[test]
    fn report_row_shows_times_and_verdict() {
        let mut row = Row::new("create", "s");
        row.add("gaur", 0.5);
        row.add("qemu-img", 50.0);
        row.judge_ratio("gaur", "qemu-img", 0.1, true);
        row.verdicts.push(Verdict {
            what: "x".to_owned(),
            value: 3.0,
            target: 2.0,
            at_most: true,
        });
        assert_eq!(
            row_lines(&row),
            "| create | gaur: 0.5000 s (0.5000 to 0.5000); qemu-img: 50.0 s (50.0 to 50.0) | \
             gaur / qemu-img 0.0100 | at most 0.1 | met |\n\
             |  |  | x 3.00 | at most 2 | **missed** |\n"
        );
    }
}
