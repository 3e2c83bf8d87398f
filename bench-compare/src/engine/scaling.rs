//! Table `scaling`: two threads with a queue each on one image in memory, against one thread.
//!
//! Two threads on two processors are slower than twice one thread even where they share nothing, so
//! the raw file stands beside: what it does not reach is the machine's part.

use std::path::Path;

use anyhow::Result;

use crate::engine::images::{Scratch, Shape, create_full_raw};
use crate::engine::load::{Beyond, Load, Run};
use crate::engine::record::{Cell, Unit};
use crate::engine::suite::{DISK, Progress, Suite};
use crate::engine::turns::{Contestant, settle, take_turns, warm_memory};

const READS: u64 = 1_000_000;
const WRITES: u64 = 65_536;

/// Two threads over one: reads of mapped clusters, writes that allocate.
const MAPPED_READS: f64 = 1.8;
const ALLOCATING_WRITES: f64 = 1.5;

/// Measures all cells.
pub fn two_threads(suite: &Suite, progress: &mut Progress) -> Result<()> {
    let scratch = Scratch::new(&suite.memory)?;
    let (image, raw) = (scratch.path("image.qcow2"), scratch.path("full.raw"));
    let shape = |subclusters| Shape {
        cluster_bytes: 64 << 10,
        subclusters,
        size_bytes: DISK.size_bytes,
        backing: None,
    };
    create_full_raw(&raw, DISK.size_bytes)?;
    shape(false).create_full(&image)?;
    let kept = || Ok(());
    let reads = |image| Load::scattered(image, "qcow2", DISK, suite.requests(READS));
    let raw_reads = Load {
        format: "raw",
        ..reads(raw.as_path())
    };
    progress.push(measure(suite, "reads, raw file", &raw_reads, &kept, None)?);
    let bound = Some(MAPPED_READS);
    progress.push(measure(
        suite,
        "mapped reads",
        &reads(&image),
        &kept,
        bound,
    )?);
    std::fs::remove_file(&image)?;

    let raw_writes = Load {
        format: "raw",
        ..load_of_writes(suite, &raw)
    };
    progress.push(measure(
        suite,
        "writes, raw file",
        &raw_writes,
        &kept,
        None,
    )?);
    for (name, subclusters) in [
        ("allocating writes", false),
        ("allocating writes, subclusters", true),
    ] {
        let prepare = || {
            shape(subclusters).create(&image)?;
            warm_memory(&image, suite.requests(WRITES) * 4096 + (16 << 20))
        };
        let load = load_of_writes(suite, &image);
        let bound = Some(ALLOCATING_WRITES);
        progress.push(measure(suite, name, &load, &prepare, bound)?);
    }
    Ok(())
}

fn load_of_writes<'a>(suite: &Suite, image: &'a Path) -> Load<'a> {
    Load::scattered(image, "qcow2", DISK, suite.requests(WRITES)).writes()
}

fn measure(
    suite: &Suite,
    name: &str,
    load: &Load,
    prepare: &dyn Fn() -> Result<()>,
    bound: Option<f64>,
) -> Result<Cell> {
    let run = |threads| -> Result<Run> {
        prepare()?;
        settle(load.image)?;
        let beyond = Beyond {
            random_seed: Some(1),
            threads,
        };
        load.by_gaur(&suite.gaur, beyond)
    };
    let mut cell = Cell::new(Unit::Iops, &[("requests", name)]);
    let mut contestants = [
        Contestant::new("two threads", || run(2)),
        Contestant::new("one thread", || run(1)),
    ];
    take_turns(&mut cell, suite.rounds, &mut contestants)?;
    match bound {
        Some(bound) => cell.expect_ratio("two threads", "one thread", bound),
        None => {
            let (ratio, _) = cell.ratio("two threads", "one thread").unwrap_or_default();
            cell.notes
                .push(format!("{ratio:.2} times one thread, no target"));
        }
    }
    Ok(cell)
}
