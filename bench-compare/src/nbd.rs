//! The NBD benchmark: every cell is measured for both servers in turn.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::server::Server;
use crate::{NbdArguments, client, fio, machine, prerequisites, report};

/// One combination of what is varied.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cell {
    /// Random writes instead of reads.
    pub write: bool,
    /// Requests in flight per connection.
    pub depth: u32,
    /// Connections at once.
    pub connections: u32,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
}

/// What was measured for a cell with one source of load.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The cell.
    pub cell: Cell,
    /// `"fio"` or `"lean client"`.
    pub load: &'static str,
    /// IOPS of every round.
    pub gaur: Vec<f64>,
    /// IOPS of every round.
    pub qemu_nbd: Vec<f64>,
    /// IOPS of every round of fio on the raw file, without any server.
    pub raw: Vec<f64>,
}

/// Runs all cells and writes the reports.
pub fn run(arguments: &NbdArguments) -> Result<()> {
    prerequisites::check(&["fio", "qemu-img", "qemu-nbd"])?;
    std::fs::create_dir_all(&arguments.dir)?;
    let gaur = match &arguments.gaur {
        Some(path) => path.clone(),
        None => machine::build_gaur()?,
    };
    let size_bytes = arguments.size_mib << 20;
    let (image, raw) = prepare(&arguments.dir, size_bytes)?;
    let mut rows = Vec::new();
    for write in [false, true] {
        for connections in [1, 4] {
            for depth in [1, 32] {
                let cell = Cell {
                    write,
                    depth,
                    connections,
                    size_bytes,
                };
                for load in ["fio", "lean client"] {
                    let row = measure(arguments, &gaur, &image, &raw, cell, load)?;
                    report::print(&row);
                    rows.push(row);
                }
            }
        }
    }
    std::fs::remove_file(image)?;
    std::fs::remove_file(raw)?;
    if let Some(path) = &arguments.json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    if let Some(path) = &arguments.markdown {
        report::update_markdown(path, arguments, &rows)?;
    }
    Ok(())
}

fn measure(
    arguments: &NbdArguments,
    gaur: &Path,
    image: &Path,
    raw: &Path,
    cell: Cell,
    load: &'static str,
) -> Result<Row> {
    let socket = arguments.dir.join("server.sock");
    let mut row = Row {
        cell,
        load,
        gaur: vec![],
        qemu_nbd: vec![],
        raw: vec![],
    };
    let apply = |server: &Server| match load {
        "fio" => fio::over_nbd(&server.socket, cell, arguments.seconds),
        _ => client::over_nbd(&server.socket, cell, arguments.seconds),
    };
    for _ in 0..arguments.rounds {
        let other = match &arguments.before {
            Some(before) => Server::gaur(before, image, &socket)?,
            None => Server::qemu(image, &socket)?,
        };
        row.qemu_nbd.push(apply(&other).context("the other")?);
        drop(other);
        row.gaur
            .push(apply(&Server::gaur(gaur, image, &socket)?).context("gaur serve")?);
        if load == "fio" {
            row.raw.push(fio::on_file(raw, cell, arguments.seconds)?);
        }
    }
    Ok(row)
}

/// A raw file full of data and the same as qcow2, both made by QEMU.
fn prepare(dir: &Path, size_bytes: u64) -> Result<(PathBuf, PathBuf)> {
    let (image, raw) = (dir.join("bench.qcow2"), dir.join("bench.raw"));
    let kib = size_bytes >> 10;
    std::fs::write(&raw, vec![0x5A; size_bytes as usize])?;
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2"], &raw, &image)
        .with_context(|| format!("cannot make a qcow2 image of {kib} KiB"))?;
    Ok((image, raw))
}

fn qemu_img(arguments: &[&str], from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("qemu-img")
        .args(arguments)
        .arg(from)
        .arg(to)
        .status()?;
    if !status.success() {
        bail!("qemu-img ended with {status}");
    }
    Ok(())
}
