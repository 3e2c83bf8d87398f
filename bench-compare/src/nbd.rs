//! `bench-compare nbd`: `qemu-nbd` and `gaur serve` with a full qcow2 image in memory, under 4 KiB random
//! reads and writes at several depths and numbers of connections. fio with its io_uring engine on the raw
//! file stands beside them.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::arguments::Common;
use crate::engine::load::Run;
use crate::engine::markdown::{plain_line, rows_of};
use crate::engine::turns::{Contestant, take_turns};
use crate::process::{Server, qemu_img, succeed};
use crate::record::{Cell, Table, Unit};
use crate::statistics::NO_SLOWER;
use crate::{client, fio, machine, prerequisites};

/// How the NBD benchmark is run.
#[derive(clap::Args, Clone)]
pub struct NbdArguments {
    #[command(flatten)]
    common: Common,
    /// Directory for images and sockets; memory by default, so that the disk is not measured
    #[arg(long, default_value = "/dev/shm/gaur-bench")]
    dir: PathBuf,
    /// An older gaur binary, measured instead of qemu-nbd: what a change did to the speed
    #[arg(long, conflicts_with = "markdown")]
    before: Option<PathBuf>,
    /// Seconds per measurement
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Times each pair is measured
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Size of the disk in MiB
    #[arg(long, default_value_t = 1024)]
    size_mib: u64,
}

/// One combination of what is varied.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Random writes instead of reads.
    pub write: bool,
    /// Requests in flight per connection.
    pub depth: u32,
    /// Connections at once.
    pub connections: u32,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
}

/// Runs all cells and writes the reports.
pub fn run(arguments: &NbdArguments) -> Result<()> {
    prerequisites::check(&["fio", "qemu-img", "qemu-nbd"])?;
    std::fs::create_dir_all(&arguments.dir)?;
    let gaur = arguments.common.gaur()?;
    let size_bytes = arguments.size_mib << 20;
    let (image, raw) = prepare(&arguments.dir, size_bytes)?;
    let mut table = Table::default();
    for write in [false, true] {
        for connections in [1, 4] {
            for depth in [1, 32] {
                let load = Load {
                    write,
                    depth,
                    connections,
                    size_bytes,
                };
                for by_fio in [true, false] {
                    let cell = measure(arguments, &gaur, [&image, &raw], load, by_fio)?;
                    println!("{}", plain_line(&cell));
                    table.cells.push(cell);
                }
            }
        }
    }
    std::fs::remove_file(image)?;
    std::fs::remove_file(raw)?;
    arguments.common.write_record(&table)?;
    let circumstances = format!(
        "{} MiB disk, {} rounds of {} s each, kernel {}, {} CPUs, {}.",
        arguments.size_mib,
        arguments.rounds,
        arguments.seconds,
        machine::kernel(),
        std::thread::available_parallelism()?,
        machine::version_of("qemu-nbd"),
    );
    let section = format!("{circumstances}\n\n{}", rows_of(&table));
    arguments.common.write_section("nbd", &section)
}

/// One cell, loaded by fio or by a lean client of our own.
fn measure(
    arguments: &NbdArguments,
    gaur: &Path,
    [image, raw]: [&Path; 2],
    load: Load,
    by_fio: bool,
) -> Result<Cell> {
    let (socket, seconds) = (&arguments.dir.join("server.sock"), arguments.seconds);
    let apply = |_server: Server| match by_fio {
        true => fio::over_nbd(socket, load, seconds),
        false => client::over_nbd(socket, load, seconds),
    };
    let labels = [
        ("4 KiB random", if load.write { "write" } else { "read" }),
        ("connections", &load.connections.to_string()),
        ("depth", &load.depth.to_string()),
        ("load", if by_fio { "fio" } else { "lean client" }),
    ];
    let mut cell = Cell::new(Unit::Iops, &labels);
    let other = match arguments.before {
        Some(_) => "before",
        None => "qemu-nbd",
    };
    let mut contestants = vec![
        Contestant::new("gaur", || {
            apply(Server::gaur_nbd(gaur, image, socket)?).map(Run::of)
        }),
        Contestant::new(other, || {
            let server = match &arguments.before {
                Some(before) => Server::gaur_nbd(before, image, socket)?,
                None => Server::qemu_nbd(image, socket)?,
            };
            apply(server).map(Run::of)
        }),
    ];
    if by_fio {
        contestants.push(Contestant::new("raw file", || {
            fio::on_file(raw, false, load, seconds).map(Run::of)
        }));
    }
    take_turns(&mut cell, arguments.rounds, &mut contestants)?;
    drop(contestants);
    if other == "before" {
        cell.expect_ratio("gaur", other, NO_SLOWER);
    }
    Ok(cell)
}

/// A raw file full of data and the same as qcow2, both made by QEMU.
fn prepare(dir: &Path, size_bytes: u64) -> Result<(PathBuf, PathBuf)> {
    let (image, raw) = (dir.join("bench.qcow2"), dir.join("bench.raw"));
    std::fs::write(&raw, vec![0x5A; size_bytes as usize])?;
    let mut convert = qemu_img(&["convert", "-f", "raw", "-O", "qcow2"]);
    succeed(convert.arg(&raw).arg(&image))?;
    Ok((image, raw))
}
