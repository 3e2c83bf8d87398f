//! What the three ways have in common.

use std::time::{Duration, Instant};

use crate::attached::nbd::NbdDevice;
use crate::attached::ublk::UblkDevice;
use crate::attached::vduse::VduseDevice;
use crate::scratch::Scratch;
use crate::tool::{Run, qemu_img, run};

/// How an image becomes a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// `gaur serve` and the kernel's NBD client.
    Nbd,
    /// `gaur ublk add`.
    Ublk,
    /// `gaur serve --vduse` and the kernel's virtio driver.
    Vduse,
}

/// A way's own part: a device and the server behind it.
pub(super) trait Attachment: std::fmt::Debug {
    /// The device's name without a path, `nbd0` for example.
    fn name(&self) -> String;
    /// Process number of the server.
    fn server(&self) -> u32;
    /// Waits until a server that was killed is gone.
    fn reap(&mut self);
    /// Starts another server for the same device.
    fn recover(&mut self);
    /// Removes the device and lets the server end; asserts that it did so in good order.
    fn detach(&mut self);
}

/// An image that is a block device, until it is detached.
#[derive(Debug)]
pub struct Attached {
    inner: Box<dyn Attachment>,
    image: String,
}

/// Makes an image a block device. More arguments are for the server.
#[track_caller]
pub fn attach(via: DeviceKind, image: &str, scratch: &Scratch, more: &[&str]) -> Attached {
    start(via, image, scratch, more, false)
}

/// Makes an image a block device whose requests wait for the next server when one dies.
#[track_caller]
pub fn attach_lasting(via: DeviceKind, image: &str, scratch: &Scratch, more: &[&str]) -> Attached {
    start(via, image, scratch, more, true)
}

#[track_caller]
fn start(
    via: DeviceKind,
    image: &str,
    scratch: &Scratch,
    more: &[&str],
    lasting: bool,
) -> Attached {
    let inner: Box<dyn Attachment> = match via {
        DeviceKind::Nbd => Box::new(NbdDevice::start(image, scratch, more, lasting)),
        DeviceKind::Ublk => Box::new(UblkDevice::start(image, more)),
        DeviceKind::Vduse => Box::new(VduseDevice::start(image, more)),
    };
    let attached = Attached {
        inner,
        image: image.to_owned(),
    };
    wait_until("the device has a size", || attached.size_bytes() > 0);
    attached
}

impl Attached {
    /// The device's path.
    pub fn path(&self) -> String {
        format!("/dev/{}", self.inner.name())
    }

    /// The device's size as the kernel has it, in bytes; 0 if there is no such device.
    pub fn size_bytes(&self) -> u64 {
        let sectors = self.attribute("size");
        sectors.parse::<u64>().unwrap_or(0) * 512
    }

    /// An attribute of the device, `queue/logical_block_size` for example; empty if there is none.
    pub fn attribute(&self, name: &str) -> String {
        let path = format!("/sys/block/{}/{name}", self.inner.name());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.trim().to_owned()
    }

    /// Process number of the server.
    pub fn server(&self) -> u32 {
        self.inner.server()
    }

    /// Kills the server, as a crash would. Requests wait.
    pub fn kill(&mut self) {
        run("kill", &["-KILL", &self.server().to_string()]).ok();
        self.inner.reap();
    }

    /// Starts another server; requests go on.
    #[track_caller]
    pub fn recover(&mut self) {
        self.inner.recover();
    }

    /// Removes the device, and asserts that the server ended in good order.
    #[track_caller]
    pub fn detach_unchecked(mut self) {
        self.inner.detach();
    }

    /// Removes the device, and asserts that the server ended in good order and that nothing is wrong
    /// with the image.
    #[track_caller]
    pub fn detach(mut self) {
        self.inner.detach();
        qemu_img(&["check", &self.image]).ok();
        crate::gaur::gaur(&["check", &self.image]).ok();
    }
}

/// Waits for something that is due any moment.
#[track_caller]
pub(super) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "waited in vain: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asserts that an image has leaks at worst, as a crash may leave them. Returns what QEMU said.
#[track_caller]
pub fn assert_leaks_at_worst(image: &str) -> Run {
    let theirs = qemu_img(&["check", "-U", image]);
    assert!(
        theirs.code == 0 || theirs.code == 3,
        "more than leaks: {theirs}"
    );
    let ours = crate::gaur::gaur(&["check", "-U", image]);
    assert_eq!(ours.code, theirs.code, "{ours}\n{theirs}");
    theirs
}
