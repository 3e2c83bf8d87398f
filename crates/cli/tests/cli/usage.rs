//! Help, versions, completions and wrong command lines.

use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;

use crate::workdir::{GAUR, WorkDir};

const VERBS: [&str; 14] = [
    "serve",
    "export",
    "ublk",
    "create",
    "info",
    "check",
    "map",
    "convert",
    "compare",
    "resize",
    "snapshot",
    "bench",
    "completions",
    "man",
];

#[test]
fn every_verb_has_help() {
    let dir = WorkDir::new();
    let all = dir.gaur(&["--help"]).ok();
    for verb in VERBS {
        // `completions` and `man` were missing from the help.
        assert!(all.contains(&format!("\n  {verb} ")), "{verb}: {all}");
        let help = dir.gaur(&[verb, "--help"]).ok();
        assert!(help.contains("Usage: gaur"), "{help}");
        assert_eq!(dir.gaur(&["help", verb]).ok(), help);
    }
    assert!(dir.gaur(&["--version"]).ok().starts_with("gaur "));
}

#[test]
fn completions_and_manual_pages_are_made_from_the_command_line() {
    let dir = WorkDir::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = dir.gaur(&["completions", shell]).ok();
        assert!(
            script.contains("compare") && script.contains("force-share"),
            "{shell}"
        );
    }
    assert!(dir.gaur(&["man"]).ok().contains(".TH gaur"));
    assert!(dir.gaur(&["man", "serve"]).ok().contains("persistent"));
    std::fs::create_dir(dir.path("man1")).expect("a directory");
    dir.gaur(&["man", "--to", "man1"]).ok();
    for (page, words) in [
        ("gaur.1", &["man"][..]),
        ("gaur-export-add.1", &["man", "export", "add"]),
        ("gaur-snapshot-create.1", &["man", "snapshot", "create"]),
    ] {
        let written = String::from_utf8(dir.read(&format!("man1/{page}"))).expect("text");
        assert_eq!(written, dir.gaur(words).ok());
    }
    dir.gaur(&["man", "export", "nope"])
        .fails(1, &["'gaur export' has no verb 'nope'"]);
}

/// Lines of several threads came out in each other: a line was as many writes as it had pieces. A
/// datagram socket shows what one write is.
#[test]
fn a_line_on_standard_error_is_one_write() {
    let dir = WorkDir::new();
    let (ours, theirs) = UnixDatagram::pair().expect("sockets");
    let mut command = dir.command(GAUR, &["info", "miss\ning"]);
    let status = command.stderr(Stdio::from(OwnedFd::from(theirs))).status();
    assert_eq!(status.expect("gaur runs").code(), Some(1));
    drop(command);
    let mut line = [0; 200];
    let len = ours.recv(&mut line).expect("a line");
    assert_eq!(
        &line[..len],
        b"gaur: miss\\ning: no such file or directory\n"
    );
    ours.set_nonblocking(true).expect("a socket");
    assert!(!matches!(ours.recv(&mut line), Ok(1..)), "that was all");
}

/// `gaur ublk del` stood beside `gaur export remove` and `gaur snapshot delete`.
#[test]
fn remove_verbs_have_the_same_aliases() {
    let dir = WorkDir::new();
    for verb in ["export", "ublk", "snapshot"] {
        for word in ["remove", "delete", "del"] {
            let help = dir.gaur(&[verb, word, "--help"]).ok();
            assert!(help.contains(&format!("Usage: gaur {verb}")), "{help}");
        }
    }
}

#[test]
fn usage_error_is_one_line() {
    let dir = WorkDir::new();
    dir.gaur(&["frobnicate"])
        .fails(1, &["frobnicate", "--help"]);
    dir.gaur(&["info", "--output=xml", "x"])
        .fails(1, &["xml", "human", "json"]);
    dir.gaur(&["info"]).fails(1, &["FILE", "gaur info --help"]);
    dir.gaur(&["create", "x", "big"])
        .fails(1, &["big", "not a size"]);
    dir.gaur(&["serve", "--cache=some", "x"])
        .fails(1, &["none", "writeback", "unsafe"]);
}

#[test]
fn under_the_name_of_qemu_img_the_verbs_work_the_same() {
    let dir = WorkDir::new();
    symlink(GAUR, dir.path("my-qemu-img")).expect("a link");
    let alias = dir.path("my-qemu-img");
    let run = |args: &[&str]| dir.command(&alias, args).output().expect("the alias runs");
    assert!(
        run(&["create", "-f", "qcow2", "disk.qcow2", "1M"])
            .status
            .success()
    );
    let info = run(&["info", "disk.qcow2"]);
    assert_eq!(
        info.stdout,
        dir.qemu_img(&["info", "disk.qcow2"]).out.as_bytes()
    );
    let error = run(&["info", "missing"]).stderr;
    assert!(
        error.starts_with(b"my-qemu-img: "),
        "{}",
        String::from_utf8_lossy(&error)
    );
}

#[test]
fn closed_stdout_ends_the_command_quietly() {
    let dir = WorkDir::new();
    let line = "\"$0\" completions bash | head -c 1";
    let output = dir
        .command("bash", &["-c", line, GAUR])
        .output()
        .expect("bash runs");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
