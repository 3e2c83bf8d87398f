//! Cost of an idle export: memory, and the time that a server needs to start with it.
//!
//! A server is started with one NBD export and with many, each of an image of its own; the difference over
//! the number is what one costs. QEMU's storage daemon stands beside it, because `qemu-nbd` has one export a
//! process. Gaur's exports are also added and removed one by one, over the control socket.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::arguments::Common;
use crate::machine;
use crate::process::{Server, greets, succeed};
use crate::statistics::median;

/// How the benchmark of idle exports is run.
#[derive(clap::Args, Clone)]
pub struct IdleArguments {
    #[command(flatten)]
    common: Common,
    /// Directory for images and sockets
    #[arg(long, default_value = "/dev/shm/gaur-idle")]
    dir: PathBuf,
    /// Exports
    #[arg(long, default_value_t = 1000)]
    exports: usize,
    /// Times everything is measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

/// What was measured of one server, every round.
#[derive(Default, Serialize)]
struct Figures {
    /// Memory of one export in KiB.
    memory_kib: Vec<f64>,
    /// Time to start with one more, in ms.
    start_ms: Vec<f64>,
}

#[derive(Default, Serialize)]
struct Results {
    exports: usize,
    gaur: Figures,
    storage_daemon: Figures,
    /// Median time of an `export-add` in ms, every round.
    add_ms: Vec<f64>,
    /// Median time of an `export-remove` in ms, every round.
    remove_ms: Vec<f64>,
}

/// Measures and writes the reports.
pub fn run(arguments: &IdleArguments) -> Result<()> {
    crate::prerequisites::check(&["qemu-storage-daemon"])?;
    let gaur = arguments.common.gaur()?;
    if arguments.exports < 2 {
        bail!("at least two exports are needed");
    }
    std::fs::create_dir_all(&arguments.dir)?;
    let images = images(&gaur, arguments)?;
    let mut results = Results {
        exports: arguments.exports,
        ..Results::default()
    };
    for _ in 0..arguments.rounds {
        let start = |images: &[PathBuf]| start_gaur(&gaur, &arguments.dir, images);
        difference(&images, start, &mut results.gaur)?;
        let start = |images: &[PathBuf]| start_daemon(&arguments.dir, images);
        difference(&images, start, &mut results.storage_daemon)?;
        let (add, remove) = one_by_one(&gaur, &arguments.dir, &images)?;
        results.add_ms.push(add);
        results.remove_ms.push(remove);
    }
    std::fs::remove_dir_all(&arguments.dir)?;
    let table = table(&results)?;
    println!("{table}");
    arguments.common.write_record(&results)?;
    arguments.common.write_section("idle", &table)
}

/// Images of 10 GiB with nothing in them.
fn images(gaur: &Path, arguments: &IdleArguments) -> Result<Vec<PathBuf>> {
    let name = |number: usize| arguments.dir.join(format!("disk{number}.qcow2"));
    let images: Vec<PathBuf> = (0..arguments.exports).map(name).collect();
    let (first, rest) = images.split_first().context("an image")?;
    let mut create = Command::new(gaur);
    create.args(["create", "-q"]).arg(first).arg("10G");
    succeed(&mut create)?;
    for image in rest {
        std::fs::copy(first, image)?;
    }
    Ok(images)
}

/// The share of memory of a server in KiB.
fn memory_kib(server: &Server) -> Result<f64> {
    let path = format!("/proc/{}/smaps_rollup", server.id());
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("Pss")?.parse()?)
}

/// Starts a server, and waits until it is ready.
fn start(mut command: Command, ready: impl Fn() -> bool) -> Result<Server> {
    let mut server = Server::spawn(&mut command, None)?;
    server.wait_for("a server", || Ok(ready().then_some(())))?;
    Ok(server)
}

/// `gaur serve`: ready when it greets, because it opens its images first.
fn start_gaur(gaur: &Path, dir: &Path, images: &[PathBuf]) -> Result<Server> {
    let socket = dir.join("server.sock");
    let _ = std::fs::remove_file(&socket);
    let mut command = Command::new(gaur);
    command.args(["serve", "-q", "-t", "-e", "0", "-f", "qcow2", "-k"]);
    command.arg(&socket).args(images);
    start(command, || greets(&socket))
}

/// `qemu-storage-daemon`: ready when it has written its process id, which it does last.
fn start_daemon(dir: &Path, images: &[PathBuf]) -> Result<Server> {
    let (socket, pid) = (dir.join("daemon.sock"), dir.join("daemon.pid"));
    let _ = std::fs::remove_file(&pid);
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--nbd-server");
    command.arg(format!("addr.type=unix,addr.path={}", socket.display()));
    for (number, image) in images.iter().enumerate() {
        let image = image.display();
        command.args([
            "--blockdev",
            &format!("driver=qcow2,node-name=n{number},file.driver=file,file.filename={image}"),
            "--export",
            &format!("type=nbd,id=e{number},node-name=n{number},name=d{number},writable=on"),
        ]);
    }
    command.arg("--pidfile").arg(&pid);
    start(command, || pid.exists())
}

/// What one export costs, by the difference of many and one.
fn difference(
    images: &[PathBuf],
    start: impl Fn(&[PathBuf]) -> Result<Server>,
    figures: &mut Figures,
) -> Result<()> {
    let measure = |images: &[PathBuf]| -> Result<(f64, f64)> {
        let begin = Instant::now();
        let running = start(images)?;
        let took_ms = begin.elapsed().as_secs_f64() * 1e3;
        // What a start leaves behind is given back by then, if it is.
        std::thread::sleep(Duration::from_millis(300));
        let memory_kib = memory_kib(&running)?;
        running.end()?;
        Ok((memory_kib, took_ms))
    };
    let (one_kib, one_ms) = measure(&images[..1])?;
    let (all_kib, all_ms) = measure(images)?;
    let more = (images.len() - 1) as f64;
    figures.memory_kib.push((all_kib - one_kib) / more);
    figures.start_ms.push((all_ms - one_ms) / more);
    Ok(())
}

/// Median times in ms to add and to remove an export of a running server.
fn one_by_one(gaur: &Path, dir: &Path, images: &[PathBuf]) -> Result<(f64, f64)> {
    let (socket, control) = (dir.join("server.sock"), dir.join("control.sock"));
    let mut command = Command::new(gaur);
    command.args(["serve", "-q", "-e", "0", "-k"]).arg(&socket);
    command.arg("--control").arg(&control);
    let running = start(command, || UnixStream::connect(&control).is_ok())?;
    let mut stream = UnixStream::connect(&control)?;
    let mut answers = BufReader::new(stream.try_clone()?);
    let mut ask = |command: serde_json::Value| -> Result<f64> {
        let begin = Instant::now();
        stream.write_all(format!("{command}\n").as_bytes())?;
        let mut line = String::new();
        answers.read_line(&mut line)?;
        if !line.starts_with("{\"result\"") {
            bail!("{command}: {line}");
        }
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    };
    let (mut added, mut removed) = (Vec::new(), Vec::new());
    for (number, image) in images.iter().enumerate() {
        let name = format!("d{number}");
        added.push(ask(serde_json::json!({
            "command": "export-add", "export": name, "file": image, "format": "qcow2",
        }))?);
    }
    for number in 0..images.len() {
        let name = format!("d{number}");
        removed.push(ask(
            serde_json::json!({ "command": "export-remove", "export": name }),
        )?);
    }
    running.end()?;
    Ok((median(&added), median(&removed)))
}

fn table(results: &Results) -> Result<String> {
    let mut table = String::new();
    let rounds = results.gaur.memory_kib.len();
    writeln!(
        table,
        "{} exports, {rounds} rounds (medians), kernel {}, {} CPUs, {}.\n",
        results.exports,
        machine::kernel(),
        std::thread::available_parallelism()?,
        machine::version_of("qemu-storage-daemon"),
    )?;
    writeln!(
        table,
        "| one idle NBD export | gaur serve | qemu-storage-daemon | target |"
    )?;
    writeln!(table, "|---|---|---|---|")?;
    let (ours, theirs) = (&results.gaur, &results.storage_daemon);
    writeln!(
        table,
        "| memory | {:.0} KiB | {:.0} KiB | 256 KiB |",
        median(&ours.memory_kib),
        median(&theirs.memory_kib),
    )?;
    writeln!(
        table,
        "| start of the server | {:.2} ms | {:.2} ms | 5 ms |",
        median(&ours.start_ms),
        median(&theirs.start_ms),
    )?;
    let (add, remove) = (median(&results.add_ms), median(&results.remove_ms));
    writeln!(table, "| added while it runs | {add:.2} ms | | 5 ms |")?;
    writeln!(table, "| removed, its image closed | {remove:.2} ms | | |")?;
    Ok(table)
}
