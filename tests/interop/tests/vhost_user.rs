//! QEMU's machine boots from an image that Gaur serves over vhost-user.

use std::time::Duration;

use gaur_interop::gaur::{first_export, gaur};
use gaur_interop::guest;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};
use gaur_interop::vhost_user::{Machine, Server};

/// Longest life of a guest: the machine is emulated.
const LIFE: Duration = Duration::from_secs(400);

/// An overlay on a distribution's disk.
fn disk(scratch: &Scratch) -> String {
    let raw = guest::root_disk(scratch);
    let overlay = scratch.path("overlay.qcow2");
    let create = [
        "create", "-q", "-f", "qcow2", "-b", &raw, "-F", "raw", &overlay,
    ];
    gaur(&create).ok();
    overlay
}

/// The file system is without a fault, and the files of the guest are what it said they were.
#[track_caller]
fn assert_as_the_guest_said(image: &str, said: &str, scratch: &Scratch) {
    assert!(said.contains("GUEST DONE"), "{said}");
    let disk = scratch.path("disk.raw");
    gaur(&["convert", "-O", "raw", image, &disk]).ok();
    run("e2fsck", &["-fn", &disk]).ok();
    for name in ["random", "packages"] {
        let file = scratch.path(name);
        let dump = format!("dump /gaur/{name} {file}");
        run("debugfs", &["-R", &dump, &disk]).ok();
        let sum = run("sha256sum", &[&file]).ok().stdout;
        let sum = sum.split_whitespace().next().expect("a sum and a name");
        let line = format!("{sum}  {name}");
        assert!(said.contains(&line), "{name} differs: {said}");
    }
}

#[test]
fn a_machine_boots_and_its_server_stops_in_good_order() {
    let scratch = Scratch::new("vhost-user");
    let image = disk(&scratch);
    let kernel = guest::kernel(&scratch);
    let socket = scratch.path("s");
    let server = Server::start(&image, &socket, &[]);
    let said = Machine::boot(&kernel, &socket, "").output(LIFE);
    server.stop();
    assert_clean(&image);
    assert_as_the_guest_said(&image, &said, &scratch);
}

/// Every request that was in flight is done again, what was answered is there, and the guest sees no
/// more than a pause.
#[test]
fn a_machine_goes_on_when_its_server_is_killed_again_and_again() {
    let scratch = Scratch::new("vhost-user-kill");
    let image = disk(&scratch);
    let kernel = guest::kernel(&scratch);
    let socket = scratch.path("s");
    let more = ["--queues", "2"];
    let mut server = Server::start(&image, &socket, &more);
    let mut machine = Machine::boot(&kernel, &socket, "");
    let mut kills = 0;
    // The guest needs some seconds until it uses its disk.
    std::thread::sleep(Duration::from_secs(4));
    while machine.is_on() {
        std::thread::sleep(Duration::from_millis(700 + 100 * (kills % 7)));
        server.kill();
        server = Server::start(&image, &socket, &more);
        kills += 1;
    }
    let said = machine.output(LIFE);
    server.stop();
    println!("{kills} kills");
    let check = qemu_img(&["check", &image]);
    assert!(matches!(check.code, 0 | 3), "more than leaks: {check}");
    assert_as_the_guest_said(&image, &said, &scratch);
}

/// A handover log kept for a machine is useless once that machine is gone: another program may have
/// written to the image since.
#[test]
fn nothing_is_taken_over_for_a_machine_that_is_gone() {
    let scratch = Scratch::new("vhost-user-gone");
    let image = disk(&scratch);
    let kernel = guest::kernel(&scratch);
    let socket = scratch.path("s");
    // The end first: no cluster lies where the machine's server put it.
    let writes = ["-c", "write -P 77 63M 1M", "-c", "write -P 77 0 63M"];
    let untouched = scratch.path("untouched.qcow2");
    std::fs::copy(&image, &untouched).expect("a copy");
    // A server has something to keep for some of the time.
    for round in 0.. {
        assert!(round < 30, "the machine has never written anything");
        std::fs::copy(&untouched, &image).expect("a copy");
        let server = Server::start(&image, &socket, &[]);
        let before = std::fs::metadata(&image).expect("it is there").len();
        let machine = Machine::boot(&kernel, &socket, "");
        let start = std::time::Instant::now();
        let grown = before + ((4 + round % 4) << 20);
        // Its data is in the file, and with luck nothing in its tables says so yet.
        while std::fs::metadata(&image).expect("it is there").len() < grown {
            assert!(start.elapsed() < LIFE, "the guest does not write");
            std::thread::sleep(Duration::from_millis(1));
        }
        server.kill();
        machine.kill();
        // Another writer fills the disk, and so takes the space that the machine's data lies in.
        let waits = std::time::Instant::now();
        while run("qemu-io", &[&writes[..], &[&image]].concat()).code != 0 {
            let patient = waits.elapsed() < Duration::from_secs(20);
            assert!(patient, "the image stays locked");
            std::thread::sleep(Duration::from_millis(50));
        }
        Server::start(&image, &socket, &[]).stop();
        let told = Server::told(&socket);
        assert!(!told.contains("taken over"), "{told}");
        let check = qemu_img(&["check", &image]);
        assert!(matches!(check.code, 0 | 3), "more than leaks: {check}");
        run("qemu-io", &["-c", "read -P 77 0 64M", &image]).ok();
        if told.contains("whoever used its disk is gone") {
            println!("round {round}");
            break;
        }
    }
}

/// The machine gets an interrupt, its kernel looks at the new size, and what is new can be written to.
#[test]
fn a_machine_sees_its_disk_grow_and_shrink() {
    let scratch = Scratch::new("vhost-user-resize");
    let image = scratch.path("disk.qcow2");
    gaur(&["create", "-q", &image, "256M"]).ok();
    let kernel = guest::watching_kernel(&scratch);
    let (socket, control) = (scratch.path("s"), scratch.path("c"));
    let server = Server::start(&image, &socket, &["--control", &control]);
    let mut machine = Machine::boot(&kernel, &socket, "");
    machine.wait_for("GUEST SIZE 524288", LIFE);
    let name = first_export(&control);
    let resize = ["export", "resize", "--shrink", "--control", &control, &name];
    for (size, sectors) in [("300M", 614_400), ("128M", 262_144), ("1G", 2_097_152)] {
        gaur(&[&resize[..], &[size]].concat()).ok();
        machine.wait_for(&format!("GUEST SIZE {sectors}"), LIFE);
    }
    let said = machine.output(LIFE);
    assert!(said.contains("GUEST DONE"), "{said}");
    server.stop();
    assert_clean(&image);
    let read = ["-r", "-c", "read -P 103 1023M 1M", &image];
    let read = run("qemu-io", &read).ok();
    assert!(!read.stdout.contains("failed"), "{read}");
}
