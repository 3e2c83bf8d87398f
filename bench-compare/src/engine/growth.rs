//! Tables `growth` and `mkfs`: how large the file gets, counted in allocated bytes: after 100 MiB of
//! random writes to an empty disk of 40 GiB, and after `mkfs.ext4` on one of 1 TiB.
//!
//! Both programs write the same bytes to the same places of the same empty image, which asks for the
//! *compact* policy in its header; QEMU does not know that extension and preserves it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::engine::allocation::CLUSTER_BITS;
use crate::engine::images::{Scratch, Shape, short_size};
use crate::engine::load::{Aio, Load, Run};
use crate::engine::stride::Disk;
use crate::engine::suite::{Progress, Suite};
use crate::engine::turns::{Contestant, take_turns};
use crate::machine::allocated_bytes;
use crate::process::{Server, qemu_img, succeed};
use crate::record::{Cell, Unit};

const MIB: f64 = 1_048_576.0;

/// Bytes of the file at most, per cluster size; other sizes have no target.
const GROWTH_MAX: &[(u64, f64)] = &[
    (64 << 10, 115.0 * MIB),
    (512 << 10, 404.0 * MIB),
    (2 << 20, 1.6 * 1024.0 * MIB),
];

/// After `mkfs.ext4`, for every cluster size.
const MKFS_MAX: f64 = 1.1 * 1024.0 * MIB;

/// What the file grows by when 100 MiB are written to it in pieces of 4 KiB.
pub fn random_writes(suite: &Suite, progress: &mut Progress) -> Result<()> {
    const REQUESTS: u64 = 25_600;
    let disk = Disk::new(40 << 30);
    let scratch = Scratch::new(&suite.memory)?;
    let image = scratch.path("image.qcow2");
    let load = Load::scattered(&image, "qcow2", disk, REQUESTS).writes();
    let by_gaur = || suite.gaur(&load).map(|_| ());
    let by_qemu = || match load.by_qemu(Aio::Threads)? {
        Some(_) => Ok(()),
        None => bail!("qemu-img bench crashes"),
    };
    for bits in CLUSTER_BITS {
        let shape = compact(1 << bits, disk.size_bytes);
        let bound = GROWTH_MAX
            .iter()
            .find(|(size, _)| *size == shape.cluster_bytes);
        let bound = bound.map(|&(_, bytes)| bytes);
        progress.push(measure(suite, &shape, &image, [&by_gaur, &by_qemu], bound)?);
    }
    Ok(())
}

/// What the file grows by when a file system is made on it.
pub fn mkfs(suite: &Suite, progress: &mut Progress) -> Result<()> {
    let scratch = Scratch::new(&suite.memory)?;
    let image = scratch.path("image.qcow2");
    let socket = scratch.path("socket");
    let by_gaur = || {
        let mut command = Command::new(&suite.gaur);
        command.args(["serve", "-f", "qcow2"]);
        let server = Server::nbd(command, &image, &socket)?;
        make_file_system(&scratch, &socket, server)
    };
    let by_qemu = || {
        let mut command = Command::new("qemu-nbd");
        command.args(["-f", "qcow2", "--discard=unmap"]);
        let server = Server::nbd(command, &image, &socket)?;
        make_file_system(&scratch, &socket, server)
    };
    for bits in CLUSTER_BITS {
        let shape = compact(1 << bits, 1 << 40);
        let work: [Work; 2] = [&by_gaur, &by_qemu];
        progress.push(measure(suite, &shape, &image, work, Some(MKFS_MAX))?);
    }
    Ok(())
}

fn compact(cluster_bytes: u64, size_bytes: u64) -> Shape<'static> {
    Shape {
        subclusters: true,
        ..Shape::standard(cluster_bytes, size_bytes)
    }
}

/// What a program does to the image.
type Work<'a> = &'a dyn Fn() -> Result<()>;

/// Makes an empty image that asks for the compact policy.
fn create(suite: &Suite, shape: &Shape, image: &Path) -> Result<()> {
    let _ = std::fs::remove_file(image);
    let size = shape.cluster_bytes;
    let options = format!("cluster_size={size},extended_l2=on,allocation=compact");
    let mut command = Command::new(&suite.gaur);
    command.args(["create", "-q", "-f", "qcow2", "-o", &options]);
    succeed(command.arg(image).arg(shape.size_bytes.to_string())).map(drop)
}

/// Allocated bytes after each program has worked on an empty image. Nothing is random here, so one
/// round is enough.
fn measure(
    suite: &Suite,
    shape: &Shape,
    image: &Path,
    [by_gaur, by_qemu]: [Work; 2],
    bound: Option<f64>,
) -> Result<Cell> {
    let grown = |work: Work| {
        create(suite, shape, image)?;
        work()?;
        let mut check = qemu_img(&["check", "-q", "-f", "qcow2"]);
        succeed(check.arg(image)).context("the image is not clean")?;
        Ok(Run::of(allocated_bytes(image)? as f64))
    };
    let size = short_size(shape.cluster_bytes);
    let labels = [
        ("cluster", size.as_str()),
        ("subcluster", &short_size(shape.unit_bytes())),
    ];
    let mut cell = Cell::new(Unit::Bytes, &labels);
    let mut contestants = [
        Contestant::new("gaur", || grown(by_gaur)),
        Contestant::new("qemu", || grown(by_qemu)),
    ];
    take_turns(&mut cell, 1, &mut contestants)?;
    if let Some(bound) = bound {
        cell.expect_at_most("gaur", bound);
    }
    Ok(cell)
}

/// Makes an ext4 file system on what a server exports, and ends the server in good order.
fn make_file_system(scratch: &Scratch, socket: &Path, server: Server) -> Result<()> {
    let mount = Mount::new(&scratch.path("mount"), socket)?;
    let mut mkfs = Command::new("mkfs.ext4");
    // A fixed UUID and hash seed: the same bytes for both.
    let uuid = "6f1d7a52-5d0e-4bd4-9d0c-1f2f5a5b9c11";
    mkfs.args(["-q", "-F", "-U", uuid, "-E"])
        .arg(format!("hash_seed={uuid}"));
    succeed(mkfs.arg(mount.file()))?;
    drop(mount);
    server.stop()
}

/// An export as a file: `nbdfuse` of libnbd.
struct Mount {
    server: Server,
    folder: PathBuf,
}

impl Mount {
    fn new(folder: &Path, socket: &Path) -> Result<Mount> {
        std::fs::create_dir_all(folder)?;
        let mut command = Command::new("nbdfuse");
        command.arg(folder.join("disk"));
        command.arg(format!("nbd+unix:///?socket={}", socket.display()));
        let mut mount = Mount {
            server: Server::spawn(&mut command, None)?,
            folder: folder.to_owned(),
        };
        let file = mount.file();
        let look = || Ok(file.exists().then_some(()));
        mount.server.wait_for("the disk", look)?;
        Ok(mount)
    }

    fn file(&self) -> PathBuf {
        self.folder.join("disk")
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Unmounting is what ends nbdfuse; it flushes and disconnects then.
        let _ = Command::new("umount").arg(&self.folder).status();
        self.server.wait();
    }
}
