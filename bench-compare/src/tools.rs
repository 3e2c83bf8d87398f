//! Verbs beside those of qemu-img: compression, the walk over the tables of a large image, commit and rebase, requests
//! to images with a feature.
//!
//! Every figure is the time of a whole command, taken in turn. The files are in the host's cache.

mod convert;
mod data;
mod requests;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::arguments::Common;
use crate::machine;
use crate::process::{qemu_img, succeed, timed};
use crate::record::{Cell, Direction, Table, Unit};
use crate::rows::Report;
use crate::snapshot::{create_mapped, row};

/// How the benchmark of verbs is run.
#[derive(clap::Args, Clone)]
pub struct ToolsArguments {
    #[command(flatten)]
    common: Common,
    /// Tables to measure: compression, walk, chain, encryption, bitmap, depth, convert [default: all]
    #[arg(long, value_delimiter = ',')]
    tables: Vec<String>,
    /// Folder for images, with 12 GiB of space
    #[arg(long, default_value_os_t = machine::build_folder().join("bench-tools"))]
    dir: PathBuf,
    /// Folder in memory for images, with 5 GiB of space
    #[arg(long, default_value = "/dev/shm")]
    dir_memory: PathBuf,
    /// Size of the disk of the table convert, in MiB
    #[arg(long, default_value_t = 1024)]
    convert_mib: u64,
    /// Size of the disk that is compressed, in MiB
    #[arg(long, default_value_t = 512)]
    compressed_mib: u64,
    /// Size of the disk of the table walk, in GiB
    #[arg(long, default_value_t = 1024)]
    walk_gib: u64,
    /// Size of the disk of the table chain, in MiB
    #[arg(long, default_value_t = 2048)]
    chain_mib: u64,
    /// Times everything is measured
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// What every table is run with.
struct Bench {
    gaur: PathBuf,
    /// A folder of this run's own.
    dir: PathBuf,
    /// The same in memory.
    dir_memory: PathBuf,
    arguments: ToolsArguments,
}

const GAUR: &str = "gaur";
const QEMU: &str = "qemu-img";

impl Bench {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A call of one of the two.
    fn call(&self, who: &str, arguments: &[&OsStr]) -> Command {
        let mut command = match who {
            GAUR => Command::new(&self.gaur),
            _ => qemu_img(&[]),
        };
        command.args(arguments);
        command
    }

    /// Adds a row of what both take for the same arguments, in turn, with the target that qemu-img takes `bound`
    /// times as long. `prepare` is called before each.
    fn compare(
        &self,
        table: &mut Table,
        (what, bound): (&str, f64),
        arguments: impl Fn(&str) -> Vec<PathBuf>,
        mut prepare: impl FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let mut row: Cell = row(what, Unit::Seconds);
        for _ in 0..self.arguments.rounds {
            for who in [GAUR, QEMU] {
                prepare(who)?;
                let arguments = arguments(who);
                let arguments: Vec<&OsStr> = arguments.iter().map(|one| one.as_os_str()).collect();
                row.add(who, timed(&mut self.call(who, &arguments))?);
            }
        }
        row.expect_ratio(QEMU, GAUR, bound);
        table.cells.push(row);
        Ok(())
    }
}

const REPORT: Report<Bench> = Report {
    name: "tools",
    title: "Verbs",
    tables: &[
        ("compression", compression),
        ("walk", walk),
        ("chain", chain),
        ("encryption", requests::encryption),
        ("bitmap", requests::bitmap),
        ("depth", requests::depth),
        ("convert", convert::convert),
    ],
};

/// Measures the tables asked for and writes the reports.
pub fn run(arguments: &ToolsArguments) -> Result<()> {
    REPORT.check(&arguments.tables)?;
    crate::prerequisites::check(&["qemu-img", "qemu-io", "qemu-nbd", "fio"])?;
    let own = format!("gaur-tools-{}", std::process::id());
    let bench = Bench {
        gaur: arguments.common.gaur()?,
        dir: arguments.dir.join(&own),
        dir_memory: arguments.dir_memory.join(&own),
        arguments: arguments.clone(),
    };
    fs::create_dir_all(&bench.dir)?;
    fs::create_dir_all(&bench.dir_memory)?;
    let measured = REPORT.measure(&arguments.common, &arguments.tables, &bench);
    fs::remove_dir_all(&bench.dir_memory)?;
    fs::remove_dir_all(&bench.dir)?;
    measured
}

fn words(text: &str) -> Vec<PathBuf> {
    text.split(' ').map(PathBuf::from).collect()
}

/// `convert -c`, and reading what it makes.
fn compression(bench: &Bench, table: &mut Table) -> Result<()> {
    let mib = bench.arguments.compressed_mib;
    table.notes.push(format!(
        "A disk of {mib} MiB: half of it text, a quarter noise, a quarter zeros. Reads are of 4 KiB, 64 at a time: one \
         after the other, and in steps of 1 MiB and 20 KiB, so that neighbours are seldom in one cluster. QEMU decompresses on \
         up to four threads, gaur on those of its queues. Seconds of a whole command."
    ));
    let raw = bench.path("disk.raw");
    data::write_mixed(&raw, mib)?;
    for (kind, bound) in [("zlib", 2.5), ("zstd", 2.0)] {
        let target = |who: &str| bench.path(&format!("{who}-{kind}.qcow2"));
        let options = format!("convert -c -f raw -O qcow2 -o compression_type={kind}");
        bench.compare(
            table,
            (&format!("convert -c, {kind}"), bound),
            |who| [words(&options), vec![raw.clone(), target(who)]].concat(),
            |who| remove(&target(who)),
        )?;
        let [ours, theirs] = [GAUR, QEMU].map(target);
        let sizes = [&ours, &theirs].map(|path| machine::allocated_bytes(path));
        let [our_bytes, their_bytes] = sizes;
        let mut row = row(&format!("bytes of the image, {kind}"), Unit::Bytes);
        row.add(GAUR, our_bytes? as f64);
        row.add(QEMU, their_bytes? as f64);
        row.judge_ratio(GAUR, QEMU, 1.02, Direction::AtMost);
        table.cells.push(row);
        timed(qemu_img(&["compare", "-q"]).arg(&raw).arg(&ours))?;
        let clusters = mib * 256;
        let strided = (1 << 20) + 20480;
        for (what, step, threads, bound) in [
            ("sequential reads", 4096, 1, 8.0),
            ("strided reads", strided, 1, 1.5),
            ("strided reads on two queues", strided, 2, 1.5),
        ] {
            let line = format!("bench -f qcow2 -d 64 -s 4096 -S {step} -c {clusters}");
            let own = words(&format!("{line} --threads {threads}"));
            bench.compare(
                table,
                (&format!("{what}, {kind}"), bound),
                |who| {
                    let line = if who == GAUR {
                        own.clone()
                    } else {
                        words(&line)
                    };
                    [line, vec![theirs.clone()]].concat()
                },
                |_| Ok(()),
            )?;
        }
    }
    Ok(())
}

/// Verbs that walk over the tables of a large image.
fn walk(bench: &Bench, table: &mut Table) -> Result<()> {
    let gib = bench.arguments.walk_gib;
    table.notes.push(format!(
        "A disk of {gib} GiB, all of whose clusters are mapped (preallocation=metadata) and lie in a sparse \
         file. Seconds of a whole command."
    ));
    let image = bench.path("mapped.qcow2");
    create_mapped(&image, gib)?;
    for (line, bound) in [
        ("check -f qcow2", 10.0),
        ("map -f qcow2 --output=json", 5.0),
        ("measure -f qcow2 -O qcow2", 5.0),
    ] {
        let verb = line.split(' ').next().unwrap_or_default();
        bench.compare(
            table,
            (verb, bound),
            |_| [words(line), vec![image.clone()]].concat(),
            |_| Ok(()),
        )?;
    }
    let other = bench.path("other.qcow2");
    create_mapped(&other, gib)?;
    bench.compare(
        table,
        ("compare", 5.0),
        |_| {
            [
                words("compare -q -f qcow2 -F qcow2"),
                vec![image.clone(), other.clone()],
            ]
            .concat()
        },
        |_| Ok(()),
    )?;
    remove(&other).and(remove(&image))
}

/// Commit and rebase.
fn chain(bench: &Bench, table: &mut Table) -> Result<()> {
    let mib = bench.arguments.chain_mib;
    table.notes.push(format!(
        "A disk of {mib} MiB, all of it data in the base, and an overlay with every tenth cluster of 64 KiB. It is committed, and \
         rebased onto a copy of the base in which every tenth cluster is another. Seconds of a whole command."
    ));
    let [base, other, overlay] =
        ["base.qcow2", "other.qcow2", "overlay.qcow2"].map(|name| bench.path(name));
    let size = format!("{mib}M");
    succeed(
        qemu_img(&["create", "-q", "-f", "qcow2"])
            .arg(&base)
            .arg(&size),
    )?;
    write_clusters(&base, mib, 1, 0)?;
    fs::copy(&base, &other)?;
    write_clusters(&other, mib, 10, 5)?;
    let backing = |file: &Path| vec!["-F".into(), "qcow2".into(), "-b".into(), file.to_owned()];
    let mut create = qemu_img(&["create", "-q", "-f", "qcow2"]);
    succeed(create.args(backing(&base)).arg(&overlay))?;
    write_clusters(&overlay, mib, 10, 3)?;
    let (top, own) = (bench.path("top.qcow2"), bench.path("own.qcow2"));
    let renew = |_: &str| {
        fs::copy(&overlay, &top)?;
        if !own.exists() {
            fs::copy(&base, &own)?;
        }
        let mut rebase = qemu_img(&["rebase", "-u", "-f", "qcow2"]);
        succeed(rebase.args(backing(&own)).arg(&top)).map(drop)
    };
    bench.compare(
        table,
        ("commit", 2.0),
        |_| [words("commit -q -f qcow2"), vec![top.clone()]].concat(),
        renew,
    )?;
    bare_writes(bench, table, &own, mib)?;
    remove(&own)?;
    bench.compare(
        table,
        ("rebase", 2.0),
        |_| {
            let line = words("rebase -f qcow2");
            [line, backing(&other), vec![top.clone()]].concat()
        },
        renew,
    )?;
    let mut compare = qemu_img(&["compare", "-q", "-f", "qcow2", "-F", "qcow2"]);
    timed(compare.arg(&top).arg(&overlay)).map(drop)
}

/// Adds what the bytes of a commit take by themselves: as many scattered clusters written to a file, and made durable.
fn bare_writes(bench: &Bench, table: &mut Table, file: &Path, mib: u64) -> Result<()> {
    let mut row = row("the same bytes written to a file", Unit::Seconds);
    let clusters = (mib << 4) as usize;
    let bytes = vec![1; 64 << 10];
    for _ in 0..bench.arguments.rounds {
        let start = Instant::now();
        let file = File::options().write(true).open(file)?;
        for cluster in (3..clusters).step_by(10) {
            file.write_all_at(&bytes, (cluster * bytes.len()) as u64)?;
        }
        file.sync_data()?;
        row.add("write and fdatasync", start.elapsed().as_secs_f64());
    }
    table.cells.push(row);
    Ok(())
}

/// Writes every `step`-th cluster of 64 KiB, from number `first` on.
fn write_clusters(image: &Path, mib: u64, step: u64, first: u64) -> Result<()> {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2", "-t", "unsafe"]);
    let (cluster, end) = (64 << 10, mib << 20);
    let len = if step == 1 { 64 << 20 } else { cluster };
    for offset in (first * cluster..end).step_by((step * len) as usize) {
        let pattern = offset / cluster % 250 + step;
        command.args(["-c", &format!("write -q -P {pattern} {offset} {len}")]);
    }
    succeed(command.arg(image)).map(drop)
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{}", path.display()))
        }
        _ => Ok(()),
    }
}
