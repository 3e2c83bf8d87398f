//! Tables `memory` and `disk`: random reads and writes of 4 KiB of a full image whose tables are all in
//! the cache, past the host's cache. What is left is the engine's own work for each request, so fio
//! with its io_uring engine on the raw file stands beside.

use anyhow::Result;

use crate::engine::images::{Scratch, Shape, create_full_raw};
use crate::engine::load::{Aio, DEPTH, L2Cache, Load, REQUEST_BYTES, Run};
use crate::engine::suite::{DISK, Progress, Suite};
use crate::engine::turns::{Comparison, Contestant, settle};
use crate::record::{Cell, Unit};
use crate::{fio, nbd};

const CLUSTER_BYTES: u64 = 64 << 10;

/// What a table is about.
struct TableSpec {
    requests: u64,
    /// Gaur over `qemu-img bench`, where that is a target.
    over_qemu: Option<f64>,
    /// Gaur over fio on the raw file.
    over_fio: f64,
}

/// The image lies in memory.
pub fn in_memory(suite: &Suite, progress: &mut Progress) -> Result<()> {
    let place = TableSpec {
        requests: 400_000,
        over_qemu: Some(2.5),
        over_fio: 0.85,
    };
    measure(suite, progress, &Scratch::new(&suite.memory)?, &place)
}

/// The image lies on a disk.
pub fn on_disk(suite: &Suite, progress: &mut Progress) -> Result<()> {
    let place = TableSpec {
        requests: 150_000,
        over_qemu: None,
        over_fio: 0.95,
    };
    measure(suite, progress, &Scratch::new(&suite.disk)?, &place)
}

fn measure(
    suite: &Suite,
    progress: &mut Progress,
    scratch: &Scratch,
    place: &TableSpec,
) -> Result<()> {
    let (image, raw) = (scratch.path("full.qcow2"), scratch.path("full.raw"));
    let shape = Shape::standard(CLUSTER_BYTES, DISK.size_bytes);
    shape.create_full(&image)?;
    create_full_raw(&raw, DISK.size_bytes)?;
    settle(&image)?;
    for write in [false, true] {
        let load = Load {
            write,
            l2_cache: Some(L2Cache {
                size_bytes: DISK.size_bytes / CLUSTER_BYTES * 8,
                entry_bytes: CLUSTER_BYTES,
            }),
            ..Load::scattered(&image, "qcow2", DISK, suite.requests(place.requests))
        };
        let by_fio = || {
            settle(&raw)?;
            let load = nbd::Load {
                write,
                depth: DEPTH,
                connections: 1,
                size_bytes: DISK.size_bytes,
            };
            let seconds = if suite.quick { 1 } else { 3 };
            fio::on_file(&raw, true, load, seconds).map(Run::of)
        };
        let labels = [("random, 4 KiB", if write { "write" } else { "read" })];
        let mut cell = Cell::new(Unit::Iops, &labels);
        let same_way = || qemu_like_us(&load);
        let others = vec![
            Contestant::new("qemu, io_uring", same_way),
            Contestant::new("gaur, random", || suite.gaur_random(&load)),
            Contestant::new("fio, raw file", by_fio),
        ];
        let duel = Comparison::on_a_kept_image(&load);
        duel.run(&mut cell, suite, others)?;
        if let Some(bound) = place.over_qemu {
            cell.expect_ratio("gaur", "qemu", bound);
            cell.expect_ratio("gaur", "qemu, io_uring", bound);
        }
        cell.expect_ratio("gaur, random", "fio, raw file", place.over_fio);
        progress.push(cell);
    }
    debug_assert_eq!(REQUEST_BYTES, 4096, "fio's runs are of 4 KiB");
    Ok(())
}

/// QEMU through io_uring, which is Gaur's way, whichever of its ways is fastest here.
fn qemu_like_us(load: &Load) -> Result<Run> {
    let run = load.by_qemu(Aio::IoUring)?;
    run.ok_or_else(|| anyhow::anyhow!("qemu-img bench crashes with aio=io_uring"))
}
