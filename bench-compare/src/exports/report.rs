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
    /// In words.
    cells: &'static str,
    counts: fn(&Cell) -> bool,
}

const GOALS: &[Goal<'static>] = &[
    Goal {
        over: "gaur ublk",
        under: "qemu-nbd",
        at_least: 4.2,
        cells: "random 4 KiB reads and writes at depth 64",
        counts: |cell| cell.depth == 64 && matches!(cell.load.as_str(), "randread" | "randwrite"),
    },
    Goal {
        over: "gaur ublk",
        under: "rublk",
        at_least: 1.1,
        cells: "every cell",
        counts: |_| true,
    },
    Goal {
        over: "gaur ublk, direct",
        under: "rublk",
        at_least: 1.1,
        cells: "every cell",
        counts: |_| true,
    },
    Goal {
        over: "gaur ublk",
        under: "gaur ublk, raw",
        at_least: 0.85,
        cells: "the full image",
        counts: |cell| cell.image == "full",
    },
    Goal {
        over: "gaur NBD",
        under: "qemu-nbd",
        at_least: 2.5,
        cells: "random 4 KiB requests at depth 64",
        counts: |cell| cell.depth == 64 && !cell.is_sequential(),
    },
    Goal {
        over: "gaur NBD",
        under: "qsd NBD",
        at_least: 1.0,
        cells: "every cell",
        counts: |_| true,
    },
    Goal {
        over: "gaur VDUSE",
        under: "qsd VDUSE",
        at_least: 1.0,
        cells: "every cell",
        counts: |_| true,
    },
    Goal {
        over: "gaur FUSE",
        under: "qsd FUSE",
        at_least: 1.0,
        cells: "every cell",
        counts: |_| true,
    },
    Goal {
        over: "gaur vhost-user",
        under: "qsd vhost-user",
        at_least: 1.0,
        cells: "every cell",
        counts: |_| true,
    },
];

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
        Some(Goal {
            over,
            under: &series.who,
            at_least: NO_SLOWER,
            cells: "every cell",
            counts: |_| true,
        })
    });
    older.collect()
}

fn goals(record: &Record) -> String {
    let mut text = "| | over | in | target | met in | mean | least, in |\n".to_owned();
    text += "|---|---|---|---|---|---|---|\n";
    for goal in no_slower(record).iter().chain(GOALS) {
        let ratios: Vec<(f64, &Cell)> = record
            .cells
            .iter()
            .filter(|cell| (goal.counts)(cell))
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
            goal.cells,
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
