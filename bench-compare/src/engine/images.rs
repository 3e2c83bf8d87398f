//! Images to measure on, made by QEMU's tools so that neither program has its own.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use gaur_bench::Random;

use crate::process::{qemu_img, succeed};

/// A folder for images that is emptied when it goes.
pub struct Scratch {
    folder: PathBuf,
}

impl Scratch {
    /// Makes a folder of our own in `parent`.
    pub fn new(parent: &Path) -> Result<Scratch> {
        let folder = parent.join(format!("gaur-bench-{}", std::process::id()));
        std::fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
        Ok(Scratch { folder })
    }

    /// The path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// What an image is like.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// Bytes of a cluster.
    pub cluster_bytes: u64,
    /// Extended L2 entries: 32 subclusters to a cluster.
    pub subclusters: bool,
    /// Bytes of the disk.
    pub size_bytes: u64,
    /// A qcow2 image below.
    pub backing: Option<&'a Path>,
}

impl Shape<'_> {
    /// A disk of that size with standard L2 entries, on nothing.
    pub fn standard(cluster_bytes: u64, size_bytes: u64) -> Shape<'static> {
        Shape {
            cluster_bytes,
            subclusters: false,
            size_bytes,
            backing: None,
        }
    }

    /// Bytes of what is allocated at once: a cluster, or a subcluster.
    pub fn unit_bytes(&self) -> u64 {
        self.cluster_bytes / if self.subclusters { 32 } else { 1 }
    }

    /// Makes an empty image, in place of what is there.
    pub fn create(&self, image: &Path) -> Result<()> {
        let _ = std::fs::remove_file(image);
        let extended = if self.subclusters { "on" } else { "off" };
        let options = format!("cluster_size={},extended_l2={extended}", self.cluster_bytes);
        let mut command = qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options]);
        if let Some(backing) = self.backing {
            command.args(["-F", "qcow2", "-b"]).arg(backing);
        }
        succeed(command.arg(image).arg(self.size_bytes.to_string())).map(drop)
    }

    /// Makes an image whose clusters are all written, first to last.
    pub fn create_full(&self, image: &Path) -> Result<()> {
        self.create(image)?;
        fill("qcow2", image, self.size_bytes)
    }

    /// Makes an image whose clusters are all written in random order, so that neighbours on the disk
    /// are no neighbours in the file.
    pub fn create_full_in_random_order(&self, image: &Path, seed: u64) -> Result<()> {
        self.create(image)?;
        let mut commands = String::new();
        for cluster in shuffled(self.size_bytes / self.cluster_bytes, seed) {
            let offset = cluster * self.cluster_bytes;
            commands.push_str(&format!(
                "write -q -P 165 {offset} {}\n",
                self.cluster_bytes
            ));
        }
        let mut command = Command::new("qemu-io");
        command.args(["-f", "qcow2"]).arg(image);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()?;
        let mut input = child.stdin.take().context("qemu-io has no input")?;
        input.write_all(commands.as_bytes())?;
        drop(input);
        let status = child.wait()?;
        if !status.success() {
            bail!("{command:?}: {status}");
        }
        self.verify_full(image)
    }

    /// Fails unless every byte of the disk is data in this image's own file.
    pub fn verify_full(&self, image: &Path) -> Result<()> {
        let mut map = qemu_img(&["map", "--output=json", "-f", "qcow2"]);
        let extents: serde_json::Value = serde_json::from_str(&succeed(map.arg(image))?)?;
        let full = is_full(&extents, self.size_bytes);
        full.then_some(())
            .with_context(|| format!("{} is not full of data", image.display()))
    }
}

/// Whether the output of `qemu-img map` covers the disk with data of the topmost layer.
fn is_full(extents: &serde_json::Value, size_bytes: u64) -> bool {
    let extents = extents.as_array().map_or(&[][..], Vec::as_slice);
    let data = extents
        .iter()
        .filter(|extent| extent["depth"] == 0 && extent["data"] == true && extent["zero"] == false);
    let lengths = data.map(|extent| extent["length"].as_u64().unwrap_or(0));
    lengths.sum::<u64>() == size_bytes
}

/// A raw file full of data.
pub fn create_full_raw(file: &Path, size_bytes: u64) -> Result<()> {
    let _ = std::fs::remove_file(file);
    let mut command = qemu_img(&["create", "-q", "-f", "raw"]);
    succeed(command.arg(file).arg(size_bytes.to_string()))?;
    fill("raw", file, size_bytes)
}

/// Writes the whole disk once, first to last, with large requests.
fn fill(format: &str, image: &Path, size_bytes: u64) -> Result<()> {
    const WRITE_BYTES: u64 = 2 << 20;
    let count = (size_bytes / WRITE_BYTES).to_string();
    let size = WRITE_BYTES.to_string();
    let mut command = qemu_img(&["bench", "-w", "-d", "1", "--pattern=165", "-f", format]);
    command.args(["-c", &count, "-s", &size]).arg(image);
    succeed(&mut command).map(drop)
}

/// The numbers below `count` in random order.
fn shuffled(count: u64, seed: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count).collect();
    let mut random = Random::new(seed);
    for last in (1..numbers.len()).rev() {
        numbers.swap(last, random.index(last + 1));
    }
    numbers
}

/// The number a size is on a label: `64K`, `2M`.
pub fn short_size(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 && bytes % (1 << 20) == 0 => format!("{}M", bytes >> 20),
        bytes if bytes >= 1 << 10 && bytes % (1 << 10) == 0 => format!("{}K", bytes >> 10),
        bytes => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_shuffled_once() {
        let mut numbers = shuffled(1000, 7);
        let moved = numbers
            .iter()
            .enumerate()
            .filter(|&(at, &number)| at as u64 != number);
        assert!(moved.count() > 900);
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..1000));
        assert_ne!(shuffled(1000, 7), shuffled(1000, 8));
        assert!(shuffled(0, 7).is_empty());
    }

    #[test]
    fn an_image_with_a_hole_is_not_full() {
        let data = |length| serde_json::json!({"start": 0, "length": length, "depth": 0, "zero": false, "data": true});
        let hole =
            serde_json::json!({"start": 0, "length": 10, "depth": 0, "zero": true, "data": false});
        let below =
            serde_json::json!({"start": 0, "length": 10, "depth": 1, "zero": false, "data": true});
        assert!(is_full(&serde_json::json!([data(10), data(20)]), 30));
        assert!(!is_full(&serde_json::json!([data(10), hole]), 20));
        assert!(!is_full(&serde_json::json!([data(10), below]), 20));
    }

    #[test]
    fn sizes_on_labels() {
        let sizes = [512, 2048, 65536, 2 << 20].map(short_size);
        assert_eq!(sizes, ["512", "2K", "64K", "2M"]);
    }

    #[test]
    fn a_unit_is_a_cluster_or_a_thirty_second_of_it() {
        let mut shape = Shape {
            cluster_bytes: 128 << 10,
            subclusters: false,
            size_bytes: 1 << 30,
            backing: None,
        };
        assert_eq!(shape.unit_bytes(), 128 << 10);
        shape.subclusters = true;
        assert_eq!(shape.unit_bytes(), 4096);
    }
}
