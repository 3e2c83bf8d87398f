//! Table `scaling`: two threads with a queue each on one image in memory, against one thread.
//!
//! The targets are for the engine alone, on an image in this process's memory that answers at once:
//! a file system in memory lets one thread at a time write to a file, in any program. How two
//! `gaur bench` threads do on such a file stands beside, and so does the raw file: what that does not
//! reach is the machine's part.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, anyhow};
use gaur_bench::engine;

use crate::engine::images::{Scratch, Shape, create_full_raw};
use crate::engine::load::{GaurOptions, Load, Run};
use crate::engine::suite::{DISK, Progress, Suite};
use crate::engine::turns::{Contestant, settle, take_turns, warm_memory};
use crate::record::{Cell, Unit};

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
        subclusters,
        ..Shape::standard(64 << 10, DISK.size_bytes)
    };
    create_full_raw(&raw, DISK.size_bytes)?;
    shape(false).create_full(&image)?;
    let kept = || Ok(());
    let reads = |image| Load::scattered(image, "qcow2", DISK, suite.requests(READS));
    let raw_reads = Load {
        format: "raw",
        ..reads(raw.as_path())
    };
    engine_alone(suite, progress)?;
    progress.push(measure(suite, "reads, raw file", &raw_reads, &kept, None)?);
    let load = reads(&image);
    progress.push(measure(suite, "mapped reads", &load, &kept, None)?);
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
        progress.push(measure(suite, name, &load, &prepare, None)?);
    }
    Ok(())
}

/// The loads of `gaur-bench`, without a host.
fn engine_alone(suite: &Suite, progress: &mut Progress) -> Result<()> {
    let time = Duration::from_secs_f64(if suite.quick { 0.5 } else { 2.0 });
    let loads = [
        ("mapped reads", engine::Load::Read, Some(MAPPED_READS)),
        ("mapped writes", engine::Load::Write, None),
        (
            "allocating writes in order",
            engine::Load::AllocateInOrder,
            Some(ALLOCATING_WRITES),
        ),
        (
            "allocating writes at random",
            engine::Load::AllocateAtRandom,
            Some(ALLOCATING_WRITES),
        ),
    ];
    for subclusters in [false, true] {
        for (name, load, bound) in loads {
            let run = |threads| -> Result<Run> {
                let rate = engine::measure(load, subclusters, threads as u64, time);
                let rate = rate.map_err(|failure| anyhow!("{name}: {failure}"))?;
                Ok(Run::of(rate))
            };
            let with = if subclusters { ", subclusters" } else { "" };
            let label = format!("{name}{with}; engine alone");
            progress.push(cell(suite, &label, run, bound)?);
        }
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
    cell(
        suite,
        name,
        |threads| {
            prepare()?;
            settle(load.image)?;
            let beyond = GaurOptions {
                random_seed: Some(1),
                threads,
            };
            load.by_gaur(&suite.gaur, beyond)
        },
        bound,
    )
}

fn cell(
    suite: &Suite,
    name: &str,
    run: impl Fn(usize) -> Result<Run>,
    bound: Option<f64>,
) -> Result<Cell> {
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
