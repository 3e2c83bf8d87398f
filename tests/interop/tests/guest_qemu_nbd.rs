//! `qemu-nbd -c` and `-d`: images as devices of the kernel's NBD client, beside QEMU's program.

use std::path::Path;
use std::time::{Duration, Instant};

use gaur_interop::filesystem::Kind;
use gaur_interop::gaur::binary;
use gaur_interop::in_path::InPath;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

const MIB: u64 = 1 << 20;
const SIZE_MIB: u64 = 128;
/// Where the partition is, in sectors.
const START: u32 = 2048;

/// QEMU's program, and a link to ours.
fn programs(scratch: &Scratch) -> [String; 2] {
    // Where both listen.
    std::fs::create_dir_all("/run/lock").expect("the guest has a /run of its own");
    let link = scratch.path("qemu-nbd");
    std::os::unix::fs::symlink(binary(), &link).expect("scratch holds links");
    [link, "qemu-nbd".to_owned()]
}

/// An image with a partition table and one partition to the end.
fn partitioned(scratch: &Scratch) -> String {
    let (raw, image) = (scratch.path("raw"), scratch.path("disk.qcow2"));
    let sectors = u32::try_from(SIZE_MIB * MIB / 512).expect("a small disk") - START;
    let mut table = vec![0; 512];
    table[446 + 4] = 0x83;
    table[446 + 8..446 + 12].copy_from_slice(&START.to_le_bytes());
    table[446 + 12..446 + 16].copy_from_slice(&sectors.to_le_bytes());
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    std::fs::write(&raw, table).expect("scratch is writable");
    let file = std::fs::File::options().write(true).open(&raw);
    file.and_then(|file| file.set_len(SIZE_MIB * MIB))
        .expect("longer");
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &raw, &image]).ok();
    std::fs::remove_file(raw).expect("it was made");
    image
}

#[track_caller]
fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_there() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_connected(device: &str) -> bool {
    Path::new(&format!("/sys/block/{device}/pid")).exists()
}

fn size_bytes(device: &str) -> u64 {
    let size = std::fs::read_to_string(format!("/sys/block/{device}/size")).expect("a device");
    size.trim().parse::<u64>().expect("a number") * 512
}

/// The image is nobody's any more.
#[track_caller]
fn wait_until_closed(image: &str) {
    wait_for("the image is closed", || {
        qemu_img(&["check", "-q", image]).code == 0
    });
}

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn device_is_connected_with_its_partitions_and_disconnected_in_order() {
    let scratch = Scratch::new("nbd-device");
    let image = partitioned(&scratch);
    let [ours, theirs] = programs(&scratch);
    run(&ours, &["-c", "/dev/nbd0", "-f", "qcow2", &image]).ok();
    assert!(is_connected("nbd0"));
    assert_eq!(size_bytes("nbd0"), SIZE_MIB * MIB);
    // What scripts look for.
    assert!(Path::new("/var/lock/qemu-nbd-nbd0").exists());
    assert!(Path::new("/dev/nbd0p1").exists());
    Kind::Ext4.make("/dev/nbd0p1");
    let mounted = Kind::Ext4.mount("/dev/nbd0p1", &scratch);
    mounted.shell("head -c 40M /dev/urandom >big; sha256sum big >sum", &[]);
    mounted.unmount();
    let gone = run(&ours, &["-d", "/dev/nbd0"]).ok();
    assert_eq!(gone.stdout, "/dev/nbd0 disconnected\n");
    assert!(!is_connected("nbd0"));
    wait_until_closed(&image);
    assert!(!Path::new("/var/lock/qemu-nbd-nbd0").exists());
    assert_clean(&image);
    // A device that is not connected may be disconnected, as with QEMU.
    for program in [&ours, &theirs] {
        let gone = run(program, &["-d", "/dev/nbd0"]).ok();
        assert_eq!(gone.stdout, "/dev/nbd0 disconnected\n");
    }
    // Each disconnects the other's.
    for (first, second) in [(&ours, &theirs), (&theirs, &ours)] {
        run(first, &["--connect=/dev/nbd1", "-r", &image]).ok();
        wait_for("the device", || size_bytes("nbd1") == SIZE_MIB * MIB);
        wait_for("the partition", || Path::new("/dev/nbd1p1").exists());
        let read_only = std::fs::read_to_string("/sys/block/nbd1/ro").expect("a device");
        assert_eq!(read_only, "1\n");
        Kind::Ext4.check("/dev/nbd1p1");
        run(second, &["--disconnect", "/dev/nbd1"]).ok();
        wait_for("the end", || !is_connected("nbd1"));
        wait_until_closed(&image);
    }
}

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn device_that_cannot_be_connected_is_refused_in_a_line() {
    let scratch = Scratch::new("nbd-refused");
    let image = partitioned(&scratch);
    let [ours, theirs] = programs(&scratch);
    let refused = |device: &str, image: &str, words: &str| {
        let socket = scratch.path("s");
        let run = run(&ours, &["-k", &socket, "-c", device, "-f", "qcow2", image]);
        let run = run.refused();
        assert!(run.stderr.contains(words), "{words}: {run}");
        assert!(!Path::new(&socket).exists(), "the socket is gone");
        wait_until_closed(&scratch.path("disk.qcow2"));
    };
    refused(
        "/dev/null",
        &image,
        "is no device of the kernel's NBD client",
    );
    refused("/dev/nbd99", &image, "cannot open");
    refused("/dev/nbd2", "/nowhere", "/nowhere");
    let other = scratch.path("other.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &other, "1M"]).ok();
    for program in [&ours, &theirs] {
        run(program, &["-c", "/dev/nbd2", "-f", "qcow2", &other]).ok();
        wait_for("the device", || is_connected("nbd2"));
        refused("/dev/nbd2", &image, "in use");
        assert!(is_connected("nbd2"));
        run(program, &["-d", "/dev/nbd2"]).ok();
        wait_until_closed(&other);
    }
}

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn server_in_the_foreground_takes_the_device_with_it() {
    let scratch = Scratch::new("nbd-foreground");
    let image = partitioned(&scratch);
    let [ours, _] = programs(&scratch);
    let mut server = std::process::Command::new(&ours)
        .args(["-v", "-c", "/dev/nbd3", "-f", "qcow2", &image])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    wait_for("the device", || Path::new("/dev/nbd3p1").exists());
    Kind::Ext4.make("/dev/nbd3p1");
    run("kill", &[&server.id().to_string()]).ok();
    let status = server.wait().expect("its end");
    assert!(status.success(), "{status}");
    wait_for("the end", || !is_connected("nbd3"));
    let mut said = String::new();
    let mut stdout = server.stdout.take().expect("a pipe");
    std::io::Read::read_to_string(&mut stdout, &mut said).expect("text");
    assert_eq!(
        said,
        format!("NBD device /dev/nbd3 is now connected to {image}\n")
    );
    assert_clean(&image);
    // One that was killed leaves no device behind either.
    let pid = scratch.path("pid");
    let line = ["--pid-file", &pid, "-c", "/dev/nbd3", "-f", "qcow2", &image];
    run(&ours, &line).ok();
    let pid = std::fs::read_to_string(pid).expect("the file is there");
    run("kill", &["-9", pid.trim()]).ok();
    wait_for("the end", || !is_connected("nbd3"));
    wait_until_closed(&image);
}

/// cloud-image-utils, unchanged: it connects, mounts, runs a command and disconnects.
#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn mount_image_callback_changes_an_image() {
    let scratch = Scratch::new("nbd-callback");
    let image = partitioned(&scratch);
    let [ours, _] = programs(&scratch);
    run(&ours, &["-c", "/dev/nbd0", "-f", "qcow2", &image]).ok();
    Kind::Ext4.make("/dev/nbd0p1");
    run(&ours, &["-d", "/dev/nbd0"]).ok();
    wait_until_closed(&image);
    let users = InPath::new("nbd-callback");
    let call = "mount-image-callback \"$1\" -- sh -c \"$2\"";
    users.script(call, &[&image, "echo changed >\"${MOUNTPOINT}\"/file"]);
    users.assert_called("qemu-img info ");
    users.assert_called("qemu-nbd --format=qcow2 --connect /dev/nbd0 ");
    users.assert_called("qemu-nbd --disconnect /dev/nbd0");
    wait_until_closed(&image);
    let again = users.script(call, &[&image, "cat \"${MOUNTPOINT}\"/file"]);
    assert_eq!(again.stdout, "changed\n");
}
