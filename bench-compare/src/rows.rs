//! Tables of rows that say what was done and by whom, as a section of the page on performance.

use std::fmt::Write;

use anyhow::{Context, Result, bail};

use crate::arguments::Common;
use crate::engine::markdown::{on_what, short};
use crate::machine::{self, Machine};
use crate::record::{Cell, Record, Table};
use crate::statistics::{median, range};

/// Measures a table with what `B` has.
pub type Measure<B> = fn(&B, &mut Table) -> Result<()>;

/// A benchmark of several tables.
pub struct Report<B: 'static> {
    /// Of the section between the markers.
    pub name: &'static str,
    pub title: &'static str,
    /// The tables by name, in their order.
    pub tables: &'static [(&'static str, Measure<B>)],
}

impl<B> Report<B> {
    /// Asserts that the tables `wanted` are there.
    pub fn check(&self, wanted: &[String]) -> Result<()> {
        let known = |name: &String| self.tables.iter().any(|(known, _)| known == name);
        match wanted.iter().find(|name| !known(name)) {
            None => Ok(()),
            Some(name) => {
                let names: Vec<&str> = self.tables.iter().map(|(name, _)| *name).collect();
                bail!("no table '{name}', there are {}", names.join(", "))
            }
        }
    }

    /// Measures the tables `wanted`, all if none is named, and writes the reports.
    pub fn measure(&self, common: &Common, wanted: &[String], bench: &B) -> Result<()> {
        let mut record: Record = common.earlier_record()?;
        let position = |table: &Table| self.tables.iter().position(|(name, _)| *name == table.name);
        record.machine = Machine::here();
        for (name, measure) in self.tables {
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
            measure(bench, &mut table).with_context(|| format!("table {name}"))?;
            record.put(table);
            record.tables.sort_by_key(position);
            common.write_record(&record)?;
        }
        common.write_section(self.name, &section(self.title, &record))
    }
}

/// All tables as Markdown, under this title.
fn section(title: &str, record: &Record) -> String {
    let mut text = on_what(&record.machine) + "\n";
    for table in &record.tables {
        let _ = write!(text, "\n{}", table_section(title, table));
    }
    text
}

fn table_section(title: &str, table: &Table) -> String {
    let [one, five, fifteen] = table.load_average;
    let mut text = format!("### {title}: {}\n\n", table.name);
    for note in &table.notes {
        let _ = writeln!(text, "{note}\n");
    }
    let _ = writeln!(
        text,
        "Measured on {} at {}, load averages {one:.1}, {five:.1}, {fifteen:.1}.\n",
        table.date, table.gaur
    );
    text += "| what | who: median (range) | judged | target | met |\n|---|---|---|---|---|\n";
    for row in &table.cells {
        text += &row_lines(row);
    }
    text
}

fn row_lines(row: &Cell) -> String {
    let unit = row.unit.symbol();
    let who: Vec<String> = row
        .series
        .iter()
        .map(|series| {
            let (low, high) = range(&series.samples);
            let unit = if series.who == "writes" { "" } else { unit };
            format!(
                "{}: {} {unit} ({} to {})",
                series.who,
                short(median(&series.samples)),
                short(low),
                short(high)
            )
        })
        .collect();
    let mut lines = String::new();
    if row.verdicts.is_empty() {
        let _ = writeln!(
            lines,
            "| {} | {} | | | |",
            row.label("what"),
            who.join("; ")
        );
    }
    for (number, verdict) in row.verdicts.iter().enumerate() {
        let bound = verdict.direction.words();
        let met = if verdict.met() { "met" } else { "**missed**" };
        let (what, who) = match number {
            0 => (row.label("what"), who.join("; ")),
            _ => ("", String::new()),
        };
        let _ = writeln!(
            lines,
            "| {what} | {who} | {} {} | {bound} {} | {met} |",
            verdict.what,
            short(verdict.measured),
            verdict.bound
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Direction, Unit, Verdict};

    #[test]
    fn report_row_shows_times_and_verdict() {
        let mut row = Cell::new(Unit::Seconds, &[("what", "create")]);
        row.add("gaur", 0.5);
        row.add("qemu-img", 50.0);
        row.judge_ratio("gaur", "qemu-img", 0.1, Direction::AtMost);
        let missed = Verdict::new("x", Unit::Ratio, 3.0, Direction::AtMost, 2.0);
        row.verdicts.push(missed);
        assert_eq!(
            row_lines(&row),
            "| create | gaur: 0.5000 s (0.5000 to 0.5000); qemu-img: 50.0 s (50.0 to 50.0) | \
             gaur / qemu-img 0.0100 | at most 0.1 | met |\n\
             |  |  | x 3.00 | at most 2 | **missed** |\n"
        );
    }
}
