//! `convert` beside qemu-img's: between raw, qcow2 and NBD, in memory and on a disk, and from other programs' formats.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::{Bench, GAUR, QEMU, data, remove};
use crate::process::{Server, qemu_img, succeed, timed};
use crate::record::{Cell, Table, Unit};
use crate::snapshot::{row, settle};

/// qemu-img with as many requests as it can have, written as they come.
const QEMU_MANY: &str = "qemu-img -m 16 -W";
/// What a row of a disk's own speed is called.
const BARE: &str = "read, write and fdatasync";

/// What is copied to where.
struct Conversion<'a> {
    what: &'a str,
    bound: f64,
    /// Format and file.
    source: (&'a str, &'a Path),
    /// Format and file.
    target: (&'a str, &'a Path),
    /// Cache mode of the target.
    cache: &'a str,
    extra: &'a [&'a str],
}

impl Conversion<'_> {
    fn arguments(&self, source: OsString, target: OsString) -> Vec<OsString> {
        let words = ["convert", "-t", self.cache, "-f", self.source.0, "-O"];
        let words = words.into_iter().chain([self.target.0]);
        let words = words.chain(self.extra.iter().copied()).map(OsString::from);
        words.chain([source, target]).collect()
    }
}

impl Bench {
    /// One run; seconds.
    fn conversion(&self, who: &str, arguments: &[OsString]) -> Result<f64> {
        let mut command = match who {
            GAUR => Command::new(&self.gaur),
            _ => qemu_img(&[]),
        };
        let (verb, rest) = arguments.split_first().context("no verb")?;
        command.arg(verb);
        if who == QEMU_MANY {
            command.args(["-m", "16", "-W"]);
        }
        timed(command.args(rest))
    }

    /// A row of one conversion between files by all contestants in turn; what ours made is compared with the source.
    fn convert_files(&self, table: &mut Table, one: &Conversion<'_>) -> Result<()> {
        let mut row: Cell = row(one.what, Unit::Seconds);
        let arguments = one.arguments(one.source.1.into(), one.target.1.into());
        for _ in 0..self.arguments.rounds {
            for who in [QEMU_MANY, QEMU, GAUR] {
                remove(one.target.1)?;
                settle()?;
                row.add(who, self.conversion(who, &arguments)?);
            }
            compare(one.source, one.target)?;
        }
        judge(&mut row, one.bound);
        table.cells.push(row);
        remove(one.target.1)
    }

    /// The same with a server at one end, which each run has of its own.
    fn convert_served(
        &self,
        table: &mut Table,
        one: &Conversion<'_>,
        (server, is_source): (&str, bool),
    ) -> Result<()> {
        let mut row: Cell = row(one.what, Unit::Seconds);
        let socket = self.memory_path("socket");
        let uri: OsString = format!("nbd+unix:///?socket={}", socket.display()).into();
        let arguments = match is_source {
            true => one.arguments(uri, one.target.1.into()),
            false => one.arguments(one.source.1.into(), uri),
        };
        let (format, served) = if is_source { one.source } else { one.target };
        for _ in 0..self.arguments.rounds {
            for who in [QEMU_MANY, QEMU, GAUR] {
                remove(one.target.1)?;
                if !is_source {
                    File::create(one.target.1)?.set_len(self.arguments.convert_mib << 20)?;
                }
                let mut command = match server {
                    GAUR => Command::new(&self.gaur),
                    _ => Command::new("qemu-nbd"),
                };
                if server == GAUR {
                    command.arg("serve");
                }
                command.args(["-f", format, "--shared=16", "--cache=writeback"]);
                let server = Server::nbd(command, served, &socket)?;
                row.add(who, self.conversion(who, &arguments)?);
                server.stop()?;
            }
            compare(one.source, one.target)?;
        }
        judge(&mut row, one.bound);
        table.cells.push(row);
        remove(one.target.1)
    }

    fn memory_path(&self, name: &str) -> PathBuf {
        self.dir_memory.join(name)
    }
}

fn judge(row: &mut Cell, bound: f64) {
    row.expect_ratio(QEMU, GAUR, bound);
    row.expect_ratio(QEMU_MANY, GAUR, bound);
}

/// Fails unless both show the same.
fn compare(left: (&str, &Path), right: (&str, &Path)) -> Result<()> {
    let mut command = qemu_img(&["compare", "-q", "-f", left.0, "-F", right.0]);
    succeed(command.arg(left.1).arg(right.1)).map(drop)
}

/// `convert` in all directions.
pub fn convert(bench: &Bench, table: &mut Table) -> Result<()> {
    let mib = bench.arguments.convert_mib;
    table.notes.push(format!(
        "A disk of {mib} MiB. *Mixed* is, MiB by MiB, half noise, a quarter written zeros, a quarter holes; *noise* is noise \
         throughout. Both programs with the same options: `-t unsafe` is qemu-img's default and does not wait for the disk, `-t writeback` \
         is gaur's and does. Targets are new; the sources are in the host's cache. Every copy by gaur is compared with its source by \
         qemu-img. Seconds of a whole command."
    ));
    for (place, memory) in [("memory", true), ("disk", false)] {
        let path = |name: &str| match memory {
            true => bench.memory_path(name),
            false => bench.path(name),
        };
        for kind in ["mixed", "noise"] {
            let raw = path("disk.raw");
            data::write_noise(&raw, mib, kind == "mixed")?;
            let caches: &[&str] = match memory {
                true => &["unsafe"],
                false => &["unsafe", "writeback"],
            };
            for cache in caches {
                between_files(bench, table, (place, kind, cache), (&raw, &path))?;
            }
            if memory {
                over_nbd(bench, table, kind, &raw)?;
            }
            bare_copy(bench, table, (place, kind), (&raw, &path("bare.raw")))?;
            remove(&raw)?;
        }
    }
    foreign(bench, table)
}

/// raw to qcow2, back, and qcow2 to qcow2.
fn between_files(
    bench: &Bench,
    table: &mut Table,
    (place, kind, cache): (&str, &str, &str),
    (raw, path): (&Path, &dyn Fn(&str) -> PathBuf),
) -> Result<()> {
    let bound = if place == "memory" { 2.0 } else { 1.0 };
    let (image, target) = (path("source.qcow2"), path("target"));
    succeed(
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2"])
            .arg(raw)
            .arg(&image),
    )?;
    for (source, target_format) in [
        (("raw", raw), "qcow2"),
        (("qcow2", image.as_path()), "raw"),
        (("qcow2", image.as_path()), "qcow2"),
    ] {
        let what = format!(
            "{} to {target_format}, {kind}, {place}, -t {cache}",
            source.0
        );
        let one = Conversion {
            what: &what,
            bound,
            source,
            target: (target_format, &target),
            cache,
            extra: &[],
        };
        bench.convert_files(table, &one)?;
    }
    remove(&image)
}

/// From and to an export, in memory.
fn over_nbd(bench: &Bench, table: &mut Table, kind: &str, raw: &Path) -> Result<()> {
    let (image, target) = (
        bench.memory_path("source.qcow2"),
        bench.memory_path("target"),
    );
    succeed(
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2"])
            .arg(raw)
            .arg(&image),
    )?;
    for (server, name) in [(QEMU, "qemu-nbd"), (GAUR, "gaur serve")] {
        let what = format!("NBD to qcow2, {kind}, memory, {name}");
        let from = Conversion {
            what: &what,
            bound: 1.5,
            source: ("raw", raw),
            target: ("qcow2", &target),
            cache: "unsafe",
            extra: &[],
        };
        bench.convert_served(table, &from, (server, true))?;
        let what = format!("qcow2 to NBD, {kind}, memory, {name}");
        let to = Conversion {
            what: &what,
            source: ("qcow2", &image),
            target: ("raw", &target),
            extra: &["-n"],
            ..from
        };
        bench.convert_served(table, &to, (server, false))?;
    }
    remove(&image)
}

/// What the same bytes take by themselves: the data is read, written to a new file, and made durable.
fn bare_copy(
    bench: &Bench,
    table: &mut Table,
    (place, kind): (&str, &str),
    (raw, target): (&Path, &Path),
) -> Result<()> {
    let mut row = row(&format!("the bytes alone, {kind}, {place}"), Unit::Seconds);
    let mut bytes = vec![0; 1 << 20];
    for _ in 0..bench.arguments.rounds {
        for who in ["read and write", BARE] {
            remove(target)?;
            settle()?;
            let start = std::time::Instant::now();
            let (from, to) = (File::open(raw)?, File::create(target)?);
            for mib in 0..bench.arguments.convert_mib {
                if kind == "mixed" && !data::is_noise(mib) {
                    continue;
                }
                from.read_exact_at(&mut bytes, mib << 20)?;
                to.write_all_at(&bytes, mib << 20)?;
            }
            if who == BARE {
                to.sync_data()?;
            }
            row.add(who, start.elapsed().as_secs_f64());
        }
    }
    table.cells.push(row);
    remove(target)
}

/// From formats of other programs, in memory.
fn foreign(bench: &Bench, table: &mut Table) -> Result<()> {
    let (raw, image, target) = (
        bench.memory_path("disk.raw"),
        bench.memory_path("foreign"),
        bench.memory_path("target"),
    );
    data::write_mixed(&raw, bench.arguments.convert_mib)?;
    for (name, format, options) in [
        (
            "stream-optimised VMDK",
            "vmdk",
            ["-o", "subformat=streamOptimized"],
        ),
        ("VHDX", "vhdx", ["-o", "subformat=dynamic"]),
    ] {
        let mut make = qemu_img(&["convert", "-f", "raw", "-O", format]);
        succeed(make.args(options).arg(&raw).arg(&image))?;
        let what = format!("{name} to qcow2, text, noise and zeros, memory");
        let one = Conversion {
            what: &what,
            bound: 1.0,
            source: (format, &image),
            target: ("qcow2", &target),
            cache: "unsafe",
            extra: &[],
        };
        bench.convert_files(table, &one)?;
        remove(&image)?;
    }
    remove(&raw)
}
