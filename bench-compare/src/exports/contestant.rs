//! The contestants, and how each is started.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use anyhow::{Context, Result, bail};

use super::device::{self, RunningContestant, Target, spawn, wait_for};
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

/// A server that is measured.
pub struct Contestant {
    /// Name in tables.
    pub who: &'static str,
    /// It serves a raw file: a ceiling, not a rival.
    pub raw: bool,
    pub start: Start,
}

type Start = fn(&Programs, &Path) -> Result<RunningContestant>;

impl Contestant {
    const fn new(who: &'static str, start: Start) -> Contestant {
        Contestant {
            who,
            raw: false,
            start,
        }
    }

    const fn raw(who: &'static str, start: Start) -> Contestant {
        Contestant {
            raw: true,
            ..Contestant::new(who, start)
        }
    }
}

/// All, in the order in which they are measured: each beside its rival.
pub const ALL: &[Contestant] = &[
    Contestant::raw("raw file", raw_file),
    Contestant::raw("gaur ublk, raw", gaur_ublk_raw),
    Contestant::new("gaur ublk", gaur_ublk),
    Contestant::new("gaur ublk, direct", gaur_ublk_direct),
    Contestant::new("rublk", rublk),
    Contestant::new("qemu-nbd", qemu_nbd),
    Contestant::new("gaur NBD", gaur_nbd),
    Contestant::new("qsd NBD", qsd_nbd),
    Contestant::new("gaur VDUSE", gaur_vduse),
    Contestant::new("qsd VDUSE", qsd_vduse),
    Contestant::new("gaur FUSE", gaur_fuse),
    Contestant::new("qsd FUSE", qsd_fuse),
    Contestant::new("gaur vhost-user", gaur_vhost),
    Contestant::new("qsd vhost-user", qsd_vhost),
];

/// Connections of a network block device, and queues of the others.
const QUEUES: &str = "2";
const NBD: &str = "nbd0";
const VDUSE: &str = "bench";
/// Another name: a device may be left by the contestant that had it before.
const QSD_VDUSE: &str = "bench-qsd";

fn raw_file(_: &Programs, image: &Path) -> Result<RunningContestant> {
    Ok(RunningContestant::new(Target::Path(image.to_owned())))
}

fn gaur_ublk(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    ublk_by_gaur(programs, image, "qcow2", &[])
}

fn gaur_ublk_raw(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    ublk_by_gaur(programs, image, "raw", &[])
}

/// Past the page cache, as rublk does it.
fn gaur_ublk_direct(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    ublk_by_gaur(programs, image, "qcow2", &["--cache", "none"])
}

fn ublk_by_gaur(
    programs: &Programs,
    image: &Path,
    format: &str,
    more: &[&str],
) -> Result<RunningContestant> {
    let mut command = serve(programs, image, format);
    command.arg("--ublk").args(["--ublk-queues", QUEUES]);
    command.args(more);
    block_device(programs, command, "ublkb")
}

/// `gaur serve` with nothing said about how.
fn serve(programs: &Programs, image: &Path, format: &str) -> Command {
    let mut command = Command::new(&programs.gaur);
    command.arg("serve").args(["-f", format]).arg(image);
    command
}

/// A server that makes one block device by itself.
fn block_device(
    programs: &Programs,
    mut command: Command,
    prefix: &str,
) -> Result<RunningContestant> {
    let before = device::block_devices(prefix)?;
    let log = programs.dir.join("log");
    let mut server = spawn(&mut command, &log)?;
    let node = wait_for("a block device", &mut server, &log, || {
        device::new_block_device(prefix, &before)
    })?;
    Ok(RunningContestant::new(Target::Path(node)).with_server(server))
}

/// Its qcow2 takes one queue only.
fn rublk(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    let before = device::block_devices("ublkb")?;
    let log = programs.dir.join("log");
    let mut command = Command::new(&programs.rublk);
    command
        .args(["add", "qcow2", "--foreground", "-q", "1", "-f"])
        .arg(image);
    let mut server = spawn(&mut command, &log)?;
    let node = wait_for("a block device", &mut server, &log, || {
        device::new_block_device("ublkb", &before)
    })?;
    let name = node.file_name().unwrap_or_default().to_string_lossy();
    let number = name.trim_start_matches("ublkb").to_owned();
    let running = RunningContestant::new(Target::Path(node)).with_server(server);
    // Its own way to take a device away fails now and then, and the device stays.
    let program = programs.gaur.to_str().context("a path of odd characters")?;
    Ok(running.undone_by(program, &["ublk", "del", &number]))
}

fn qemu_nbd(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    let socket = programs.dir.join("nbd.sock");
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--format=qcow2", "--shared=16"]);
    command
        .args(qemu_nbd_aio(&programs.qemu_aio))
        .arg("--socket")
        .arg(&socket)
        .arg(image);
    attached(programs, command, &socket)
}

fn qemu_nbd_aio(aio: &str) -> Vec<String> {
    // Linux AIO needs files past the host's cache.
    let cache = if aio == "native" { "none" } else { "writeback" };
    vec![format!("--aio={aio}"), format!("--cache={cache}")]
}

fn gaur_nbd(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    let socket = programs.dir.join("nbd.sock");
    let mut command = serve(programs, image, "qcow2");
    command.args(["-t", "-e", "16", "-k"]).arg(&socket);
    attached(programs, command, &socket)
}

fn qsd_nbd(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    let socket = programs.dir.join("nbd.sock");
    let mut command = storage_daemon(programs, image)?;
    let path = socket.display();
    command.arg("--nbd-server").arg(format!(
        "addr.type=unix,addr.path={path},max-connections=16"
    ));
    command.args([
        "--export",
        "type=nbd,id=e,node-name=disk,name=,writable=on,iothread=t",
    ]);
    attached(programs, command, &socket)
}

/// The kernel's client connects to a server.
fn attached(programs: &Programs, mut command: Command, socket: &Path) -> Result<RunningContestant> {
    let server = listening(programs, &mut command, socket)?;
    let node = format!("/dev/{NBD}");
    let running = RunningContestant::new(Target::Path(node.clone().into())).with_server(server);
    succeed(
        Command::new("nbd-client")
            .arg("-unix")
            .arg(socket)
            .args([&node, "-C", QUEUES, "-N", ""]),
    )?;
    if device::sectors(NBD) == 0 {
        bail!("{node} has no size");
    }
    Ok(running.undone_by("nbd-client", &["-d", &node]))
}

/// Starts a server and waits until it listens at its socket.
fn listening(programs: &Programs, command: &mut Command, socket: &Path) -> Result<Child> {
    let _ = std::fs::remove_file(socket);
    let log = programs.dir.join("log");
    let mut server = spawn(command, &log)?;
    wait_for("the socket", &mut server, &log, || {
        Ok(UnixStream::connect(socket).ok().map(|_| ()))
    })?;
    Ok(server)
}

/// `qemu-storage-daemon` with the image as node `disk` and a thread for its export.
fn storage_daemon(programs: &Programs, image: &Path) -> Result<Command> {
    let aio = &programs.qemu_aio;
    let direct = if aio == "native" { "on" } else { "off" };
    let path = image.to_str().context("a path of odd characters")?;
    let mut command = Command::new("qemu-storage-daemon");
    command.args(["--object", "iothread,id=t", "--blockdev"]);
    command.arg(format!(
        "driver=file,node-name=file,filename={path},aio={aio},cache.direct={direct},discard=unmap"
    ));
    command.args([
        "--blockdev",
        "driver=qcow2,node-name=disk,file=file,discard=unmap",
    ]);
    Ok(command)
}

fn gaur_vduse(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    let mut command = serve(programs, image, "qcow2");
    command.args(["--vduse", VDUSE, "--queues", QUEUES]);
    block_device(programs, command, "vd")
}

fn qsd_vduse(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    let before = device::block_devices("vd")?;
    let mut command = storage_daemon(programs, image)?;
    command.arg("--export").arg(format!(
        "type=vduse-blk,id=e,node-name=disk,name={QSD_VDUSE},writable=on,num-queues={QUEUES},iothread=t"
    ));
    let log = programs.dir.join("log");
    let mut server = spawn(&mut command, &log)?;
    let control = PathBuf::from(format!("/dev/vduse/{QSD_VDUSE}"));
    wait_for("the VDUSE device", &mut server, &log, || {
        Ok(control.exists().then_some(()))
    })?;
    succeed(Command::new("vdpa").args(["dev", "add", "name", QSD_VDUSE, "mgmtdev", "vduse"]))?;
    let node = wait_for("a block device", &mut server, &log, || {
        device::new_block_device("vd", &before)
    })?;
    let running = RunningContestant::new(Target::Path(node)).with_server(server);
    Ok(running.undone_by("vdpa", &["dev", "del", QSD_VDUSE]))
}

fn gaur_fuse(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    let file = mount_point(programs)?;
    let mut command = serve(programs, image, "qcow2");
    command.arg("--fuse").arg(&file);
    mounted(programs, command, file)
}

fn qsd_fuse(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    let file = mount_point(programs)?;
    let mut command = storage_daemon(programs, image)?;
    let path = file.display();
    command.arg("--export").arg(format!(
        "type=fuse,id=e,node-name=disk,mountpoint={path},writable=on,iothread=t"
    ));
    mounted(programs, command, file)
}

fn mount_point(programs: &Programs) -> Result<PathBuf> {
    let file = programs.dir.join("disk.img");
    std::fs::write(&file, "")?;
    Ok(file)
}

/// A server that mounts the image over an empty file.
fn mounted(programs: &Programs, mut command: Command, file: PathBuf) -> Result<RunningContestant> {
    let log = programs.dir.join("log");
    let mut server = spawn(&mut command, &log)?;
    wait_for("the file", &mut server, &log, || {
        let len = std::fs::metadata(&file).map_or(0, |facts| facts.len());
        Ok((len > 0).then_some(()))
    })?;
    Ok(RunningContestant::new(Target::Path(file)).with_server(server))
}

fn gaur_vhost(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    let socket = programs.dir.join("vhost.sock");
    let mut command = serve(programs, image, "qcow2");
    command
        .arg("--vhost-user")
        .arg(&socket)
        .args(["--queues", QUEUES]);
    vhost(programs, command, socket)
}

fn qsd_vhost(programs: &Programs, image: &Path) -> Result<RunningContestant> {
    let socket = programs.dir.join("vhost.sock");
    let mut command = storage_daemon(programs, image)?;
    let path = socket.display();
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=e,node-name=disk,writable=on,num-queues={QUEUES},iothread=t,\
         addr.type=unix,addr.path={path}"
    ));
    vhost(programs, command, socket)
}

fn vhost(programs: &Programs, mut command: Command, socket: PathBuf) -> Result<RunningContestant> {
    let _ = std::fs::remove_file(&socket);
    let log = programs.dir.join("log");
    let mut server = spawn(&mut command, &log)?;
    // It may take one client only, which is to be the one that measures.
    wait_for("the socket", &mut server, &log, || {
        Ok(socket.exists().then_some(()))
    })?;
    Ok(RunningContestant::new(Target::Vhost(socket)).with_server(server))
}
