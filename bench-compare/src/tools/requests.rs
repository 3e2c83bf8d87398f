//! Requests to images with a feature, beside qemu-img's and beside our own without it: encryption, bitmaps, depth.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::{Bench, GAUR, QEMU, remove, words};
use crate::fio;
use crate::process::{Server, qemu_img, succeed};
use crate::record::{Cell, Table, Unit};
use crate::snapshot::{create_mapped, row};

/// A contestant and its command line.
type Contestant<'a> = (&'a str, Vec<PathBuf>);

impl Bench {
    /// Adds a row of several contestants, each of which sends the same requests; the second's time by the first's is
    /// to be `bound` at least.
    fn race(
        &self,
        table: &mut Table,
        (what, bound): (&str, f64),
        contestants: &[Contestant<'_>],
        mut prepare: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut row = row(what, Unit::Seconds);
        for _ in 0..self.arguments.rounds {
            for (who, line) in contestants {
                prepare()?;
                row.add(who, self.bench_seconds(who, line)?);
            }
        }
        if let [(first, _), (second, _)] = contestants {
            row.expect_ratio(second, first, bound);
        }
        table.cells.push(row);
        Ok(())
    }

    /// Requests a second over NBD to an image that `opened` names, from our server and from qemu-nbd.
    fn served(&self, what: &str, kind: &str, bytes: u64, opened: &[PathBuf]) -> Result<Cell> {
        let mut row = row(what, Unit::Iops);
        let socket = self.path("socket");
        let Some((image, options)) = opened.split_last() else {
            return Ok(row);
        };
        for _ in 0..self.arguments.rounds {
            for who in [GAUR, QEMU] {
                let mut command = match who {
                    GAUR => Command::new(&self.gaur),
                    _ => Command::new("qemu-nbd"),
                };
                if who == GAUR {
                    command.arg("serve");
                }
                command.args(options).arg("--cache=writeback");
                let server = Server::nbd(command, image, &socket)?;
                row.add(who, fio_over_nbd(&socket, kind, bytes)?);
                drop(server);
            }
        }
        row.expect_ratio(GAUR, QEMU, 1.5);
        Ok(row)
    }

    /// What `bench` says the requests have taken: without the start, and without the time that a key costs.
    fn bench_seconds(&self, who: &str, line: &[PathBuf]) -> Result<f64> {
        let who = if who == QEMU { QEMU } else { GAUR };
        let line: Vec<_> = line.iter().map(|word| word.as_os_str()).collect();
        let printed = succeed(&mut self.call(who, &line))?;
        let seconds = printed
            .lines()
            .find_map(|line| line.strip_prefix("Run completed in "))
            .and_then(|rest| rest.split(' ').next())
            .and_then(|number| number.parse().ok());
        seconds.ok_or_else(|| anyhow::anyhow!("{who} bench has not said how long it took"))
    }
}

/// The requests of a row: how many, and how long each is.
fn requests(kind: &str, bytes: u64, count: u64) -> Vec<PathBuf> {
    let write = if kind == "writes" { " -w" } else { "" };
    words(&format!("bench{write} -q -d 64 -s {bytes} -c {count}"))
}

/// The same line with O_DIRECT; its last word is a list of options.
fn past_the_cache(mut line: Vec<PathBuf>) -> Vec<PathBuf> {
    if let Some(last) = line.last_mut() {
        last.as_mut_os_string().push(",cache.direct=on");
    }
    line
}

/// Requests a second of fio, at random over the first GiB.
fn fio_over_nbd(socket: &Path, kind: &str, bytes: u64) -> Result<f64> {
    let side = kind.trim_end_matches('s');
    let mut command = Command::new("fio");
    command
        .args(["--name=bench", "--thread", "--ioengine=nbd", "--iodepth=32"])
        .args(["--time_based", "--runtime=4", "--size=1g", "--norandommap"])
        .arg(format!("--uri=nbd+unix:///?socket={}", socket.display()))
        .arg(format!("--rw=rand{side}"))
        .arg(format!("--bs={bytes}"));
    let iops = fio::job(&mut command)?[side]["iops"].as_f64();
    iops.context("fio says nothing about requests a second")
}

/// AES-256 in xts mode beside qemu-nbd, and beside an image without encryption.
pub fn encryption(bench: &Bench, table: &mut Table) -> Result<()> {
    const MIB: u64 = 1024;
    table.notes.push(format!(
        "LUKS, aes-256-xts, a mapped disk of {MIB} MiB in the host's cache. Beside qemu-nbd: fio over NBD, at random, 32 requests at a time, requests a second. Beside ourselves: 64 requests at a time, one after the other, seconds that \
         `bench` reports."
    ));
    let (key, image, plain) = (
        bench.path("key"),
        bench.path("luks.qcow2"),
        bench.path("plain.qcow2"),
    );
    std::fs::write(&key, "bench")?;
    let object = format!("secret,id=k,file={}", key.display());
    let mut create = qemu_img(&["create", "-q", "-f", "qcow2", "--object", &object, "-o"]);
    create.arg("encrypt.format=luks,encrypt.key-secret=k,encrypt.iter-time=10,preallocation=full");
    succeed(create.arg(&image).arg(format!("{MIB}M")))?;
    let mut create = qemu_img(&["create", "-q", "-f", "qcow2", "-o", "preallocation=full"]);
    succeed(create.arg(&plain).arg(format!("{MIB}M")))?;
    let options = |image: &Path| format!("driver=qcow2,file.filename={}", image.display());
    let encrypted = format!("{},encrypt.key-secret=k", options(&image));
    let opened = words(&format!("--object {object} --image-opts {encrypted}"));
    for (bytes, count) in [(4096, MIB << 8), (512 << 10, MIB << 2)] {
        for kind in ["reads", "writes"] {
            let name = format!("{kind} of {} KiB", bytes >> 10);
            table.cells.push(bench.served(&name, kind, bytes, &opened)?);
            if bytes > 4096 {
                let line = requests(kind, bytes, count);
                let luks = [line.clone(), opened.clone()].concat();
                let plain = [line, words(&format!("--image-opts {}", options(&plain)))].concat();
                let both = [("encrypted", luks.clone()), ("plain", plain)];
                let what = format!("{name}, encrypted and not");
                bench.race(table, (&what, 0.85), &both, || Ok(()))?;
                let direct = both.map(|(who, line)| (who, past_the_cache(line)));
                let what = format!("{what}, O_DIRECT");
                bench.race(table, (&what, 0.85), &direct, || Ok(()))?;
                let two = [luks.clone(), words("--threads 2")].concat();
                let both = [("two threads", two), ("one", luks)];
                bench.race(
                    table,
                    (&format!("{name}, encrypted"), 1.8),
                    &both,
                    || Ok(()),
                )?;
            }
        }
    }
    remove(&image).and(remove(&plain))
}

/// A persistent bitmap that is kept, beside none.
pub fn bitmap(bench: &Bench, table: &mut Table) -> Result<()> {
    const MIB: u64 = 1024;
    table.notes.push(format!(
        "Writes of 4 KiB at random to a mapped disk of {MIB} MiB in the host's cache, 64 at a time, with one bitmap of \
         64 KiB granularity and without. The first touch is that of a bitmap that is clear; after it, eight times as many. Seconds that `bench` reports."
    ));
    let (with, without) = (bench.path("bitmap.qcow2"), bench.path("without.qcow2"));
    for image in [&with, &without] {
        let mut create = qemu_img(&["create", "-q", "-f", "qcow2", "-o", "preallocation=full"]);
        succeed(create.arg(image).arg(format!("{MIB}M")))?;
    }
    succeed(qemu_img(&["bitmap", "--add"]).arg(&with).arg("b"))?;
    let line = |image: &Path, count| {
        let line = requests("writes", 4096, count);
        [line, words("--random -f qcow2"), vec![image.to_owned()]].concat()
    };
    let both = |count| {
        [
            ("bitmap", line(&with, count)),
            ("none", line(&without, count)),
        ]
    };
    let blocks = MIB << 8;
    let clear = || succeed(qemu_img(&["bitmap", "--clear"]).arg(&with).arg("b")).map(drop);
    bench.race(table, ("first touch", 0.7), &both(blocks), clear)?;
    // Long enough that the flushes of the first writes do not count.
    bench.race(table, ("after it", 0.97), &both(8 * blocks), || Ok(()))?;
    remove(&with).and(remove(&without))
}

/// A chain of 64 overlays beside one.
pub fn depth(bench: &Bench, table: &mut Table) -> Result<()> {
    const GIB: u64 = 16;
    const DEPTH: u64 = 64;
    table.notes.push(format!(
        "Reads of 4 KiB at random, 64 at a time, of a disk of {GIB} GiB in the host's cache: one mapped image and {DEPTH} \
         overlays on it, the last of which is empty and each of the others has every {DEPTH}th MiB; and the same image with one \
         empty overlay. Seconds that `bench` reports."
    ));
    let path = |number: u64| bench.path(&format!("depth-{number}.qcow2"));
    create_mapped(&path(0), GIB)?;
    let overlay = |backing: &Path, image: &Path| {
        let mut create = qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]);
        succeed(create.arg(backing).arg(image)).map(drop)
    };
    for number in 1..=DEPTH {
        overlay(&path(number - 1), &path(number))?;
        if number < DEPTH {
            let mut write = Command::new("qemu-io");
            write.args(["-f", "qcow2", "-t", "unsafe"]);
            for mib in (number..GIB << 10).step_by(DEPTH as usize) {
                write.args(["-c", &format!("write -q {} 64k", mib << 20)]);
            }
            succeed(write.arg(path(number)))?;
        }
    }
    let flat = bench.path("depth-flat.qcow2");
    overlay(&path(0), &flat)?;
    let line = |image: PathBuf, count: u64| {
        let line = format!("bench -q -d 64 -s 4096 -c {count} --random -f qcow2");
        [words(&line), vec![image]].concat()
    };
    let deep = format!("depth {DEPTH}");
    let both = |count| {
        [
            (deep.as_str(), line(path(DEPTH), count)),
            ("depth 1", line(flat.clone(), count)),
        ]
    };
    let (few, many) = (both(1_000_000), both(4_000_000));
    bench.race(table, ("reads", 0.95), &few, || Ok(()))?;
    // What the reads after the first million take: by then each region was looked at.
    let mut later = row("reads, the next 3 million", Unit::Seconds);
    for _ in 0..bench.arguments.rounds {
        for ((who, few), (_, many)) in few.iter().zip(&many) {
            let seconds = bench.bench_seconds(who, many)? - bench.bench_seconds(who, few)?;
            later.add(who, seconds);
        }
    }
    later.expect_ratio("depth 1", &deep, 0.95);
    table.cells.push(later);
    let strided = |who| {
        let line = words("bench -q -d 64 -s 4096 -S 1117184 -c 200000 -f qcow2");
        (who, [line, vec![path(DEPTH)]].concat())
    };
    let both = [strided(GAUR), strided(QEMU)];
    bench.race(table, ("reads in steps, depth 64", 1.0), &both, || Ok(()))?;
    (0..=DEPTH).try_for_each(|number| remove(&path(number)))?;
    remove(&flat)
}
