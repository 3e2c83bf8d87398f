//! How long a client's writes take while a snapshot is made, and deleted, under it.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, anyhow};

use super::{Bench, create_mapped, row};
use crate::client::{self, Sample};
use crate::process::{Server, qemu_img, timed};
use crate::record::{Cell, Direction, Table, Unit, Verdict};
use crate::statistics::range;

/// Size of the disk in GiB; all of it is mapped.
const DISK_GIB: u64 = 256;
/// Requests that the client has in flight.
const DEPTH: u32 = 4;
/// The share of writes that may take longer.
const PERCENTILE: f64 = 99.9;
/// Longest time for the others, in milliseconds.
const TARGET_MS: f64 = 50.0;

/// Writes 4 KiB at random over all of the disk while snapshots are made and deleted.
pub fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    table.notes.push(format!(
        "`gaur serve` with an image of {DISK_GIB} GiB on a disk, all mapped, past the host's cache; a client writes \
         4 KiB at random over NBD, {DEPTH} requests at a time. Times of the writes that ended while the \
         snapshot was made or deleted, and of writes beside nothing."
    ));
    let dir = &bench.arguments.dir;
    let image = dir.join("online.qcow2");
    create_mapped(&image, DISK_GIB)?;
    let [socket, control] = ["nbd.sock", "control.sock"].map(|name| dir.join(name));
    let mut command = Command::new(&bench.gaur);
    command.args(["serve", "--format=qcow2", "--cache=none", "--shared=4"]);
    command.arg("--control").arg(&control);
    let server = Server::nbd(command, &image, &socket)?;
    let mut rows: Vec<Cell> = ["nothing", "create", "delete"]
        .iter()
        .map(|what| {
            row(
                &format!("a client's writes beside {what}"),
                Unit::Milliseconds,
            )
        })
        .collect();
    let mut took = row("the command itself", Unit::Seconds);
    for _ in 0..bench.arguments.rounds {
        for (row, verb) in rows.iter_mut().zip(["nothing", "create", "delete"]) {
            let (samples, seconds) = beside(&socket, || act(bench, &control, verb))?;
            row.add("median", percentile(&samples, 50.0));
            row.add("99.9 %", percentile(&samples, PERCENTILE));
            row.add("longest", percentile(&samples, 100.0));
            row.add("writes", samples.len() as f64);
            if verb != "nothing" {
                took.add(verb, seconds);
            }
        }
    }
    server.stop()?;
    timed(qemu_img(&["check", "-q"]).arg(&image))?;
    std::fs::remove_file(image)?;
    for row in rows.iter_mut().skip(1) {
        let series = row.series("99.9 %");
        let (_, worst) = range(series.map_or(&[], |series| &series.samples));
        row.verdicts.push(Verdict::new(
            "99.9 %, the worst round",
            Unit::Milliseconds,
            worst,
            Direction::AtMost,
            TARGET_MS,
        ));
    }
    table.cells.extend(rows);
    table.cells.push(took);
    Ok(())
}

fn act(bench: &Bench, control: &Path, verb: &str) -> Result<f64> {
    if verb == "nothing" {
        std::thread::sleep(std::time::Duration::from_secs(1));
        return Ok(1.0);
    }
    let mut command = Command::new(&bench.gaur);
    command.args(["snapshot", verb, "--control"]);
    timed(command.arg(control).arg("wanted"))
}

/// The writes that ended while `action` ran, and what it says.
fn beside(socket: &Path, action: impl FnOnce() -> Result<f64>) -> Result<(Vec<Sample>, f64)> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| client::timed_writes(socket, DISK_GIB << 30, DEPTH, &stop));
        // The client is under way, and what it allocates at first is done.
        std::thread::sleep(std::time::Duration::from_millis(500));
        let start = std::time::Instant::now();
        let said = action();
        let end = std::time::Instant::now();
        // Requests that were held up complete before the client stops.
        std::thread::sleep(std::time::Duration::from_millis(300));
        stop.store(true, Ordering::Relaxed);
        let samples = client
            .join()
            .map_err(|_| anyhow!("the client panicked"))??;
        let during = |sample: &Sample| sample.end >= start && sample.begin <= end;
        Ok((samples.into_iter().filter(during).collect(), said?))
    })
}

/// Milliseconds within which so many percent of the writes were done.
fn percentile(samples: &[Sample], percent: f64) -> f64 {
    let mut times: Vec<f64> = samples
        .iter()
        .map(|sample| (sample.end - sample.begin).as_secs_f64() * 1000.0)
        .collect();
    times.sort_by(f64::total_cmp);
    let rank = (percent / 100.0 * times.len() as f64).ceil() as usize;
    times.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
}
