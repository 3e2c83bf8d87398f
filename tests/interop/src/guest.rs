//! A real distribution's root file system and a kernel that boots from it.
//!
//! Both come from the mirror that this machine's package manager uses, and are made once
//! ([`gaur_artifacts`]): `debootstrap` takes half a minute, the kernel is a download. Nothing is
//! installed; the kernel's package is only unpacked.

use std::path::{Path, PathBuf};

use gaur_artifacts::Cache;

use crate::scratch::Scratch;
use crate::tool::{Run, run, run_for};

/// The modules a kernel needs to see a virtio disk, whichever of them it has built in.
const MODULES: [&str; 6] = [
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
];

/// How the guest starts: it loads the modules (each needs others, in an order that differs between
/// kernels).
const START: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for round in 1 2 3 4; do
    for module in /modules/*; do insmod $module 2>/dev/null; done
done
"#;

/// Mounts the disk, and lets the distribution's own programs write to it.
const USE: &str = r#"mount -t ext4 /dev/vda /disk || { echo GUEST FAILED; poweroff -f; }
chroot /disk /bin/sh -ec '
    mkdir /gaur
    dd if=/dev/urandom of=/gaur/random bs=64k count=64
    dpkg -l >/gaur/packages
    cp -a /usr/share/zoneinfo /gaur/copy
    rm -rf /usr/share/doc /var/cache/debconf
    sync
    cd /gaur && sha256sum random packages
' && echo GUEST DONE
umount /disk
poweroff -f
"#;

/// A kernel and an initial RAM disk for it.
#[derive(Debug)]
pub struct Kernel {
    /// The kernel's image.
    pub image: String,
    /// The initial RAM disk.
    pub initrd: String,
}

/// Runs a shell line that must succeed; `$1` and on are the arguments.
#[track_caller]
fn shell(script: &str, arguments: &[&str]) -> Run {
    let script = format!("set -eu -o pipefail\n{script}");
    let mut line = vec!["-c", &script, "shell"];
    line.extend(arguments);
    run_for("bash", &line, 600).ok()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the cache has a UTF-8 name")
}

/// What this machine's release calls itself, and its architecture: `bookworm-amd64`. Part of the names of
/// what is made from its packages.
pub(crate) fn release() -> String {
    let script = r#"
. /etc/os-release
echo "$VERSION_CODENAME-$(dpkg --print-architecture)""#;
    shell(script, &[]).stdout.trim().to_owned()
}

/// An artifact that a shell script makes at `$1`, on first use. It works in a folder for temporary files,
/// for `debootstrap` takes no path with spaces.
#[track_caller]
pub(crate) fn artifact(name: &str, script: &str) -> PathBuf {
    let make = |new: &Path| {
        let scratch = Scratch::new("artifact");
        let script = format!("cd \"$2\"\n{script}");
        shell(&script, &[text(new), text(scratch.folder())]);
        Ok(())
    };
    let cache = Cache::open().unwrap_or_else(|error| panic!("{error}"));
    let made = cache.get(name, make);
    made.unwrap_or_else(|error| panic!("{error}"))
}

/// A tar file of the smallest Debian system.
pub fn root_tar() -> PathBuf {
    artifact(
        &format!("root-{}.tar.zst", release()),
        r#"
code=$(. /etc/os-release && echo "$VERSION_CODENAME")
mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Created-By: Packages' |
    awk -v code="$code" '$2 == code && !url { url = $1 } END { print url }')
debootstrap --variant=minbase "$code" root "$mirror" >&2
tar --zstd -C root -cf "$1" .
"#,
    )
}

/// The kernel's package, unpacked.
fn kernel_dir() -> PathBuf {
    artifact(
        &format!("boot-kernel-{}", release()),
        r#"
arch=$(dpkg --print-architecture)
for meta in "linux-image-cloud-$arch" "linux-image-$arch"; do
    package=$(apt-cache depends --important "$meta" | awk '/Depends: linux-image-[0-9]/ { print $2; exit }')
    [ -z "$package" ] || break
done
apt-get download -q "$package" >&2
dpkg -x ./*.deb "$1"
"#,
    )
}

/// Says how large the disk is whenever that changes, up to 1 GiB, and writes to its end then.
const WATCH: &str = r#"
size=0
until [ $size = 2097152 ]; do
    new=$(cat /sys/block/vda/size)
    [ $new = $size ] || echo "GUEST SIZE $new"
    size=$new
    sleep 0.1
done
dd if=/dev/zero bs=1M count=1 | tr '\0' g >/block
dd if=/block of=/dev/vda bs=1M seek=1023 && sync && echo GUEST DONE
poweroff -f
"#;

/// A kernel and an initial RAM disk with which it mounts its disk and writes to it.
pub fn kernel(scratch: &Scratch) -> Kernel {
    kernel_with(scratch, USE)
}

/// A kernel and an initial RAM disk with which it watches the size of its disk.
pub fn watching_kernel(scratch: &Scratch) -> Kernel {
    kernel_with(scratch, WATCH)
}

fn kernel_with(scratch: &Scratch, script: &str) -> Kernel {
    let folder = kernel_dir();
    let initrd = scratch.path("initrd.gz");
    let tree = scratch.path("initrd");
    std::fs::create_dir(&tree).expect("scratch is writable");
    let init = format!("{START}{script}");
    std::fs::write(format!("{tree}/init"), init).expect("scratch is writable");
    let mut arguments = vec![text(&folder), &tree, &initrd];
    arguments.extend(MODULES);
    shell(
        r#"
kernel=$1 tree=$2 initrd=$3
shift 3
cd "$tree"
mkdir bin proc sys dev disk modules
cp "$(command -v busybox)" bin/
chmod +x init
for module; do
    find "$kernel" "(" -name "$module.ko" -o -name "$module.ko.xz" ")" -exec cp {} modules/ ";"
done
xz -d modules/*.xz 2>/dev/null || true
find . | cpio --quiet -o -H newc | gzip -1 >"$initrd"
"#,
        &arguments,
    );
    let image = run("find", &[text(&folder), "-name", "vmlinuz-*"]).ok();
    Kernel {
        image: image.stdout.trim().to_owned(),
        initrd,
    }
}

/// A raw disk of 1 GiB whose ext4 file system holds the distribution.
pub fn root_disk(scratch: &Scratch) -> String {
    let raw = scratch.zeros("root.raw", 1 << 30);
    let tar = root_tar();
    let tree = scratch.path("tree");
    shell(
        r#"
mkdir "$1"
tar --zstd -C "$1" -xf "$2"
mkfs.ext4 -q -F -d "$1" "$3"
rm -rf "$1"
"#,
        &[&tree, text(&tar), &raw],
    );
    raw
}

/// Boots the kernel with an export as its only disk, and returns what it said when it has gone.
pub fn boot(kernel: &Kernel, uri: &str) -> Run {
    let drive = format!("file={uri},format=raw,if=virtio,cache=none,discard=unmap");
    let arguments = [
        "-accel",
        "tcg",
        "-m",
        "512",
        "-nographic",
        "-no-reboot",
        "-nic",
        "none",
        "-kernel",
        &kernel.image,
        "-initrd",
        &kernel.initrd,
        "-append",
        "console=ttyS0 quiet panic=-1",
        "-drive",
        &drive,
    ];
    run_for("qemu-system-x86_64", &arguments, 400)
}
