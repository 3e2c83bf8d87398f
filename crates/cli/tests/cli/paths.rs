//! Paths as the system has them: bytes that need not be text, colons, sockets of any length.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::Output;

use crate::server::{Server, client};
use crate::workdir::{GAUR, WorkDir};

/// `mü.qcow2` as a Latin-1 system writes it, which is no UTF-8.
const BASE: &[u8] = b"m\xfc.qcow2";
const OVERLAY: &[u8] = b"\xe9\xff.qcow2";

fn os(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

/// Runs the command with words that may be any bytes.
fn gaur(dir: &WorkDir, words: &[&[u8]]) -> Output {
    let words = words.iter().map(|word| os(word));
    let output = dir.command(GAUR, &[]).args(words).output();
    output.expect("gaur runs")
}

#[track_caller]
fn ok(dir: &WorkDir, words: &[&[u8]]) -> Vec<u8> {
    let output = gaur(dir, words);
    assert!(output.status.success(), "{words:?}: {output:?}");
    output.stdout
}

#[track_caller]
fn refused(dir: &WorkDir, words: &[&[u8]], wanted: &str) {
    let output = gaur(dir, words);
    let line = String::from_utf8(output.stderr).expect("what is said is text");
    assert!(!output.status.success(), "{words:?}");
    assert_eq!(line.lines().count(), 1, "{line}");
    assert!(line.contains(wanted), "{line}");
}

/// A user had images from a Latin-1 system: each verb said "invalid UTF-8 was detected in one or more
/// arguments", and an overlay of one that QEMU opened was "not valid UTF-8".
#[test]
fn image_paths_may_be_any_bytes() {
    let dir = WorkDir::new();
    ok(&dir, &[b"create", BASE, b"1M"]);
    ok(&dir, &[b"create", b"-b", BASE, b"-F", b"qcow2", OVERLAY]);
    let theirs = dir.command("qemu-img", &["info", "--backing-chain"]);
    let theirs = { theirs }.arg(os(OVERLAY)).output().expect("qemu-img runs");
    assert!(theirs.status.success(), "{theirs:?}");
    ok(&dir, &[b"info", b"--backing-chain", OVERLAY]);
    ok(&dir, &[b"check", OVERLAY]);
    ok(&dir, &[b"map", OVERLAY]);
    ok(&dir, &[b"bench", b"-w", b"-c", b"10", OVERLAY]);
    ok(&dir, &[b"resize", OVERLAY, b"+1M"]);
    ok(&dir, &[b"snapshot", b"create", OVERLAY, b"name"]);
    ok(&dir, &[b"snapshot", b"-l", OVERLAY]);
    ok(&dir, &[b"convert", OVERLAY, b"\xfe.raw"]);
    ok(&dir, &[b"compare", OVERLAY, b"\xfe.raw"]);
    ok(
        &dir,
        &[
            b"convert",
            b"-B",
            BASE,
            b"-F",
            b"qcow2",
            OVERLAY,
            b"\xfd.qcow2",
        ],
    );
    ok(&dir, &[b"map", b"\xfd.qcow2"]);
    std::fs::write(dir.path("state"), [7; 1000]).expect("a file");
    ok(
        &dir,
        &[b"snapshot", b"save", OVERLAY, b"s", b"--state", b"state"],
    );
    ok(
        &dir,
        &[b"snapshot", b"extract", OVERLAY, b"s", b"--to", b"\xff.out"],
    );
    let extracted = std::fs::read(dir.path("").join(os(b"\xff.out")));
    assert_eq!(extracted.expect("the state"), [7; 1000]);
    // What QEMU names so is found as well.
    let made = dir.command(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"],
    );
    let made = { made }.arg(os(BASE)).arg("theirs.qcow2").status();
    assert!(made.expect("qemu-img runs").success());
    ok(&dir, &[b"map", b"theirs.qcow2"]);
}

#[test]
fn socket_paths_may_be_any_bytes() {
    let dir = WorkDir::new();
    ok(&dir, &[b"create", BASE, b"1M"]);
    let args = ["-t", "-k"];
    let server = Server::start_with(&dir, &args, |command| {
        command.args([&b"s\xff"[..], b"--control", b"c\xff", BASE].map(os));
    });
    assert!(server.uri.ends_with("s%FF"), "{}", server.uri);
    client(&dir, "nbdinfo", &["--size", &server.uri]);
    ok(&dir, &[b"export", b"list", b"--control", b"c\xff"]);
    refused(
        &dir,
        &[b"export", b"add", b"--control", b"c\xff", BASE],
        "is not valid UTF-8, and it is told to the server in JSON",
    );
    // Paths of other sockets and files go the same way.
    dir.gaur(&["create", "-q", "d.qcow2", "1M"]).ok();
    for switch in [&b"--vhost-user"[..], b"--fuse", b"--handover"] {
        refused(
            &dir,
            &[
                b"export",
                b"add",
                b"--control",
                b"c\xff",
                switch,
                b"\xff",
                b"d.qcow2",
            ],
            "a path is not valid UTF-8, and it is told to the server in JSON",
        );
    }
    server.stop();
}

#[test]
fn non_utf8_name_is_refused() {
    let dir = WorkDir::new();
    ok(&dir, &[b"create", b"d.qcow2", b"1M"]);
    let name = [&b"snapshot"[..], b"create", b"d.qcow2", b"n\xff"];
    refused(
        &dir,
        &name,
        "n\u{fffd}: not valid UTF-8, which a snapshot's name must be",
    );
    refused(
        &dir,
        &[b"create", b"-o", b"\xff=1", b"x", b"1M"],
        "'\u{fffd}=1' is not valid UTF-8",
    );
    refused(&dir, &[b"info", b"json:\xff"], "options are text");
    refused(
        &dir,
        &[b"info", b"--image-opts", b"file.filename=\xff"],
        "options are text",
    );
    refused(&dir, &[b"ublk", b"add", BASE], "is not valid UTF-8");
}

/// `gaur create -b c:d.qcow2` made an overlay that neither Gaur nor QEMU could open: in a header, what
/// stands before a colon is a protocol.
#[test]
fn a_backing_file_with_a_colon_is_named_so_that_it_can_be_opened() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "c:d.qcow2", "1M"]).ok();
    let over = |switches: &[&str], base: &str| {
        let words = [
            &["create", "-q", "-F", "qcow2"],
            switches,
            &["-b", base, "top.qcow2", "1M"],
        ];
        dir.gaur(&words.concat())
    };
    for switches in [&[][..], &["-u"]] {
        over(switches, "c:d.qcow2").fails(1, &["protocol \"c\"", "./c:d.qcow2"]);
    }
    over(&[], "ssh://host/x").fails(1, &["protocol \"ssh\" is not supported"]);
    assert!(!dir.path("top.qcow2").exists());
    // Without a look QEMU's protocols are written as they are.
    over(&["-u"], "nbd://host/x").ok();
    over(&[], "./c:d.qcow2").ok();
    dir.gaur(&["map", "top.qcow2"]).ok();
    dir.qemu_img(&["map", "top.qcow2"]).ok();
    dir.gaur(&[
        "convert",
        "-B",
        "c:d.qcow2",
        "-F",
        "qcow2",
        "top.qcow2",
        "x.qcow2",
    ])
    .fails(1, &["./c:d.qcow2"]);
}

/// A socket in a deep folder: "error 36".
#[test]
fn a_socket_path_that_is_too_long_is_told_with_its_limit() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "d.qcow2", "1M"]).ok();
    let long = PathBuf::from("/tmp").join("x".repeat(120));
    let long = long.to_str().expect("text");
    let limit = "at most 107 bytes, and this has 125";
    dir.gaur(&["serve", "-k", long, "d.qcow2"])
        .fails(1, &[limit, "xxx"]);
    dir.gaur(&["serve", "--control", long, "d.qcow2"])
        .fails(1, &[limit, "--control"]);
    dir.gaur(&["serve", "--vhost-user", long, "d.qcow2"])
        .fails(1, &[limit]);
    dir.gaur(&["export", "list", "--control", long])
        .fails(1, &[limit]);
    dir.gaur(&["snapshot", "list", "--control", long])
        .fails(1, &[limit]);
}

#[test]
fn path_errors_are_explained() {
    let dir = WorkDir::new();
    let long = "x".repeat(300);
    std::fs::write(dir.path("file"), "").expect("a file");
    std::os::unix::fs::symlink("loop", dir.path("loop")).expect("a link");
    for (path, words) in [
        (long.as_str(), "the name is too long"),
        ("file/x", "not a directory"),
        ("loop", "symbolic links"),
        (".", "is a directory"),
        ("", "no such file"),
    ] {
        dir.gaur(&["info", path]).fails(1, &[words]);
        dir.gaur(&["create", "-f", "qcow2", path, "1M"])
            .fails(1, &["cannot create", words]);
    }
}
