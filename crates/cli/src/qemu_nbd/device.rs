//! `qemu-nbd -c` and `-d`: the kernel's NBD client on the server of this process.
//!
//! Two threads beside the server's: one is the client until transmission begins, and then the kernel's as long as the
//! device lasts; the other waits until the device is there, and has the kernel look for partitions. Only then the
//! process in the foreground ends, so that a script finds all devices.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gaur_block::Errno;
use gaur_reactor::{NbdDevice, NbdGeometry, SecureStream};
use gaur_server::server::Stopper;

use crate::background::{self, KeepStderr};
use crate::failure::Failure;
use crate::qemu_nbd::list::{self, Client, Export, Place};

/// Where QEMU's program listens for the device's connection.
const SOCKETS: &str = "/var/lock";
/// Bytes in which the kernel counts, and the least that a request has.
const SECTOR_BYTES: u32 = 512;
/// How long the kernel may take to show a device that it has, or to take one away.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at the kernel's files.
const PAUSE: Duration = Duration::from_millis(2);

/// The path of the socket for a device, unless one is named.
pub fn socket_path(device: &Path) -> PathBuf {
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    Path::new(SOCKETS).join(format!("qemu-nbd-{name}"))
}

/// A device to connect, and what to say when it is there.
#[derive(Clone, Debug)]
pub struct Connection {
    pub device: PathBuf,
    pub socket: PathBuf,
    pub export: String,
    /// The image, for a message.
    pub image: String,
    pub forked: Option<KeepStderr>,
    pub verbose: bool,
}

impl Connection {
    /// Connects the device once the server takes clients, and stops the server when that fails.
    pub fn start(self, server: Stopper) -> Result<JoinHandle<Result<(), Failure>>, Failure> {
        let thread = std::thread::Builder::new().name("device".to_owned());
        let run = move || {
            let done = self.run();
            if done.is_err() {
                server.stop();
            }
            done
        };
        let started = thread.spawn(run);
        started.map_err(|error| Failure::io("the thread of the device", &error))
    }

    fn run(&self) -> Result<(), Failure> {
        let stream = Arc::new(list::connect(&Place::Unix(&self.socket))?);
        let client = Client {
            stream: SecureStream::plain(Arc::clone(&stream)),
        };
        client.greet()?;
        let mut export = Export::named(self.export.clone());
        client.go(&mut export)?;
        let geometry = geometry(&export);
        let fail = |errno| refused(&self.device, errno);
        let device = NbdDevice::open(&self.device).map_err(fail)?;
        let socket = std::os::fd::AsFd::as_fd(&*stream);
        device.set_up(socket, geometry).map_err(fail)?;
        let has_ended = Arc::new(AtomicBool::new(false));
        let (watched, ended) = (self.clone(), Arc::clone(&has_ended));
        let watch = move || watched.wait(geometry, &ended);
        let thread = std::thread::Builder::new().name("device".to_owned());
        let watch = thread.spawn(watch);
        let watch = watch.map_err(|error| Failure::io("a thread of the device", &error))?;
        let ran = device.run();
        has_ended.store(true, Ordering::Release);
        let watched = watch.join().unwrap_or(Ok(()));
        ran.map_err(fail).and(watched)
    }

    /// Waits until the kernel has the device, and says so.
    fn wait(&self, geometry: NbdGeometry, ended: &AtomicBool) -> Result<(), Failure> {
        let files = KernelFiles::of(&self.device);
        let bytes = geometry.blocks * u64::from(geometry.block_bytes);
        let start = Instant::now();
        while !files.shows(bytes / u64::from(SECTOR_BYTES)) {
            if ended.load(Ordering::Acquire) {
                return Ok(()); // The other thread knows why.
            }
            if start.elapsed() > PATIENCE {
                let _ = NbdDevice::open(&self.device).map(|device| device.disconnect());
                let message = "the kernel does not show that it is connected";
                return Err(Failure::about(&self.device, message));
            }
            std::thread::sleep(PAUSE);
        }
        // It is opened for this alone: the kernel then looks for partitions.
        drop(std::fs::File::open(&self.device));
        let mut out = std::io::stdout();
        if self.verbose {
            let device = self.device.display();
            writeln!(
                out,
                "NBD device {device} is now connected to {}",
                self.image
            )?;
        }
        match self.forked {
            Some(keep) => background::ready(&mut out, keep),
            None => Ok(()),
        }
    }
}

/// What the kernel is told of an export: it has sectors of 512 bytes or more, and a size in them.
fn geometry(export: &Export) -> NbdGeometry {
    let least = export.blocks.map_or(SECTOR_BYTES, |[minimum, ..]| minimum);
    let block_bytes = least.max(SECTOR_BYTES);
    NbdGeometry {
        block_bytes,
        blocks: export.size_bytes / u64::from(block_bytes),
        flags: export.flags,
    }
}

/// What the kernel shows of a device.
struct KernelFiles(PathBuf);

impl KernelFiles {
    fn of(device: &Path) -> KernelFiles {
        let device = device.canonicalize().unwrap_or_else(|_| device.to_owned());
        KernelFiles(Path::new("/sys/block").join(device.file_name().unwrap_or_default()))
    }

    fn is_connected(&self) -> bool {
        self.0.join("pid").exists()
    }

    /// Whether it is connected and has this size.
    fn shows(&self, sectors: u64) -> bool {
        let size = std::fs::read_to_string(self.0.join("size")).unwrap_or_default();
        self.is_connected() && size.trim().parse() == Ok(sectors)
    }
}

/// Disconnects a device, and waits until the kernel has let go of it.
pub fn disconnect(path: &Path, out: &mut dyn Write) -> Result<(), Failure> {
    let fail = |errno| refused(path, errno);
    let device = NbdDevice::open(path).map_err(fail)?;
    device.disconnect().map_err(fail)?;
    drop(device);
    let files = KernelFiles::of(path);
    let start = Instant::now();
    while files.is_connected() {
        if start.elapsed() > PATIENCE {
            let failure = Failure::about(path, "the kernel does not let go of it");
            return Err(failure.hint("it may be mounted"));
        }
        std::thread::sleep(PAUSE);
    }
    writeln!(out, "{} disconnected", path.display())?;
    Ok(())
}

/// Why a device cannot be had.
fn refused(device: &Path, errno: Errno) -> Failure {
    let fail = |message: String| Failure::about(device, message);
    match errno {
        Errno::EBUSY => fail("is in use".to_owned()).hint("qemu-nbd -d disconnects it"),
        Errno::ENOTTY => fail("is no device of the kernel's NBD client".to_owned()),
        Errno::ENOENT | Errno::ENXIO => {
            fail(format!("cannot open: {errno}")).hint("'modprobe nbd' makes such devices")
        }
        _ => fail(format!("cannot connect or disconnect: {errno}")),
    }
}
