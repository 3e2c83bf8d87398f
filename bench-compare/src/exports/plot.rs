//! Plots of the tables: a group of bars for each load, at depth 64 and with two jobs.

use std::path::Path;

use anyhow::Result;

use super::record::{Cell, Record};
use crate::engine::plot::Plot;
use crate::statistics::median;

const LOADS: &[(&str, &str)] = &[
    ("randread", "4K read"),
    ("randwrite", "4K write"),
    ("mix", "4K 70/30"),
];

/// What a plot compares.
const PLOTS: &[(&str, &str, &[&str])] = &[
    (
        "exports-one-engine",
        "one engine behind every export",
        &[
            "gaur ublk",
            "gaur VDUSE",
            "gaur vhost-user",
            "gaur NBD",
            "gaur FUSE",
        ],
    ),
    (
        "exports-kernel",
        "block devices of the kernel",
        &[
            "gaur ublk, raw",
            "gaur ublk",
            "rublk",
            "gaur VDUSE",
            "qsd VDUSE",
            "gaur NBD",
            "qemu-nbd",
        ],
    ),
    (
        "exports-others",
        "the same export, two engines",
        &[
            "gaur NBD",
            "qsd NBD",
            "gaur FUSE",
            "qsd FUSE",
            "gaur vhost-user",
            "qsd vhost-user",
        ],
    ),
];

/// Draws all plots of a record into a folder.
pub fn draw_all(record: &Record, folder: &Path) -> Result<()> {
    for (name, title, who) in PLOTS {
        for image in ["full", "empty"] {
            let plot = of(record, image, title, who);
            if plot
                .bars
                .iter()
                .any(|(_, values)| values.iter().any(Option::is_some))
            {
                plot.draw(&folder.join(format!("{name}-{image}.svg")))?;
            }
        }
    }
    Ok(())
}

fn of(record: &Record, image: &str, title: &str, who: &[&str]) -> Plot {
    let find = |load: &str| {
        let suits = |cell: &&Cell| {
            cell.image == image && cell.load == load && cell.depth == 64 && cell.jobs == 2
        };
        record.cells.iter().find(suits)
    };
    let value = |load: &str, who: &str| {
        let iops = median(find(load)?.iops(who));
        (iops.is_finite() && iops > 0.0).then_some(iops / 1000.0)
    };
    Plot {
        title: format!("{title}: {image} image, depth 64, two jobs"),
        unit: "thousand requests a second".to_owned(),
        groups: LOADS.iter().map(|(_, label)| (*label).to_owned()).collect(),
        bars: who
            .iter()
            .map(|who| {
                let values = LOADS.iter().map(|(load, _)| value(load, who)).collect();
                ((*who).to_owned(), values)
            })
            .collect(),
        ..Plot::default()
    }
}
