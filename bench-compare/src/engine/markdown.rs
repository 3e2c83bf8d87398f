//! The record as text for people: a table a section, targets below it, and one page of all targets.

use std::fmt::Write;

use crate::machine::Machine;
use crate::record::{Cell, Record, Table, Unit, Verdict};

/// Details of Gaur's runs that a table shows: table, series, detail, heading.
const DETAILS: &[(&str, &str, &str, &str)] = &[
    ("cache", "gaur", "l2-hit-rate", "gaur's hit rate"),
    ("cache", "gaur, random", "l2-hit-rate", "hit rate, random"),
    ("huge", "gaur, random", "l2-hit-rate", "hit rate, random"),
];

/// What stands between the markers of a table.
pub fn section(table: &Table, plots: &[(String, String)]) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "{}\n", circumstances(table));
    for note in &table.notes {
        let _ = writeln!(text, "{note}\n");
    }
    text += &rows_of(table);
    text.push('\n');
    for verdict in &table.verdicts {
        let _ = writeln!(text, "* {}", verdict_text(verdict));
    }
    for (title, path) in plots {
        let _ = writeln!(text, "\n![{title}]({path})");
    }
    text
}

/// The table itself.
pub fn rows_of(table: &Table) -> String {
    let mut text = String::new();
    let names = series_names(table);
    let rival = table.cells.first().and_then(rival);
    let details: Vec<_> = DETAILS
        .iter()
        .filter(|detail| detail.0 == table.name)
        .collect();
    let unit = table.cells.first().map_or(Unit::Iops, |cell| cell.unit);
    let says_more = |cell: &Cell| !cell.verdicts.is_empty() || !cell.notes.is_empty();
    let says_more = table.cells.iter().any(says_more);
    let mut heading: Vec<String> = Vec::new();
    if let Some(cell) = table.cells.first() {
        heading.extend(cell.labels.iter().map(|(name, _)| name.clone()));
    }
    heading.extend(names.iter().map(|name| format!("{name}{}", unit_of(unit))));
    heading.extend(rival.map(|rival| format!("gaur / {rival}")));
    heading.extend(details.iter().map(|detail| detail.3.to_owned()));
    if says_more {
        heading.extend(["target".to_owned(), "notes".to_owned()]);
    }
    line(&mut text, &heading);
    line(&mut text, &vec!["---".to_owned(); heading.len()]);
    for cell in &table.cells {
        let mut fields: Vec<String> = cell.labels.iter().map(|(_, value)| value.clone()).collect();
        fields.extend(names.iter().map(|name| figure(cell, name)));
        fields.extend(rival.map(|rival| ratio_text(cell, rival)));
        for (_, who, detail, _) in &details {
            let value = cell
                .series(who)
                .and_then(|series| series.details.get(*detail));
            fields.push(value.map_or("-".to_owned(), |rate| format!("{:.0} %", rate * 100.0)));
        }
        let targets: Vec<String> = cell.verdicts.iter().map(cell_verdict).collect();
        if says_more {
            fields.extend([targets.join("; "), cell.notes.join("; ")]);
        }
        line(&mut text, &fields);
    }
    text
}

/// QEMU's program that was measured beside Gaur.
fn rival(cell: &Cell) -> Option<&'static str> {
    let is_there = |who: &&str| cell.series(who).is_some();
    let rival = ["qemu", "qemu-nbd"].into_iter().find(is_there);
    rival.filter(|_| is_there(&"gaur"))
}

/// All targets of all tables, and what became of them.
pub fn overview(record: &Record) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "{}\n", on_what(&record.machine));
    let heading = ["table", "what is judged", "target", "worst cell", "met"];
    line(&mut text, &heading.map(str::to_owned));
    line(&mut text, &["---"; 5].map(str::to_owned));
    for table in &record.tables {
        for (what, verdicts) in by_subject(table) {
            let met = verdicts.iter().filter(|(_, verdict)| verdict.met()).count();
            let worst = verdicts.iter().max_by(|a, b| {
                let missed = |verdict: &Verdict| verdict.missed_by_percent();
                missed(a.1).total_cmp(&missed(b.1))
            });
            let Some((cell, worst)) = worst else { continue };
            let place = if cell.is_empty() {
                String::new()
            } else {
                format!(" ({cell})")
            };
            let outcome = if verdicts.len() == 1 {
                outcome(worst)
            } else if met == verdicts.len() {
                format!("in all {met} cells")
            } else {
                format!(
                    "in {met} of {} cells; worst {}",
                    verdicts.len(),
                    outcome(worst)
                )
            };
            let fields = [
                table.name.clone(),
                what,
                bound_text(worst),
                format!("{}{place}", number(worst.unit, worst.measured)),
                outcome,
            ];
            line(&mut text, &fields);
        }
    }
    text
}

/// The verdicts of a table by what they judge, each with the cell it is about.
fn by_subject(table: &Table) -> Vec<(String, Vec<(String, &Verdict)>)> {
    let mut subjects: Vec<(String, Vec<(String, &Verdict)>)> = Vec::new();
    let of_cells = table.cells.iter().flat_map(|cell| {
        let values: Vec<&str> = cell
            .labels
            .iter()
            .map(|(_, value)| value.as_str())
            .collect();
        let place = values.join(", ");
        cell.verdicts
            .iter()
            .map(move |verdict| (place.clone(), verdict))
    });
    let of_table = table
        .verdicts
        .iter()
        .map(|verdict| (String::new(), verdict));
    for (place, verdict) in of_cells.chain(of_table) {
        // Cells with another bound are another target.
        let same = |(_, known): &&mut (String, Vec<(String, &Verdict)>)| {
            known.first().is_some_and(|(_, first)| {
                first.what == verdict.what && first.bound == verdict.bound
            })
        };
        match subjects.iter_mut().find(same) {
            Some((_, known)) => known.push((place, verdict)),
            None => subjects.push((verdict.what.clone(), vec![(place, verdict)])),
        }
    }
    subjects
}

/// One line for the terminal.
pub fn plain_line(cell: &Cell) -> String {
    let mut text = String::new();
    for (name, value) in &cell.labels {
        let _ = write!(text, "{name} {value}  ");
    }
    for series in &cell.series {
        let _ = write!(text, "| {} {} ", series.who, figure(cell, &series.who));
    }
    if let Some(rival) = rival(cell) {
        let _ = write!(text, "| {} ", ratio_text(cell, rival));
    }
    for verdict in &cell.verdicts {
        let _ = write!(text, "| {} ", cell_verdict(verdict));
    }
    text + &cell.notes.join("; ")
}

/// A verdict as a sentence.
pub fn verdict_text(verdict: &Verdict) -> String {
    format!(
        "{}: {}, target {}: {}",
        verdict.what,
        number(verdict.unit, verdict.measured),
        bound_text(verdict),
        outcome(verdict)
    )
}

fn cell_verdict(verdict: &Verdict) -> String {
    let (bound, outcome) = (bound_text(verdict), outcome(verdict));
    match verdict.what.as_str() {
        "gaur / qemu" | "gaur" => format!("{bound}: {outcome}"),
        what => {
            let figure = number(verdict.unit, verdict.measured);
            format!("{what} {figure}, {bound}: {outcome}")
        }
    }
}

fn bound_text(verdict: &Verdict) -> String {
    let side = verdict.direction.words();
    format!("{side} {}", number(verdict.unit, verdict.bound))
}

fn outcome(verdict: &Verdict) -> String {
    if verdict.met() {
        "met".to_owned()
    } else if verdict.measured.is_nan() {
        "**not measured**".to_owned()
    } else {
        format!(
            "**missed by {:.0} %**",
            verdict.missed_by_percent().round().max(1.0)
        )
    }
}

fn circumstances(table: &Table) -> String {
    let [one, _, fifteen] = table.load_average;
    let rounds = match table.rounds {
        1 => "one round".to_owned(),
        rounds => format!("{rounds} rounds"),
    };
    let quick = if table.quick { ", short form" } else { "" };
    format!(
        "Measured on {} at commit {}, {rounds}{quick}, {:.0} s. Load average of the machine before it began: \
         {one:.2} (one minute), {fifteen:.2} (fifteen).",
        table.date, table.gaur, table.seconds
    )
}

pub fn on_what(machine: &Machine) -> String {
    format!(
        "Kernel {}, {} processors ({}), {} GiB of memory, {}, {}.",
        machine.kernel,
        machine.processors,
        machine.processor,
        machine.memory_mib.div_ceil(1024),
        machine.qemu,
        machine.fio
    )
}

/// Every series of the table, in the order of their first appearance.
fn series_names(table: &Table) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for series in table.cells.iter().flat_map(|cell| &cell.series) {
        if !names.contains(&series.who) {
            names.push(series.who.clone());
        }
    }
    names
}

fn figure(cell: &Cell, who: &str) -> String {
    match cell.series(who) {
        Some(series) => number(cell.unit, series.median()),
        None => "-".to_owned(),
    }
}

fn ratio_text(cell: &Cell, rival: &str) -> String {
    match cell.ratio("gaur", rival) {
        Some((ratio, (low, high))) if low < high => format!("{ratio:.2} ({low:.2}-{high:.2})"),
        Some((ratio, _)) => format!("{ratio:.2}"),
        None => "-".to_owned(),
    }
}

fn unit_of(unit: Unit) -> &'static str {
    match unit {
        Unit::Iops => ", kIOPS",
        _ => "",
    }
}

fn number(unit: Unit, value: f64) -> String {
    match unit {
        _ if value.is_nan() => "-".to_owned(),
        Unit::Iops => format!("{:.1}", value / 1000.0),
        Unit::Bytes => format!("{:.1} MiB", value / 1_048_576.0),
        Unit::Microseconds => format!("{:.2} ms", value / 1000.0),
        Unit::Ratio => format!("{value:.2}"),
        _ => format!("{} {}", short(value), unit.symbol()),
    }
}

/// Three digits that count.
pub fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

fn line(text: &mut String, fields: &[String]) {
    let _ = writeln!(text, "| {} |", fields.join(" | "));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Direction;
    use crate::record::Series;

    fn table() -> Table {
        let mut table = Table {
            name: "empty".to_owned(),
            date: "2026-11-21".to_owned(),
            gaur: "0123456789ab".to_owned(),
            load_average: [0.5, 0.25, 0.125],
            rounds: 3,
            ..Table::default()
        };
        for (cluster, gaur) in [("64K", 30_000.0), ("2M", 12_000.0)] {
            let mut cell = Cell::new(Unit::Iops, &[("cluster", cluster)]);
            for (who, figure) in [("gaur", gaur), ("qemu", 10_000.0)] {
                cell.series.push(Series {
                    who: who.to_owned(),
                    samples: vec![figure; 3],
                    ..Series::default()
                });
            }
            cell.expect_ratio("gaur", "qemu", 1.5);
            table.cells.push(cell);
        }
        table
    }

    #[test]
    fn a_section_shows_every_cell_and_its_verdict() {
        let plots = [("Speed".to_owned(), "plots/empty.svg".to_owned())];
        let text = section(&table(), &plots);
        assert!(
            text.contains("| cluster | gaur, kIOPS | qemu, kIOPS | gaur / qemu | target | notes |")
        );
        assert!(
            text.contains("| 64K | 30.0 | 10.0 | 3.00 | at least 1.50: met |  |"),
            "{text}"
        );
        assert!(
            text.contains("| 2M | 12.0 | 10.0 | 1.20 | at least 1.50: **missed by 20 %** |  |")
        );
        assert!(text.contains("Load average of the machine before it began: 0.50"));
        assert!(text.ends_with("![Speed](plots/empty.svg)\n"));
    }

    #[test]
    fn the_overview_names_the_worst_cell() {
        let record = Record {
            tables: vec![table()],
            ..Record::default()
        };
        let text = overview(&record);
        let expected = "| empty | gaur / qemu | at least 1.50 | 1.20 (2M) | in 1 of 2 cells; worst **missed by 20 %** |";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn unmeasured_target_is_not_met() {
        let verdict = Verdict::new("x", Unit::Ratio, f64::NAN, Direction::AtLeast, 1.0);
        assert_eq!(
            verdict_text(&verdict),
            "x: -, target at least 1.00: **not measured**"
        );
    }
}
