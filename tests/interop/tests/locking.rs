//! Gaur and QEMU never write one image at the same time: each respects the other's locks.

use std::process::Command;
use std::time::{Duration, Instant};

use gaur_interop::builder::create;
use gaur_interop::gaur::{binary, gaur, serve, serve_with};
use gaur_interop::layout::Layout;
use gaur_interop::nbd::Server;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, assert_clean, qemu_img};

const WRITE: [Op; 1] = [Op::Write {
    offset: 0,
    len: 4096,
    pattern: 1,
}];

fn image(scratch: &Scratch, name: &str) -> String {
    let path = scratch.path(name);
    create(&path, &Layout::v3(65536));
    path
}

/// Asserts that QEMU cannot write to the image and says that it is because of a lock.
fn qemu_is_kept_out(image: &str) {
    let run = op::try_apply("qcow2", image, &WRITE);
    assert!(
        run.code != 0,
        "QEMU wrote to an image that is being served: {run}"
    );
    assert!(run.stderr.contains("lock"), "{run}");
}

/// Tries to serve an image and returns what Gaur said when it refused.
fn refused_to_serve(image: &str, scratch: &Scratch, more: &[&str]) -> Run {
    let socket = scratch.path("refused");
    let mut command = Command::new(binary());
    command
        .args(["serve", "--persistent", "--socket", &socket])
        .args(more)
        .arg(image);
    match Server::try_start(command, &socket) {
        Ok(_) => panic!("{image} is served although it is locked"),
        Err(run) => run.refused(),
    }
}

#[test]
fn a_served_image_keeps_qemu_from_writing() {
    let scratch = Scratch::new("served");
    let image = image(&scratch, "a.qcow2");
    let server = serve(&image, &scratch.path("s"));
    qemu_is_kept_out(&image);
    let check = qemu_img(&["check", &image]);
    assert!(
        check.code != 0,
        "QEMU reads an image while it is written: {check}"
    );
    // Who says that he does not mind may look.
    qemu_img(&["info", "-U", &image]).ok();
    server.stop();
    op::apply("qcow2", &image, &WRITE);
}

/// The kernel takes a killed server's ring apart in its own time, and with it the files registered
/// there and their locks: it may take a moment, not more.
#[test]
fn a_crashed_server_leaves_no_lock() {
    let scratch = Scratch::new("crashed");
    let image = image(&scratch, "a.qcow2");
    serve(&image, &scratch.path("s")).kill();
    let crashed = Instant::now();
    while op::try_apply("qcow2", &image, &WRITE).code != 0 {
        assert!(
            crashed.elapsed() < Duration::from_secs(10),
            "the lock outlives its holder"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    serve(&image, &scratch.path("t")).stop();
}

#[test]
fn an_image_that_qemu_writes_is_not_opened() {
    let scratch = Scratch::new("qemu");
    let image = image(&scratch, "a.qcow2");
    let holder = Server::qemu(&image, "qcow2", &scratch.path("q"), false);
    for more in [&[][..], &["--read-only"]] {
        let run = refused_to_serve(&image, &scratch, more);
        assert!(run.stderr.contains("lock"), "says that it is locked: {run}");
    }
    gaur(&["check", &image]).refused();
    gaur(&["resize", &image, "20M"]).refused();
    gaur(&["convert", "-O", "raw", &image, &scratch.path("out.raw")]).refused();
    gaur(&["info", "-U", &image]).ok();
    drop(holder);
    gaur(&["check", &image]).ok();
}

#[test]
fn two_writers_of_ours_keep_each_other_out() {
    let scratch = Scratch::new("two");
    let image = image(&scratch, "a.qcow2");
    let first = serve(&image, &scratch.path("s"));
    refused_to_serve(&image, &scratch, &[]);
    refused_to_serve(&image, &scratch, &["--read-only"]);
    first.stop();
}

#[test]
fn readers_share_an_image_and_keep_writers_out() {
    let scratch = Scratch::new("readers");
    let image = image(&scratch, "a.qcow2");
    let ours = serve_with(&image, &scratch.path("s"), &["--read-only"]);
    let more = serve_with(&image, &scratch.path("t"), &["--read-only"]);
    let theirs = Server::qemu(&image, "qcow2", &scratch.path("q"), true);
    qemu_is_kept_out(&image);
    refused_to_serve(&image, &scratch, &[]);
    gaur(&["check", &image]).ok();
    drop(theirs);
    more.stop();
    ours.stop();
    op::apply("qcow2", &image, &WRITE);
}

#[test]
fn a_backing_file_in_use_is_not_written() {
    let scratch = Scratch::new("backing");
    let base = image(&scratch, "base.qcow2");
    let overlays = ["one.qcow2", "two.qcow2"].map(|name| scratch.path(name));
    for overlay in &overlays {
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-b",
            "base.qcow2",
            "-F",
            "qcow2",
            overlay,
        ])
        .ok();
    }
    // Two overlays of one base are served at once, each for writing.
    let first = serve(&overlays[0], &scratch.path("s"));
    let second = serve(&overlays[1], &scratch.path("t"));
    qemu_is_kept_out(&base);
    refused_to_serve(&base, &scratch, &[]);
    first.stop();
    second.stop();
    op::apply("qcow2", &base, &WRITE);
}

#[test]
fn a_raw_image_is_locked_like_any_other() {
    let scratch = Scratch::new("raw");
    let image = scratch.zeros("a.raw", 1 << 20);
    let server = serve_with(&image, &scratch.path("s"), &["--format", "raw"]);
    let run = op::try_apply("raw", &image, &WRITE);
    assert!(
        run.code != 0,
        "QEMU wrote to a raw image that is being served: {run}"
    );
    server.stop();
}

/// A program with a ring keeps its locks for a moment after it was killed. Who has killed it can open the image all the
/// same.
#[test]
fn image_of_a_killed_program_can_be_opened_at_once() {
    let scratch = Scratch::new("locking-killed");
    let image = scratch.path("image.qcow2");
    gaur(&["create", "-q", &image, "64M"]).ok();
    for round in 0..5 {
        let killed = gaur(&["qemu-io", "-c", "write 0 1M", "-c", "sigraise 9", &image]);
        assert_eq!(killed.code, 137, "{killed}");
        gaur(&["bitmap", "--add", &image, &format!("b{round}")]).ok();
    }
    gaur(&["check", "-q", "-r", "leaks", &image]).ok();
    assert_clean(&image);
}
