//! Tables `overlay`, `overlay-disk` and `empty`: random writes of 4 KiB that allocate, per cluster size, without and
//! with subclusters, over a full backing image and over nothing.
//!
//! Requests go to places that were not written before, as far as the disk has so many: there are no
//! more of them than clusters (or subclusters), and no more than copying them takes a moment.

use std::path::Path;

use anyhow::Result;

use crate::engine::images::{Scratch, Shape, create_full_raw, short_size};
use crate::engine::load::Load;
use crate::engine::suite::{DISK, Progress, Suite};
use crate::engine::turns::{Comparison, Contestant, Qemu};
use crate::record::{Cell, Unit};

/// Cluster sizes of the tables, as powers of two: 16 KiB to 2 MiB.
pub const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 14..=21;

const REQUESTS_MAX: u64 = 65_536;

/// Every cell is to be so many times as fast as QEMU.
const EVERY_CELL: f64 = 1.5;

/// And their geometric mean.
const MEAN: f64 = 3.0;

/// Subclusters of 4 KiB need no copy at all; this much of a raw file's speed is to be left.
const OF_RAW: f64 = 0.7;

/// Random writes to an empty overlay with a full backing image.
pub fn overlay(suite: &Suite, progress: &mut Progress) -> Result<()> {
    overlay_in(suite, progress, &suite.memory, 512 << 20)
}

/// The same on a disk.
pub fn overlay_on_disk(suite: &Suite, progress: &mut Progress) -> Result<()> {
    overlay_in(suite, progress, &suite.disk, 256 << 20)
}

fn overlay_in(suite: &Suite, progress: &mut Progress, folder: &Path, bytes_max: u64) -> Result<()> {
    let scratch = Scratch::new(folder)?;
    let base = scratch.path("base.qcow2");
    let shape = Shape::standard(64 << 10, DISK.size_bytes);
    shape.create_full(&base)?;
    shape.verify_full(&base)?;
    every_cluster_size(suite, progress, &scratch, Some(&base), bytes_max)
}

/// Random writes to an empty image without backing image.
pub fn empty(suite: &Suite, progress: &mut Progress) -> Result<()> {
    let scratch = Scratch::new(&suite.memory)?;
    every_cluster_size(suite, progress, &scratch, None, 1 << 30)?;
    let cells = &progress.table().cells;
    let ours: Vec<f64> = cells.iter().map(|cell| cell.median("gaur")).collect();
    let (slowest, fastest) = crate::statistics::range(&ours);
    let what = "gaur: slowest cluster size / fastest";
    progress.table().expect_ratio(what, slowest / fastest, 0.5);
    Ok(())
}

fn every_cluster_size(
    suite: &Suite,
    progress: &mut Progress,
    scratch: &Scratch,
    backing: Option<&Path>,
    bytes_max: u64,
) -> Result<()> {
    let raw = scratch.path("full.raw");
    create_full_raw(&raw, DISK.size_bytes)?;
    for subclusters in [false, true] {
        for bits in CLUSTER_BITS {
            let shape = Shape {
                cluster_bytes: 1 << bits,
                subclusters,
                size_bytes: DISK.size_bytes,
                backing,
            };
            let raw = (shape.unit_bytes() == 4096 && subclusters).then_some(raw.as_path());
            let cell = measure(suite, &shape, &scratch.path("image.qcow2"), raw, bytes_max)?;
            progress.push(cell);
        }
    }
    let table = progress.table();
    let mean = table.mean_ratio("gaur", "qemu");
    table.expect_ratio("gaur / qemu, geometric mean of all cells", mean, MEAN);
    let is_beside_raw = |cell: &&Cell| cell.series("raw by qemu").is_some();
    if let Some(cell) = table.cells.iter().find(is_beside_raw).cloned() {
        for raw in ["raw by qemu", "raw by gaur"] {
            let ratio = cell.ratio("gaur", raw);
            let what = format!("128K/4K: gaur / {raw}, allocated writes");
            table.expect_ratio(what, ratio.map_or(f64::NAN, |(median, _)| median), OF_RAW);
        }
    }
    Ok(())
}

/// One cell; with `raw`, writes to that allocated raw file stand beside.
fn measure(
    suite: &Suite,
    shape: &Shape,
    image: &Path,
    raw: Option<&Path>,
    bytes_max: u64,
) -> Result<Cell> {
    let unit = shape.unit_bytes();
    let most = (shape.size_bytes / unit).min(bytes_max / unit);
    let requests = suite.requests(most.min(REQUESTS_MAX));
    let load = Load::scattered(image, "qcow2", DISK, requests).writes();
    let size = short_size(shape.cluster_bytes);
    let subcluster = if shape.subclusters {
        short_size(unit)
    } else {
        "-".to_owned()
    };
    let mut cell = Cell::new(
        Unit::Iops,
        &[
            ("cluster", &size),
            ("subcluster", &subcluster),
            ("requests", &requests.to_string()),
        ],
    );
    let duel = Comparison {
        load: &load,
        prepare: &|| shape.create(image),
        // All clusters that are met, and tables.
        memory_bytes: if image.starts_with(&suite.disk) {
            0
        } else {
            requests * unit.max(4096) + (16 << 20)
        },
    };
    let raw_load = raw.map(|raw| Load::scattered(raw, "raw", DISK, REQUESTS_MAX).writes());
    let mut others = Vec::new();
    if let Some(raw_load) = &raw_load {
        let mut qemu = Qemu::try_all(|aio| raw_load.by_qemu(aio))?;
        let by_qemu = move || qemu.run(|aio| raw_load.by_qemu(aio));
        others.push(Contestant::new("raw by qemu", by_qemu));
        others.push(Contestant::new("raw by gaur", || suite.gaur(raw_load)));
    }
    duel.run(&mut cell, suite, others)?;
    std::fs::remove_file(image)?;
    cell.expect_ratio("gaur", "qemu", EVERY_CELL);
    Ok(cell)
}
