//! Saving and loading the state of a virtual machine, past the host's cache, beside fio on a raw file and
//! QEMU's own `savevm` and `loadvm` of as much memory.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{Bench, row, settle};
use crate::process::{qemu_img, timed};
use crate::record::{Table, Unit};

/// Memory of the guest beside what holds the random bytes.
const GUEST_BESIDE_MIB: u64 = 256;

/// All take turns.
pub fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    let mib = bench.arguments.state_mib;
    table.notes.push(format!(
        "{mib} MiB of random bytes, images on a disk, past the host's cache (O_DIRECT). fio writes and reads a \
         raw file in a row (1 MiB requests, 8 at a time, and a flush at the end). QEMU saves the memory of a \
         stopped guest that holds the same bytes. Gaur's figures are of whole commands."
    ));
    let source = bench.arguments.dir_memory.join("gaur-bench-state");
    random_file(&source, mib)?;
    let mut save = row("save", Unit::MibPerSecond);
    let mut load = row("load", Unit::MibPerSecond);
    for _ in 0..bench.arguments.rounds {
        let image = bench.arguments.dir.join("state.qcow2");
        fresh(&image)?;
        settle()?;
        let mut command = snapshot(bench, "save", &image);
        save.add(
            "gaur",
            mib as f64 / timed(command.arg("--state").arg(&source))?,
        );
        let raw = bench.arguments.dir.join("state.raw");
        settle()?;
        save.add("fio", fio(&raw, mib, "write")?);
        settle()?;
        load.add("fio", fio(&raw, mib, "read")?);
        std::fs::remove_file(&raw)?;
        let mut command = snapshot(bench, "extract", &image);
        load.add(
            "gaur",
            mib as f64 / timed(command.args(["--to", "/dev/null"]))?,
        );
        fresh(&image)?;
        let mut guest = Guest::start(&image, &source, mib)?;
        settle()?;
        // The rest of its memory is zeros, of which little is saved.
        save.add("qemu", mib as f64 / guest.monitor("savevm state")?);
        load.add("qemu", mib as f64 / guest.monitor("loadvm state")?);
        guest.quit()?;
        std::fs::remove_file(&image)?;
    }
    std::fs::remove_file(&source)?;
    for row in [&mut save, &mut load] {
        row.expect_ratio("gaur", "fio", 0.9);
        row.expect_ratio("gaur", "qemu", 4.0);
    }
    table.cells.extend([save, load]);
    Ok(())
}

fn fresh(image: &Path) -> Result<()> {
    let _ = std::fs::remove_file(image);
    let mut command = qemu_img(&["create", "-q", "-f", "qcow2"]);
    timed(command.arg(image).arg("4G")).map(drop)
}

fn snapshot(bench: &Bench, verb: &str, image: &Path) -> Command {
    let mut command = Command::new(&bench.gaur);
    command.args(["snapshot", verb, "-q", "-t", "none"]);
    command.arg(image).arg("state");
    command
}

fn random_file(path: &Path, mib: u64) -> Result<()> {
    let mut from = File::open("/dev/urandom")?.take(mib << 20);
    let mut to = File::create(path)?;
    std::io::copy(&mut from, &mut to)?;
    Ok(())
}

/// MiB/s of fio in a row on a raw file.
fn fio(file: &Path, mib: u64, side: &str) -> Result<f64> {
    let mut command = Command::new("fio");
    command
        .args(["--name=state", "--bs=1m", "--iodepth=8", "--direct=1"])
        .args(["--ioengine=io_uring", "--end_fsync=1"])
        .arg(format!("--rw={side}"))
        .arg(format!("--size={mib}m"))
        .arg(format!("--filename={}", file.display()));
    let bytes = crate::fio::job(&mut command)?[side]["bw_bytes"].as_f64();
    Ok(bytes.context("fio reports no bandwidth")? / f64::from(1 << 20))
}

/// A stopped guest of QEMU's whose memory holds the random bytes.
struct Guest {
    child: Child,
    replies: BufReader<std::process::ChildStdout>,
}

impl Guest {
    fn start(image: &Path, source: &Path, mib: u64) -> Result<Guest> {
        let loader = format!(
            "loader,file={},addr=0x8000000,force-raw=on",
            source.display()
        );
        let drive = format!("file={},if=virtio,cache=none,aio=native", image.display());
        let mut child = Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-S", "-display", "none", "-serial", "none"])
            .args(["-monitor", "none", "-qmp", "stdio"])
            .args(["-m", &(mib + GUEST_BESIDE_MIB).to_string()])
            .args(["-device", &loader, "-drive", &drive])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start qemu-system-x86_64")?;
        let replies = child.stdout.take().context("QEMU has no output")?;
        let mut guest = Guest {
            child,
            replies: BufReader::new(replies),
        };
        guest.line()?;
        guest.command(&json!({"execute": "qmp_capabilities"}))?;
        Ok(guest)
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.replies.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("QEMU said {line:?}"))
    }

    fn command(&mut self, command: &Value) -> Result<Value> {
        let input = self.child.stdin.as_mut().context("QEMU has no input")?;
        writeln!(input, "{command}")?;
        loop {
            let reply = self.line()?;
            if let Some(value) = reply.get("return") {
                return Ok(value.clone());
            }
            if let Some(error) = reply.get("error") {
                bail!("QEMU: {error}");
            }
        }
    }

    /// Seconds that a command of the human monitor takes; it must print nothing.
    fn monitor(&mut self, line: &str) -> Result<f64> {
        let command = json!({
            "execute": "human-monitor-command",
            "arguments": {"command-line": line},
        });
        let start = Instant::now();
        let said = self.command(&command)?;
        let seconds = start.elapsed().as_secs_f64();
        match said.as_str() {
            Some("") => Ok(seconds),
            _ => bail!("{line}: {said}"),
        }
    }

    fn quit(mut self) -> Result<()> {
        self.command(&json!({"execute": "quit"}))?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
