//! The contestants, and how each is started: what serves the image, and what becomes of that.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::device::{self, RunningContestant, Started, Target};
use super::image::succeed;

/// Programs and folders of a run.
#[derive(Clone)]
pub struct Programs {
    pub gaur: PathBuf,
    pub rublk: PathBuf,
    /// For sockets, logs and mount points.
    pub dir: PathBuf,
    /// How QEMU reads and writes files: the fastest way here.
    pub qemu_aio: String,
}

/// What serves an image, and its arguments in words. In them `SOCKET` stands for a path in the folder of the
/// run, and `FILE` for one of an empty file.
enum Program {
    /// The image is measured itself.
    None,
    Gaur(&'static str),
    Rublk,
    QemuNbd,
    StorageDaemon(&'static str),
}

/// What a server makes of the image.
#[derive(Clone, Copy)]
enum Device {
    /// Nothing.
    None,
    /// It makes a block device of this kind by itself.
    Block(&'static str),
    /// The kernel's NBD client connects to it.
    Nbd,
    /// It makes a VDUSE device, which is put on the bus by a command.
    Vduse,
    /// It mounts the image over an empty file.
    Fuse,
    Vhost,
}

/// A server that is measured.
pub struct Contestant {
    /// Name in tables.
    pub who: &'static str,
    /// It serves a raw file: a ceiling, not a rival.
    pub raw: bool,
    program: Program,
    device: Device,
}

const fn raw(who: &'static str, program: Program, device: Device) -> Contestant {
    Contestant {
        raw: true,
        ..qcow2(who, program, device)
    }
}

const fn qcow2(who: &'static str, program: Program, device: Device) -> Contestant {
    Contestant {
        who,
        raw: false,
        program,
        device,
    }
}

const UBLK: Device = Device::Block("ublkb");
/// Connections of a network block device, and queues of the others.
const QUEUES: &str = "2";
const NBD: &str = "nbd0";
/// Another name than Gaur's: a device may be left by the contestant that had it before.
const QSD_VDUSE: &str = "bench-qsd";

/// All, in the order in which they are measured: each beside its rival.
pub const ALL: &[Contestant] = &[
    raw("raw file", Program::None, Device::None),
    raw(
        "gaur ublk, raw",
        Program::Gaur("--ublk --ublk-queues 2"),
        UBLK,
    ),
    qcow2("gaur ublk", Program::Gaur("--ublk --ublk-queues 2"), UBLK),
    // Past the page cache, as rublk does it.
    qcow2(
        "gaur ublk, direct",
        Program::Gaur("--ublk --ublk-queues 2 --cache none"),
        UBLK,
    ),
    qcow2("rublk", Program::Rublk, UBLK),
    qcow2("qemu-nbd", Program::QemuNbd, Device::Nbd),
    qcow2("gaur NBD", Program::Gaur("-t -e 16 -k SOCKET"), Device::Nbd),
    qcow2(
        "qsd NBD",
        Program::StorageDaemon(
            "--nbd-server addr.type=unix,addr.path=SOCKET,max-connections=16 \
             --export type=nbd,id=e,node-name=disk,name=,writable=on,iothread=t",
        ),
        Device::Nbd,
    ),
    qcow2(
        "gaur VDUSE",
        Program::Gaur("--vduse bench --queues 2"),
        Device::Block("vd"),
    ),
    qcow2(
        "qsd VDUSE",
        Program::StorageDaemon(
            "--export type=vduse-blk,id=e,node-name=disk,name=bench-qsd,writable=on,num-queues=2,iothread=t",
        ),
        Device::Vduse,
    ),
    qcow2("gaur FUSE", Program::Gaur("--fuse FILE"), Device::Fuse),
    qcow2(
        "qsd FUSE",
        Program::StorageDaemon(
            "--export type=fuse,id=e,node-name=disk,mountpoint=FILE,writable=on,iothread=t",
        ),
        Device::Fuse,
    ),
    qcow2(
        "gaur vhost-user",
        Program::Gaur("--vhost-user SOCKET --queues 2"),
        Device::Vhost,
    ),
    qcow2(
        "qsd vhost-user",
        Program::StorageDaemon(
            "--export type=vhost-user-blk,id=e,node-name=disk,writable=on,num-queues=2,iothread=t,\
             addr.type=unix,addr.path=SOCKET",
        ),
        Device::Vhost,
    ),
];

impl Contestant {
    /// Serves an image.
    pub fn start(&self, programs: &Programs, image: &Path) -> Result<RunningContestant> {
        let Some(mut command) = self.command(programs, image)? else {
            return Ok(RunningContestant::new(Target::Path(image.to_owned()), None));
        };
        let socket = programs.dir.join("socket");
        let _ = std::fs::remove_file(&socket);
        let file = programs.dir.join("disk.img");
        std::fs::write(&file, "")?;
        let before = match self.device {
            Device::Block(kind) => device::block_devices(kind)?,
            Device::Vduse => device::block_devices("vd")?,
            _ => Default::default(),
        };
        let mut server = Started::spawn(&mut command, programs.dir.join("log"))?;
        let mut undo = Vec::new();
        let target = match self.device {
            Device::None => bail!("a server of nothing"),
            Device::Block(kind) => {
                let node = server.wait_for("a block device", || device::new(kind, &before))?;
                if let Program::Rublk = self.program {
                    let name = node.file_name().unwrap_or_default().to_string_lossy();
                    // Its own way to take a device away fails now and then, and the device stays.
                    let mut delete = Command::new(&programs.gaur);
                    delete.args(["ublk", "del", name.trim_start_matches(kind)]);
                    undo.push(delete);
                }
                Target::Path(node)
            }
            Device::Nbd => {
                let listens = || Ok(UnixStream::connect(&socket).ok().map(drop));
                server.wait_for("the socket", listens)?;
                let node = format!("/dev/{NBD}");
                let mut client = Command::new("nbd-client");
                client.arg("-unix").arg(&socket);
                succeed(client.args([&node, "-C", QUEUES, "-N", ""]))?;
                let mut disconnect = Command::new("nbd-client");
                disconnect.args(["-d", &node]);
                undo.push(disconnect);
                if device::sectors(NBD) == 0 {
                    bail!("{node} has no size");
                }
                Target::Path(node.into())
            }
            Device::Vduse => {
                let control = Path::new("/dev/vduse").join(QSD_VDUSE);
                let is_there = || Ok(control.exists().then_some(()));
                server.wait_for("the VDUSE device", is_there)?;
                let vdpa = |arguments: &[&str]| {
                    let mut vdpa = Command::new("vdpa");
                    vdpa.arg("dev").args(arguments);
                    vdpa
                };
                succeed(&mut vdpa(&["add", "name", QSD_VDUSE, "mgmtdev", "vduse"]))?;
                undo.push(vdpa(&["del", QSD_VDUSE]));
                let node = server.wait_for("a block device", || device::new("vd", &before))?;
                Target::Path(node)
            }
            Device::Fuse => {
                let len = || std::fs::metadata(&file).map_or(0, |facts| facts.len());
                server.wait_for("the file", || Ok((len() > 0).then_some(())))?;
                Target::Path(file)
            }
            // It may take one client only, which is to be the one that measures.
            Device::Vhost => {
                server.wait_for("the socket", || Ok(socket.exists().then_some(())))?;
                Target::Vhost(socket)
            }
        };
        let mut running = RunningContestant::new(target, Some(server));
        running.undo = undo;
        Ok(running)
    }

    /// The command that serves an image, if there is one.
    fn command(&self, programs: &Programs, image: &Path) -> Result<Option<Command>> {
        let dir = programs.dir.to_str().context("a path of odd characters")?;
        let aio = &programs.qemu_aio;
        // Linux AIO needs files past the host's cache.
        let is_direct = aio == "native";
        let (mut command, words) = match self.program {
            Program::None => return Ok(None),
            Program::Gaur(words) => {
                let mut command = Command::new(&programs.gaur);
                let format = if self.raw { "raw" } else { "qcow2" };
                command.args(["serve", "-f", format]).arg(image);
                (command, words)
            }
            Program::Rublk => {
                let mut command = Command::new(&programs.rublk);
                // Its qcow2 takes one queue only.
                command.args(["add", "qcow2", "--foreground", "-q", "1", "-f"]);
                command.arg(image);
                (command, "")
            }
            Program::QemuNbd => {
                let mut command = Command::new("qemu-nbd");
                command.args(["--persistent", "--format=qcow2", "--shared=16"]);
                command.arg(format!("--aio={aio}"));
                let cache = if is_direct { "none" } else { "writeback" };
                command.arg(format!("--cache={cache}")).arg(image);
                (command, "--socket SOCKET")
            }
            Program::StorageDaemon(words) => {
                let mut command = Command::new("qemu-storage-daemon");
                let direct = if is_direct { "on" } else { "off" };
                let path = image.to_str().context("a path of odd characters")?;
                command.args(["--object", "iothread,id=t", "--blockdev"]);
                command.arg(format!(
                    "driver=file,node-name=file,filename={path},aio={aio},cache.direct={direct},discard=unmap"
                ));
                let node = "driver=qcow2,node-name=disk,file=file,discard=unmap";
                command.args(["--blockdev", node]);
                (command, words)
            }
        };
        for word in words.split_whitespace() {
            let word = word.replace("SOCKET", &format!("{dir}/socket"));
            command.arg(word.replace("FILE", &format!("{dir}/disk.img")));
        }
        Ok(Some(command))
    }
}
