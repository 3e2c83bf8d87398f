//! The section of the page on performance.

use std::fmt::Write;

use super::load::block_bytes;
use super::record::{BEFORE, Cell, Record};
use crate::statistics::{NO_SLOWER, geometric_mean, median};

/// A target: one contestant over another, in the cells that count.
struct Goal<'a> {
    over: &'a str,
    under: &'a str,
    at_least: f64,
    cells: Cells,
}

/// Which cells count, in words and as a test.
type Cells = (&'static str, fn(&Cell) -> bool);

const EVERY: Cells = ("every cell", |_| true);
const FULL: Cells = ("the full image", |cell| cell.image == "full");
const RANDOM_DEEP: Cells = ("random 4 KiB requests at depth 64", |cell| {
    cell.depth == 64 && !cell.is_sequential()
});
const UNMIXED_DEEP: Cells = ("random 4 KiB reads and writes at depth 64", |cell| {
    cell.depth == 64 && matches!(cell.load.as_str(), "randread" | "randwrite")
});

const GOALS: &[Goal<'static>] = &[
    goal("gaur ublk", "qemu-nbd", 4.2, UNMIXED_DEEP),
    goal("gaur ublk", "rublk", 1.1, EVERY),
    goal("gaur ublk, direct", "rublk", 1.1, EVERY),
    goal("gaur ublk", "gaur ublk, raw", 0.85, FULL),
    goal("gaur NBD", "qemu-nbd", 2.5, RANDOM_DEEP),
    goal("gaur NBD", "qsd NBD", 1.0, EVERY),
    goal("gaur VDUSE", "qsd VDUSE", 1.0, EVERY),
    goal("gaur FUSE", "qsd FUSE", 1.0, EVERY),
    goal("gaur vhost-user", "qsd vhost-user", 1.0, EVERY),
];

const fn goal<'a>(over: &'a str, under: &'a str, at_least: f64, cells: Cells) -> Goal<'a> {
    Goal {
        over,
        under,
        at_least,
        cells,
    }
}

/// All tables as Markdown.
pub fn section(record: &Record) -> String {
    let host = &record.host;
    let mut text = format!(
        "Measured on {} at {}, in a guest (User-Mode Linux {}) with {} of {} processors ({}), host kernel {}. {}.\n\n",
        record.date,
        host.gaur,
        record.guest_kernel,
        record.guest_processors,
        host.processors,
        host.processor,
        host.kernel,
        record.peers.join(", "),
    );
    let _ = write!(
        text,
        "A disk of {} MiB on {}, {} s for each measurement, {} rounds in turn; medians.",
        record.size_mib,
        record.store,
        record.seconds,
        rounds(record),
    );
    for note in &record.notes {
        let _ = write!(text, " {note}");
    }
    text += "\n\n";
    text += &goals(record);
    for image in ["full", "empty"] {
        text += &table(record, image);
    }
    text
}

fn rounds(record: &Record) -> usize {
    let counts = record.cells.iter().flat_map(|cell| &cell.series);
    counts.map(|series| series.iops.len()).max().unwrap_or(0)
}

/// Every contestant that an older Gaur was measured beside is to be no slower.
fn no_slower(record: &Record) -> Vec<Goal<'_>> {
    let series = record.cells.first().map_or(&[][..], |cell| &cell.series);
    let older = series.iter().filter_map(|series| {
        let over = series.who.strip_suffix(BEFORE)?;
        Some(goal(over, &series.who, NO_SLOWER, EVERY))
    });
    older.collect()
}

fn goals(record: &Record) -> String {
    let mut text = "| | over | in | target | met in | mean | least, in |\n".to_owned();
    text += "|---|---|---|---|---|---|---|\n";
    for goal in no_slower(record).iter().chain(GOALS) {
        let (cells, counts) = goal.cells;
        let ratios: Vec<(f64, &Cell)> = record
            .cells
            .iter()
            .filter(|cell| counts(cell))
            .filter_map(|cell| Some((cell.ratio(goal.over, goal.under)?, cell)))
            .collect();
        let Some((least, worst)) = ratios.iter().min_by(|a, b| a.0.total_cmp(&b.0)) else {
            continue;
        };
        let met = ratios
            .iter()
            .filter(|(ratio, _)| *ratio >= goal.at_least)
            .count();
        let values: Vec<f64> = ratios.iter().map(|(ratio, _)| *ratio).collect();
        let verdict = match met == ratios.len() {
            true => "met".to_owned(),
            false => format!("**{met} of {}**", ratios.len()),
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {verdict} | {:.2} | {least:.2}, {} |",
            goal.over,
            goal.under,
            cells,
            goal.at_least,
            geometric_mean(&values),
            label(worst, true),
        );
    }
    text + "\n"
}

fn label(cell: &Cell, with_image: bool) -> String {
    let load = match cell.load.as_str() {
        "randread" => "4K random read",
        "randwrite" => "4K random write",
        "mix" => "4K random 70/30",
        "read" => "512K read",
        _ => "512K write",
    };
    let image = match with_image {
        true => format!("{} image, ", cell.image),
        false => String::new(),
    };
    format!("{image}{load}, depth {}, jobs {}", cell.depth, cell.jobs)
}

fn table(record: &Record, image: &str) -> String {
    let cells: Vec<&Cell> = record
        .cells
        .iter()
        .filter(|cell| cell.image == image)
        .collect();
    let Some(first) = cells.first() else {
        return String::new();
    };
    let names: Vec<&str> = first
        .series
        .iter()
        .map(|series| series.who.as_str())
        .collect();
    let what = match image {
        "full" => "### Exports: an image that is full of data",
        _ => "### Exports: an empty image, made anew for each measurement",
    };
    let mut text =
        format!("{what}\n\nThousands of requests a second; MiB/s for 512 KiB requests.\n\n");
    let _ = writeln!(text, "| | {} |", names.join(" | "));
    let _ = writeln!(text, "|---|{}", "---|".repeat(names.len()));
    for cell in cells {
        let values = names.iter().map(|who| figure(cell, who));
        let values: Vec<String> = values.collect();
        let _ = writeln!(text, "| {} | {} |", label(cell, false), values.join(" | "));
    }
    text + "\n"
}

fn figure(cell: &Cell, who: &str) -> String {
    let iops = median(cell.iops(who));
    if !iops.is_finite() || iops == 0.0 {
        return "-".to_owned();
    }
    match cell.is_sequential() {
        true => format!(
            "{:.0}",
            iops * block_bytes(cell) as f64 / f64::from(1 << 20)
        ),
        false => format!("{:.1}", iops / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exports::record::Series;

    fn record() -> Record {
        let series = |who: &str, iops: f64| Series {
            who: who.to_owned(),
            iops: vec![iops, iops],
            p99_us: vec![],
        };
        let cell = |load: &str, ours: f64| Cell {
            image: "full".to_owned(),
            load: load.to_owned(),
            depth: 64,
            jobs: 1,
            series: vec![series("gaur ublk", ours), series("qemu-nbd", 1000.0)],
        };
        Record {
            cells: vec![
                cell("randread", 4200.0),
                cell("randwrite", 2000.0),
                cell("read", 10.0),
            ],
            ..Record::default()
        }
    }

    #[test]
    fn goals_say_where_they_are_missed_by_how_much() {
        let text = goals(&record());
        let expected = "| gaur ublk | qemu-nbd | random 4 KiB reads and writes at depth 64 | 4.2 | \
                        **1 of 2** | 2.90 | 2.00, full image, 4K random write, depth 64, jobs 1 |";
        assert!(text.contains(expected), "{text}");
        assert!(!text.contains("rublk"), "{text}");
    }

    #[test]
    fn sequential_requests_are_shown_in_mib() {
        let text = table(&record(), "full");
        assert!(
            text.contains("| 4K random read, depth 64, jobs 1 | 4.2 | 1.0 |"),
            "{text}"
        );
        assert!(
            text.contains("| 512K read, depth 64, jobs 1 | 5 | 500 |"),
            "{text}"
        );
        assert_eq!(table(&record(), "empty"), "");
    }
}
