//! `--pin`, as the kernel reports it: memory is locked, and no thread of the server waits
//! for a device when it asks for memory.

use std::process::Command;

use gaur_interop::attached::{DeviceKind, Footprint, Shape, attach};
use gaur_interop::gaur::{binary, gaur, serve_with};
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::run;

const PLAIN: Shape = Shape {
    extended: false,
    backed: false,
};

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn a_server_is_pinned_when_it_is_asked_to_be() {
    let scratch = Scratch::new("pin");
    let image = PLAIN.create(&scratch, 256);
    let socket = scratch.path("socket");
    for (more, pinned) in [(&["--pin"][..], true), (&["--no-pin"], false), (&[], false)] {
        let server = serve_with(&image, &socket, more);
        let uri = format!("nbd+unix:///?socket={socket}");
        for command in ["write -P 7 1M 1M", "read -P 7 1M 1M"] {
            let done = run("qemu-io", &["-f", "raw", "-c", command, &uri]).ok();
            assert!(!done.stdout.contains("failed"), "{done}");
        }
        let footprint = Footprint::of(server.id());
        match pinned {
            true => footprint.assert_pinned(),
            false => footprint.assert_free(),
        }
        server.stop();
    }
}

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn the_server_of_a_device_is_pinned_unless_it_may_not() {
    let scratch = Scratch::new("device");
    let image = PLAIN.create(&scratch, 256);
    for via in [DeviceKind::Ublk, DeviceKind::Vduse] {
        let disk = attach(via, &image, &scratch, &[]);
        Footprint::of(disk.server()).assert_pinned();
        disk.detach();
        let disk = attach(via, &image, &scratch, &["--no-pin"]);
        Footprint::of(disk.server()).assert_free();
        disk.detach();
    }
}

/// All threads, those of the kernel that work for it, too.
#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn a_server_is_scheduled_first_when_it_is_asked_to_be() {
    let scratch = Scratch::new("first");
    let image = PLAIN.create(&scratch, 256);
    let disk = attach(DeviceKind::Ublk, &image, &scratch, &["--realtime"]);
    let of = format!("of={}", disk.path());
    let write = ["if=/dev/zero", &of, "bs=1M", "count=64", "oflag=direct"];
    run("dd", &write).ok();
    let footprint = Footprint::of(disk.server());
    footprint.assert_pinned();
    let mut threads = [&footprint.flushers[..], &footprint.strangers].concat();
    threads.sort();
    let mut first = footprint.real_time.clone();
    first.sort();
    assert_eq!(first, threads, "{footprint:?}");
    disk.detach();
    let disk = attach(DeviceKind::Ublk, &image, &scratch, &[]);
    let footprint = Footprint::of(disk.server());
    assert!(footprint.real_time.is_empty(), "{footprint:?}");
    disk.detach();
}

/// Threads that were there before the first device are its server's, too.
#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn a_server_is_pinned_when_it_gets_a_device_later() {
    let scratch = Scratch::new("later");
    let (first, second) = (scratch.path("first.qcow2"), scratch.path("second.qcow2"));
    for image in [&first, &second] {
        gaur(&["create", "-q", image, "256M"]).ok();
    }
    let (socket, control) = (scratch.path("socket"), scratch.path("control"));
    let mut command = Command::new(binary());
    command.args(["serve", "-e", "0", "-k", &socket, "--control", &control]);
    command.arg(&first);
    let server = Server::start(command, &socket);
    let before = Footprint::of(server.id());
    assert_eq!(before.locked_kib, 0, "{before:?}");
    gaur(&["export", "add", "--control", &control, "--ublk", &second]).ok();
    Footprint::of(server.id()).assert_pinned();
    let of = "of=/dev/ublkb0";
    run(
        "dd",
        &["if=/dev/zero", of, "bs=1M", "count=16", "oflag=direct"],
    )
    .ok();
    let snapshot = ["snapshot", "create", "--control", &control];
    gaur(&[&snapshot[..], &["-x", "second", "one"]].concat()).ok();
    Footprint::of(server.id()).assert_pinned();
    server.stop();
}
