//! What the figures were measured on, and the programs that were measured.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The machine and the versions of what ran on it. Nothing that names the machine or its folders.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Machine {
    /// Release of the kernel.
    pub kernel: String,
    /// Model of the processor as the kernel knows it.
    pub processor: String,
    /// Processors that can be used.
    pub processors: usize,
    /// Main memory in MiB.
    pub memory_mib: u64,
    /// Commit of Gaur, with `+` where the tree had changes.
    pub gaur: String,
    /// Version of QEMU's tools.
    pub qemu: String,
    /// Version of fio.
    pub fio: String,
}

impl Machine {
    /// Looks at this machine.
    pub fn here() -> Machine {
        Machine {
            kernel: kernel(),
            processor: field("/proc/cpuinfo", "model name"),
            processors: std::thread::available_parallelism().map_or(0, usize::from),
            memory_mib: memory_mib(&field("/proc/meminfo", "MemTotal")),
            gaur: commit(),
            qemu: version_of("qemu-img"),
            fio: version_of("fio"),
        }
    }
}

/// Release of the running kernel, without what its builder appended.
pub fn kernel() -> String {
    let release = first_line(Command::new("uname").arg("-r"));
    release.split('-').next().unwrap_or_default().to_owned()
}

/// The first line of what a program says about its version, up to the packager's addition.
pub fn version_of(program: &str) -> String {
    let line = first_line(Command::new(program).arg("--version"));
    line.split(" (").next().unwrap_or_default().to_owned()
}

/// The three load averages of `/proc/loadavg`.
pub fn load_average() -> [f64; 3] {
    parse_load_average(&std::fs::read_to_string("/proc/loadavg").unwrap_or_default())
}

fn parse_load_average(text: &str) -> [f64; 3] {
    let mut numbers = text.split(' ').map(|field| field.parse().unwrap_or(0.0));
    [(); 3].map(|()| numbers.next().unwrap_or(0.0))
}

/// Today's date in UTC, as `2026-11-21`.
pub fn today() -> String {
    first_line(Command::new("date").args(["-u", "+%F"]))
}

fn commit() -> String {
    let hash = first_line(Command::new("git").args(["rev-parse", "--short=12", "HEAD"]));
    let mut status = Command::new("git");
    status.args([
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        "*.rs",
    ]);
    let mark = if first_line(&mut status).is_empty() {
        ""
    } else {
        "+"
    };
    format!("{hash}{mark}")
}

fn first_line(command: &mut Command) -> String {
    let output = command.output().map(|output| output.stdout);
    let text = String::from_utf8_lossy(&output.unwrap_or_default()).into_owned();
    text.lines().next().unwrap_or_default().to_owned()
}

/// The value of the first line `name : value` of a file under `/proc`.
fn field(path: &str, name: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let value = text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    });
    value.unwrap_or_default()
}

fn memory_mib(text: &str) -> u64 {
    let kib = text
        .split(' ')
        .next()
        .and_then(|number| number.parse().ok());
    kib.unwrap_or(0_u64) >> 10
}

/// Has cargo build the release binary of `gaur`; its path.
pub fn build_gaur() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--release", "--package", "gaur-cli"])
        .arg("--message-format=json")
        .stderr(std::process::Stdio::inherit())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut executable = text.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        message["executable"].as_str().map(PathBuf::from)
    });
    executable.next_back().context("cargo built no gaur binary")
}

/// The folder of this program, in the build folder: on a disk, and writable wherever the source lies.
pub fn build_folder() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    program.parent().unwrap_or(Path::new(".")).to_owned()
}

/// What a file takes on its file system in bytes, holes not counted.
pub fn allocated_bytes(path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path).with_context(|| format!("{}", path.display()))?;
    Ok(metadata.blocks() * 512)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_and_memory_are_read() {
        assert_eq!(
            parse_load_average("0.34 1.07 0.75 1/93 700\n"),
            [0.34, 1.07, 0.75]
        );
        assert_eq!(parse_load_average(""), [0.0; 3]);
        assert_eq!(memory_mib("2097152 kB"), 2048);
        assert_eq!(memory_mib(""), 0);
    }
}
