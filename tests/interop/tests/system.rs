//! A real distribution's root file system, served by Gaur, booted by a real kernel.

use gaur_interop::compare::{assert_same_bytes, assert_same_view};
use gaur_interop::gaur::{gaur, serve, serve_with};
use gaur_interop::guest;
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run, run_for};
use serde_json::Value;

/// The allocation map of an export as libnbd sees it, neighbours of one kind merged: where a server
/// cuts its answers is its own affair.
fn map(uri: &str) -> Vec<(u64, u64, String)> {
    let answer = run("nbdinfo", &["--map", "--json", uri]).ok().json();
    let mut merged: Vec<(u64, u64, String)> = Vec::new();
    for entry in answer.as_array().expect("a map is a list") {
        let number = |name: &str| entry[name].as_u64().expect("extents are numbers");
        let (offset, length) = (number("offset"), number("length"));
        let kind = entry["description"].as_str().unwrap_or_default().to_owned();
        match merged.last_mut() {
            Some(last) if last.2 == kind && last.0 + last.1 == offset => last.1 += length,
            _ => merged.push((offset, length, kind)),
        }
    }
    merged
}

/// The same answers to a client as `qemu-nbd` gives: bytes, map, size.
fn same_as_qemu(image: &str, scratch: &Scratch, name: &str) {
    let theirs = Server::qemu(image, "qcow2", &scratch.path(&format!("{name}.q")), true);
    let ours = serve_with(image, &scratch.path(&format!("{name}.s")), &["--read-only"]);
    assert_eq!(
        map(&ours.uri()),
        map(&theirs.uri()),
        "maps of {image}: ours, then QEMU's"
    );
    let copies = [(&ours, "ours"), (&theirs, "theirs")].map(|(server, whose)| {
        let copy = scratch.path(&format!("{name}-{whose}.raw"));
        run_for("nbdcopy", &[&server.uri(), &copy], 300).ok();
        copy
    });
    assert_same_bytes(&copies[0], &copies[1]);
    for copy in copies {
        std::fs::remove_file(copy).expect("scratch is writable");
    }
    let size = |uri: &str| run("nbdinfo", &["--size", uri]).ok().stdout;
    assert_eq!(size(&ours.uri()), size(&theirs.uri()));
    let info = run("nbdinfo", &["--json", &ours.uri()]).ok().json();
    let export = &info["exports"][0];
    assert_eq!(export["is_read_only"], Value::Bool(true), "{info}");
    ours.stop();
}

#[test]
fn a_distribution_boots_from_an_overlay_on_a_compressed_image() {
    let scratch = Scratch::new("system");
    let raw = guest::root_disk(&scratch);
    let base = scratch.path("base.qcow2");
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", &raw, &base]).ok();
    let overlay = scratch.path("overlay.qcow2");
    gaur(&[
        "create",
        "-f",
        "qcow2",
        "-b",
        "base.qcow2",
        "-F",
        "qcow2",
        &overlay,
    ])
    .ok();

    same_as_qemu(&base, &scratch, "base");
    same_as_qemu(&overlay, &scratch, "before");

    let kernel = guest::kernel(&scratch);
    let server = serve(&overlay, &scratch.path("s"));
    let guest = guest::boot(&kernel, &server.uri()).ok();
    assert!(guest.stdout.contains("GUEST DONE"), "{guest}");
    server.stop();

    assert_clean(&overlay);
    gaur(&["check", &overlay]).ok();
    same_as_qemu(&overlay, &scratch, "after");

    // Flattened by Gaur and by QEMU: the same bytes, and a file system without a fault.
    let flat = scratch.path("flat.qcow2");
    gaur(&["convert", "-O", "qcow2", &overlay, &flat]).ok();
    assert_clean(&flat);
    assert_same_view(("qcow2", &flat), ("qcow2", &overlay));
    let disk = scratch.path("disk.raw");
    gaur(&["convert", "-O", "raw", &overlay, &disk]).ok();
    run("e2fsck", &["-fn", &disk]).ok();
    for name in ["random", "packages"] {
        let file = scratch.path(name);
        run(
            "debugfs",
            &["-R", &format!("dump /gaur/{name} {file}"), &disk],
        )
        .ok();
        let sum = run("sha256sum", &[&file]).ok().stdout;
        let sum = sum.split_whitespace().next().expect("a sum and a name");
        assert!(
            guest.stdout.contains(&format!("{sum}  {name}")),
            "{name} differs: {guest}"
        );
    }
}
